"""The operations of HLO texts: cut from what libtpu 0.0.42 wrote, or of this machine's compiler."""

import jax
import jax.numpy as jnp
import pytest

from engine.forecast import operations
from engine.forecast.operations import Operations
from tests.engine.forecast.test_estimates import V3

SNIPPET = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[64]{0:T(256)})->f32[]}

%fused_computation.1 (param_0.1: f32[64]) -> f32[64] {
  %param_0.1 = f32[64]{0:T(256)} parameter(0)
  ROOT %add.9 = f32[64]{0:T(256)} add(%param_0.1, %param_0.1), \
backend_config={"estimated_cycles":"77777"}
}

%wide.condition.2 (wide.param.3: (s32[], f32[64])) -> pred[] {
  %constant.6 = s32[]{:T(256)} constant(4), metadata={op_name="jit(step)/shard_map"}
  %wide.param.3 = (s32[]{:T(256)}, f32[64]{0:T(256)}) parameter(0)
  %get-tuple-element.5 = s32[]{:T(256)} get-tuple-element(%wide.param.3), index=0
  ROOT %lt.11 = pred[]{:T(1024)} compare(%get-tuple-element.5, %constant.6), direction=LT
}

%wide.body.7 (wide.param.8: (s32[], f32[64])) -> (s32[], f32[64]) {
  %fusion.2 = f32[64]{0:T(256)} fusion(%wide.param.8), kind=kLoop, \
calls=%fused_computation.1, backend_config={"estimated_cycles":"1000"}
  %psum.2 = f32[8]{0:T(256)} all-reduce(%fusion.2), channel_id=3, to_apply=%region_9.10
}

%region_9.10 (psum.0: f32[], psum.1: f32[]) -> f32[] {
  ROOT %add.20 = f32[]{:T(256)} add(%psum.0, %psum.1)
}

ENTRY %main.704_spmd (param.272: s32[], param.273: f32[64]) -> f32[] {
  %while.1 = (s32[]{:T(256)}, f32[64]{0:T(256)}) while(%tuple.544), \
condition=%wide.condition.2, body=%wide.body.7, metadata={op_name="jit(step)/while"}
  %convolution_fusion = (bf16[64]{0:T(256)}, f32[2,64]{1,0:T(8,128)(2,1)}) fusion(%x), \
kind=kOutput, calls=%fused_computation.1, \
backend_config={"flag_configs":[],"window_config":{},"estimated_cycles":"50","iteration_bounds":[]}
  %all-reduce = (f32[64]{0:T(256)}, f32[7,7,3,64]{3,1,2,0:T(8,128)}, pred[64]{0:T(256)}) \
all-reduce(%a, %b, %c), channel_id=1, replica_groups={{0,1}}, to_apply=%region_9.10
  %all-gather-start = (bf16[16]{0:T(256)}, bf16[128]{0:T(256)}) all-gather-start(%d), channel_id=2
  %all-gather-done = bf16[128]{0:T(256)} all-gather-done(%all-gather-start)
  ROOT %custom-call.1 = s32[2]{0:T(256)} custom-call(%e), custom_call_target="ConcatBitcast"
}
"""


def read(text: str) -> Operations:
    return operations.read(text, V3, {})


def cycles(text: str) -> float:
    return sum(operation.times * (operation.cycles or 0) for operation in read(text).all)


def test_cycles_and_collectives_of_a_recorded_program():
    assert cycles(SNIPPET) == 50 + 4 * 1000  # the fusion's, not what is inside
    found = read(SNIPPET)
    # A ring of n devices sends (n - 1) / n of the bytes in each of an all-reduce's two rounds.
    pair = 2 * (4 * (64 + 7 * 7 * 3 * 64) + 64) / 2
    assert found.collectives == {
        "all-reduce": (1 + 4, pair + 4 * 2 * 32 * 7 / 8),
        "all-gather": (1, 256 * 7 / 8),
    }
    assert found.unknown_loops == 0


def test_operations_have_scopes_and_say_what_multiplies():
    text = SNIPPET.replace(
        'calls=%fused_computation.1, backend_config={"flag_configs"',
        'calls=%fused_computation.9, metadata={op_name="jit(step)/head/dot"}, '
        'backend_config={"flag_configs"',
    ).replace(
        "%wide.condition.2 (wide",
        "%fused_computation.9 (x: f32[6,5], y: f32[5,7]) -> f32[6,7] {\n"
        "  %x = f32[6,5]{1,0} parameter(0)\n  %y = f32[5,7]{1,0} parameter(1)\n"
        "  ROOT %c.1 = f32[6,7]{1,0} convolution(%x, %y), dim_labels=bf_io->bf\n}\n\n"
        "%wide.condition.2 (wide",
    )
    assert text.count("fused_computation.9") == 2
    with_cycles = {x.scopes: (x.times, x.flops) for x in read(text).all if x.cycles}
    assert with_cycles == {"": (4, 0), "jit(step)/head/dot": (1, 2 * 6 * 5 * 7)}


def test_how_often_a_loop_runs():
    """What the compiler says counts first; a loop without a limit counts once."""
    text = SNIPPET.replace(
        'metadata={op_name="jit(step)/while"}',
        'backend_config={"known_trip_count":{"n":"7"},"estimated_cycles":"0"}',
    )
    assert cycles(text) == 50 + 7 * 1000
    endless = SNIPPET.replace("constant(4)", "parameter(1)")
    assert (cycles(endless), read(endless).unknown_loops) == (1050, 1)


BRANCHES = """\
%cheap.1 (x: f32[8]) -> f32[8] {
  ROOT %a.1 = f32[8]{0} fusion(%x), calls=%f, backend_config={"estimated_cycles":"100"}
}

