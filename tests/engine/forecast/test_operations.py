"""The operations of HLO texts: cut from what libtpu 0.0.42 wrote, or of this machine's compiler."""

import jax
import jax.numpy as jnp
import pytest

from engine.forecast import operations
from engine.forecast.operations import Operations
from tests.engine.forecast.test_estimates import V3, V5E

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
  %wide.param.8 = (s32[]{:T(256)}, f32[64]{0:T(256)}) parameter(0)
  %get-tuple-element.7 = s32[]{:T(256)} get-tuple-element(%wide.param.8), index=0
  %constant.7 = s32[]{:T(256)} constant(1)
  %add.7 = s32[]{:T(256)} add(%get-tuple-element.7, %constant.7)
  ROOT %tuple.7 = (s32[]{:T(256)}, f32[64]{0:T(256)}) tuple(%add.7, %fusion.2)
}

%region_9.10 (psum.0: f32[], psum.1: f32[]) -> f32[] {
  ROOT %add.20 = f32[]{:T(256)} add(%psum.0, %psum.1)
}

ENTRY %main.704_spmd (param.272: s32[], param.273: f32[64]) -> f32[] {
  %constant.8 = s32[]{:T(256)} constant(0)
  %copy.8 = s32[]{:T(256)} copy(%constant.8)
  %tuple.544 = (s32[]{:T(256)}, f32[64]{0:T(256)}) tuple(%copy.8, %param.273)
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


@pytest.mark.parametrize(
    ("change", "trips"),
    [
        (("constant(0)", "constant(1)"), 3),  # from 1 to 4
        (("%constant.7 = s32[]{:T(256)} constant(1)", "%constant.7 = s32[] constant(3)"), 2),
        (("direction=LT", "direction=NE"), None),
        (("ROOT %lt.11 = pred[]{:T(1024)} compare(", "ROOT %lt.11 = pred[] and("), None),
        (("add(%get-tuple-element.7, %constant.7)", "add(%get-tuple-element.7, %x)"), None),
        (("copy(%constant.8)", "copy(%param.272)"), None),
    ],
)
def test_a_loop_is_counted_if_it_counts_by_constants(change, trips):
    text = SNIPPET.replace(*change)
    assert text != SNIPPET
    assert cycles(text) == 50 + (trips or 1) * 1000
    assert read(text).unknown_loops == (trips is None)


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
    assert cycles(BRANCHES) == 550 and read(BRANCHES).branches == 1
    three = BRANCHES.replace("%dear.2}", "%dear.2, %dear.2}")
    assert cycles(three) == 700
    either = BRANCHES.replace(
        "branch_computations={%cheap.1, %dear.2}",
        "true_computation=%dear.2, false_computation=%cheap.1",
    )
    assert cycles(either) == 550
    assert cycles(either.replace("jit(step)/cond", "one_step_in_10/cond")) == 90 + 100
    tenth = BRANCHES.replace("jit(step)/cond", "jit(step)/one_step_in_10/cond")
    assert cycles(tenth) == 90 + 100 and read(tenth).branches == 0


@pytest.mark.usefixtures("lines_in_programs")
def test_a_program_of_this_machine():
    """The CPU's compiler estimates no cycles; the text has the same form."""
    text = jax.jit(lambda x: jnp.tanh(x) @ x).lower(jnp.ones((8, 8))).compile().as_text()
    found = read(text or "")
    assert cycles(text or "") == 0 and sum(x.moved for x in found.all) > 0
    (product,) = [x for x in found.all if x.flops]
    assert product.flops == 2 * 8**3
    assert product.place.startswith(f"{__file__}:")


NESTED = """\
%inner.1 (p.1: bf16[32,2048,2048], p.2: s32[]) -> bf16[2048,2048] {
  %p.1 = bf16[32,2048,2048]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p.2 = s32[]{:T(128)} parameter(1)
  %s.1 = bf16[1,2048,2048]{2,1,0:T(8,128)(2,1)} dynamic-slice(%p.1, %p.2, %p.2, %p.2)
  ROOT %b.1 = bf16[2048,2048]{1,0:T(8,128)(2,1)} bitcast(%s.1)
}

%outer.2 (q.1: bf16[8,2048], q.2: bf16[32,2048,2048], q.3: s32[]) -> bf16[8,2048] {
  %q.1 = bf16[8,2048]{1,0:T(8,128)(2,1)} parameter(0)
  %q.2 = bf16[32,2048,2048]{2,1,0:T(8,128)(2,1)} parameter(1)
  %q.3 = s32[]{:T(128)} parameter(2)
  %f.1 = bf16[2048,2048]{1,0:T(8,128)(2,1)} fusion(%q.2, %q.3), kind=kLoop, calls=%inner.1
  ROOT %c.1 = bf16[8,2048]{1,0:T(8,128)(2,1)} convolution(%q.1, %f.1), dim_labels=bf_io->bf
}

%scatter.3 (r.1: f32[500000,128], r.2: s32[4096], r.3: f32[4096,128]) -> f32[500000,128] {
  %r.1 = f32[500000,128]{1,0:T(8,128)} parameter(0)
  %r.2 = s32[4096]{0:T(1024)} parameter(1)
  %r.3 = f32[4096,128]{1,0:T(8,128)} parameter(2)
  ROOT %w.1 = f32[500000,128]{1,0:T(8,128)} scatter(%r.1, %r.2, %r.3), to_apply=%add
}

ENTRY %main.1 (x: bf16[8,2048], w: bf16[32,2048,2048], i: s32[]) -> bf16[8,2048] {
  %x = bf16[8,2048]{1,0:T(8,128)(2,1)} parameter(0)
  %w = bf16[32,2048,2048]{2,1,0:T(8,128)(2,1)} parameter(1)
  %i = s32[]{:T(128)} parameter(2)
  %t = f32[500000,128]{1,0:T(8,128)} parameter(3)
  %n = s32[4096]{0:T(1024)} parameter(4)
  %u = f32[4096,128]{1,0:T(8,128)} parameter(5)
  %table = f32[500000,128]{1,0:T(8,128)} fusion(%t, %n, %u), kind=kCustom, calls=%scatter.3
  ROOT %y = bf16[8,2048]{1,0:T(8,128)(2,1)} fusion(%x, %w, %i), kind=kOutput, calls=%outer.2
}
"""


def test_what_is_sliced_inside_of_a_fusion_in_a_fusion_counts_as_a_slice():
    """A layer's weights of a stack; and rows of a table that is updated in place."""
    found = {operation.name: operation for operation in read(NESTED).all}
    assert found["y"].moved == 2 * 2048 * 2048 + 2 * (2 * 8 * 2048) + 4  # the index, too
    assert found["y"].flops == 2 * 8 * 2048 * 2048
    rows = 4 * 4096 * 128
    assert found["table"].moved == 2 * rows + 4 * 4096


def test_products_of_integers_are_twice_as_fast_where_the_chip_says_so():
    text = NESTED.replace("bf16[", "s8[").replace("(2,1)", "")
    (v5e,) = [x for x in operations.read(text, V5E, {}).all if x.flops]
    (v3,) = [x for x in read(text).all if x.flops]
    assert (v5e.flops, v5e.bf16_flops) == (v3.flops, v3.flops / 2)
    assert v3.bf16_flops == v3.flops


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
