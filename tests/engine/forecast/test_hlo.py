"""Cost from HLO text, cut from what libtpu 0.0.42 wrote; and FLOPs from jaxprs."""

import jax
import jax.numpy as jnp
import pytest

import benchmarks
from configs import resnet50
from engine.forecast import hlo
from engine.forecast.flops import count_flops

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


def test_cycles_and_collectives_of_a_recorded_program():
    cost = hlo.cost(SNIPPET)
    assert cost.cycles == 50 + 4 * 1000  # the fusion's, not what is inside
    assert cost.collectives == {
        "all-reduce": (1 + 4, 4 * (64 + 7 * 7 * 3 * 64) + 64 + 4 * 32),
        "all-gather": (1, 256),
    }
    assert (cost.loops, cost.unknown_loops) == (1, 0)


def test_the_cycles_have_names_and_say_what_multiplies():
    text = SNIPPET.replace(
        'calls=%fused_computation.1, backend_config={"flag_configs"',
        'calls=%fused_computation.9, metadata={op_name="jit(step)/head/dot"}, '
        'backend_config={"flag_configs"',
    ).replace(
        "%wide.condition.2 (wide",
        "%fused_computation.9 (x: f32[64]) -> f32[64] {\n"
        "  ROOT %c.1 = f32[64]{0:T(256)} convolution(%x, %x), dim_labels=bf_io->bf\n}\n\n"
        "%wide.condition.2 (wide",
    )
    assert text.count("fused_computation.9") == 2
    assert hlo.cost(text).names == {"": (4000, 0), "jit(step)/head/dot": (50, 50)}


def test_how_often_a_loop_runs():
    """What the compiler says counts first; a loop without a limit counts once."""
    text = SNIPPET.replace(
        'metadata={op_name="jit(step)/while"}',
        'backend_config={"known_trip_count":{"n":"7"},"estimated_cycles":"0"}',
    )
    assert hlo.cost(text).cycles == 50 + 7 * 1000
    endless = hlo.cost(SNIPPET.replace("constant(4)", "parameter(1)"))
    assert (endless.cycles, endless.loops, endless.unknown_loops) == (1050, 1, 1)


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
    assert hlo.cost(BRANCHES).cycles == 550
    three = BRANCHES.replace("%dear.2}", "%dear.2, %dear.2}")
    assert hlo.cost(three).cycles == 700
    tenth = BRANCHES.replace("jit(step)/cond", "jit(step)/one_step_in_10/cond")
    assert hlo.cost(tenth).cycles == 90 + 100


def test_a_program_of_this_machine():
    """The CPU's compiler estimates no cycles; the text has the same form."""
    text = jax.jit(lambda x: jnp.tanh(x) @ x).lower(jnp.ones((8, 8))).compile().as_text()
    cost = hlo.cost(text or "")
    assert cost.moved > 0 and cost == hlo.Cost(0, {}, 0, 0, {}, cost.moved)


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
    assert hlo.cost(text).moved == 2 * block + block + block + 2 * block + block


# FLOPs.


def shaped(*sides):
    return jax.ShapeDtypeStruct(sides, jnp.float32)


def test_flops_of_matrix_products_and_loops():
    assert count_flops(jnp.matmul, shaped(3, 4), shaped(4, 5)) == 2 * 3 * 4 * 5
    assert count_flops(jax.jit(jnp.matmul), shaped(2, 3, 4), shaped(2, 4, 5)) == 2 * 2 * 3 * 4 * 5

    def powers(x):
        return jax.lax.scan(lambda y, _: (y @ x, None), x, None, length=6)[0]

    assert count_flops(powers, shaped(4, 4)) == 6 * 2 * 4**3

    def either(x):
        return jax.lax.cond(x[0, 0] > 0, lambda: x, lambda: x @ x)

    assert count_flops(either, shaped(4, 4)) == 2 * 4**3

    def by_platform(x):  # a form for some hardware is not the definition
        return jax.lax.platform_dependent(x, tpu=lambda x: x @ x @ x, default=lambda x: x @ x)

    assert count_flops(by_platform, shaped(4, 4)) == 2 * 4**3

    def endless(x):
        return jax.lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y @ x, x)

    assert count_flops(endless, shaped(4, 4)) is None


def test_flops_of_convolutions():
    def convolve(x, kernel, groups=1):
        return jax.lax.conv_general_dilated(
            x, kernel, (2, 2), "SAME", feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    expected = 2 * (2 * 4 * 4 * 6) * (3 * 3 * 4)
    assert count_flops(convolve, shaped(2, 8, 8, 4), shaped(3, 3, 4, 6)) == expected
    grouped = count_flops(lambda x, k: convolve(x, k, 2), shaped(2, 8, 8, 4), shaped(3, 3, 2, 6))
    assert grouped == expected // 2


def test_flops_of_resnet_50(tmp_path):
    """4.09 billion multiplications and additions for one image of 224 x 224, as published."""
    benchmark = benchmarks.load(resnet50.get_config().lock(), str(tmp_path))
    weights = jax.eval_shape(benchmark.init, jax.random.key(0))
    count = count_flops(benchmark.predict, *weights, *benchmark.batch_spec("eval", 1))
    assert count == pytest.approx(2 * 4.09e9, rel=0.001)