%dear.2 (x: f32[8]) -> f32[8] {
  ROOT %a.2 = f32[8]{0} fusion(%x), calls=%f, backend_config={"estimated_cycles":"1000"}
}

ENTRY %main.3 (x: f32[8], i: s32[]) -> f32[8] {
  ROOT %cond.1 = (f32[8]{0}) conditional(%i, %t, %t), branch_computations={%cheap.1, %dear.2}, \
metadata={op_name="jit(step)/cond"}
}
"""


def test_one_branch_of_a_conditional_runs():
    assert cycles(BRANCHES) == 550
    three = BRANCHES.replace("%dear.2}", "%dear.2, %dear.2}")
    assert cycles(three) == 700
    tenth = BRANCHES.replace("jit(step)/cond", "jit(step)/one_step_in_10/cond")
    assert cycles(tenth) == 90 + 100


def test_a_program_of_this_machine():
    """The CPU's compiler estimates no cycles; the text has the same form."""
    text = jax.jit(lambda x: jnp.tanh(x) @ x).lower(jnp.ones((8, 8))).compile().as_text()
    found = read(text or "")
    assert cycles(text or "") == 0 and sum(x.moved for x in found.all) > 0
    (product,) = [x for x in found.all if x.flops]
    assert product.flops == 2 * 8**3
    assert product.place.startswith(f"{__file__}:")


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_flops_of_convolutions_and_their_gradients(stride, padding, groups):
    """A convolution and both of its gradients pair the same values with the same weights."""

    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), padding, feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    def flops(function, *arguments):
        lowered = jax.jit(function).lower(*arguments)
        return sum(x.times * x.flops for x in read(lowered.compile().as_text() or "").all)

    x, kernel = jnp.ones((2, 9, 9, 4)), jnp.ones((3, 3, 4 // groups, 6))
    results = convolve(x, kernel)
    # Each result of a row or column is a sum over the positions of its window inside of the image.
    before = 0 if padding == "VALID" else (3 - stride + 1 - (9 - 1) % stride) // 2
    taps = sum(0 <= i * stride - before + k < 9 for i in range(results.shape[1]) for k in range(3))
    expected = 2 * 2 * 6 * (4 // groups) * taps**2
    assert flops(convolve, x, kernel) == expected

    def gradient(argument):
        return lambda x, kernel, dy: jax.vjp(convolve, x, kernel)[1](dy)[argument]

    for argument in (0, 1):
        assert flops(gradient(argument), x, kernel, results) == expected


def test_what_moves_through_the_memory():
    text = """\
%dus.1 (p.1: f32[64,128], p.2: f32[8,128], p.3: s32[]) -> f32[64,128] {
  %p.1 = f32[64,128]{1,0:T(8,128)} parameter(0)
  %p.2 = f32[8,128]{1,0:T(8,128)} parameter(1)
  ROOT %d.1 = f32[64,128]{1,0:T(8,128)} dynamic-update-slice(%p.1, %p.2, %p.3, %p.3)
}

%read.2 (q.1: f32[64,128], q.2: s32[]) -> f32[8,128] {
  %q.1 = f32[64,128]{1,0:T(8,128)} parameter(0)
  %s.1 = f32[8,128]{1,0:T(8,128)} dynamic-slice(%q.1, %q.2, %q.2), dynamic_slice_sizes={8,128}
  ROOT %t.1 = f32[8,128]{1,0:T(8,128)} tanh(%s.1)
}

ENTRY %main.1 (x.1: f32[64,128], y.1: f32[8,128], i.1: s32[]) -> f32[8,128] {
  %x.1 = f32[64,128]{1,0:T(8,128)} parameter(0)
  %y.1 = f32[8,128]{1,0:T(8,128)} parameter(1)
  %i.1 = s32[]{:T(256)S(2)} parameter(2)
  %a.1 = f32[64,128]{1,0:T(8,128)} fusion(%x.1, %y.1, %i.1), kind=kLoop, calls=%dus.1
  %b.1 = f32[8,128]{1,0:T(8,128)S(1)} fusion(%a.1, %i.1), kind=kLoop, calls=%read.2
  %c.1 = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%y.1)
  %d.1 = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%c.1)
  %e.1 = ((f32[64,128]{1,0:T(8,128)}), f32[16,128]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) \
slice-start(%x.1), slice={[0:16], [0:128]}
  ROOT %n.1 = f32[8,3]{1,0:T(8,128)} negate(%d.1)
}
"""
    block = 8 * 128 * 4
    # The update is read and written; a slice is read; a copy and a slice go to the core's memory.
    # The narrow result fills a tile.
    moved = sum(operation.moved for operation in read(text).all)
    assert moved == 2 * block + block + block + 2 * block + block
