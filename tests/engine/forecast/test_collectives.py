"""Collectives of compiled programs on the links of a slice, against values computed by hand."""

import pytest

from engine.forecast import collectives, hlo
from engine.forecast.topology import Topology, parse_slices

V5E = parse_slices("v5e:2x4")[0]
MEGABYTES = "f32[25000000]"  # 100 of them


def read(
    line: str,
    topology: Topology,
    more: str = "",
    coordinates: collectives.Coordinates | None = None,
) -> list[collectives.Collective]:
    """The collectives of a program of one instruction, and of others in `more`."""
    text = f"{more}\nENTRY %main (x: f32[8]) -> f32[8] {{\n  {line}\n}}"
    computations, entry = hlo.parse_computations(text)
    inside = computations[entry or ""]
    found = (
        collectives.read(x, inside, computations, topology, coordinates) for x in inside.values()
    )
    return [x for x in found if x]


def seconds(line: str, topology: str) -> float:
    (found,) = read(line, parse_slices(topology)[0])
    return found.seconds


@pytest.mark.parametrize(
    "spelling, expected",
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=1,'c'=4] {'a','c'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['a'=8] {'a':(2)4}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", [[3, 2], [1, 0]]),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]<=[2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
    ],
)
def test_replica_groups(spelling: str, expected: list[list[int]]) -> None:
    line = f"x = f32[] all-reduce(y), replica_groups={spelling}, use_global_device_ids=true"
    assert collectives.replica_groups(line, 8) == expected


def test_all_reduce_over_all_chips_of_a_host() -> None:
    """7/8 of 100 MB twice, on two links of 50 GB/s; 1 + 3 hops twice."""
    line = f"%r = {MEGABYTES} all-reduce(%x), replica_groups=[1,8]<=[8], to_apply=%add"
    (found,) = read(line, V5E)
    assert found.kind == "all-reduce" and found.devices == 8 and not found.is_asynchronous
    assert found.sent == 175_000_000
    assert found.seconds == pytest.approx(175e6 / 100e9 + 8e-6)


@pytest.mark.parametrize(
    "line, topology, expected",
    [
        # The compiler's own choice of one ring halves the rate.
        ("all-gather(%x), replica_groups={}, x={colors:1 ", "v5e:2x4", 87.5e6 / 50e9 + 4e-6),
        ("all-gather(%x), replica_groups={}", "v4:2x2x2", 87.5e6 / 135e9 + 3e-6),
        # Sides of 4 chips are joined in v4 if all are: two directions per axis, half the hops.
        ("all-gather(%x), replica_groups={}", "v4:4x4x4", 63 / 64 * 100e6 / 270e9 + 6e-6),
        ("all-gather(%x), replica_groups={}", "v4:2x4x4", 31 / 32 * 100e6 / 135e9 + 7e-6),
        ("all-gather(%x), replica_groups={}", "v5e:16x16", 255 / 256 * 100e6 / 200e9 + 16e-6),
        # Chips 0 and 4 are two apart; the link between has the data of chips 2 and 6 too.
        ("all-gather(%x), replica_groups=[4,2]<=[2,4]T(1,0)", "v5e:2x4", 50e6 / 25e9 + 2e-6),
        # Two cores of a chip exchange in its memory; with others they share the chip's links.
        ("all-gather(%x), replica_groups=[4,2]<=[8]", "v3:2x2", 50e6 / 0.9e12),
        ("all-gather(%x), replica_groups={}", "v3:2x2", 87.5e6 / 164e9 + 2e-6),
        ("all-gather(%x), replica_groups=[2,4]<=[4,2]T(1,0)", "v3:2x2", 75e6 / 82e9 + 2e-6),
        # Half of the data of four chips crosses two links.
        ("all-to-all(%x), replica_groups={}", "v5e:2x4", 100e6 * 4 / 4 / 50e9 + 4e-6),
        ("all-to-all(%x), replica_groups={}", "v5e:16x16", 100e6 * 16 / 4 / 100e9 + 16e-6),
        ("collective-permute(%x), source_target_pairs={{0,1}}", "v5e:2x4", 100e6 / 50e9 + 1e-6),
        # 0 to 4 and 2 to 6 share the link between 2 and 4.
        (
            "collective-permute(%x), source_target_pairs={{0,4},{2,6}}",
            "v5e:2x4",
            200e6 / 50e9 + 2e-6,
        ),
        ("all-reduce(%x), replica_groups=[8,1]<=[8]", "v5e:2x4", 0),
        ("collective-permute(%x), source_target_pairs={{0,0}}", "v5e:2x4", 0),
    ],
)  # fmt: skip
def test_seconds(line: str, topology: str, expected: float) -> None:
    assert seconds(f"%r = {MEGABYTES} {line}", topology) == pytest.approx(expected)


@pytest.mark.parametrize("rows, columns, measured", [(2048, 8192, 680e-6), (256, 256, 8e-6)])
def test_measured_all_gathers(rows: int, columns: int, measured: float) -> None:
    """The profiles of the scaling book's chapter on sharding: over 4 chips of v5e."""
    groups = "mesh['y'=4,'x'=8] {'y'}"
    line = f"%r = bf16[{rows},{columns}] all-gather(%x), replica_groups={groups}, dimensions={{0}}"
    at = [(x, y, 0, 0) for y in range(4) for x in range(8)]
    (found,) = read(line, parse_slices("v5e:8x4")[0], coordinates=at)
    assert 0.6 * measured < found.seconds < measured


def test_reduce_scatter_in_a_fusion() -> None:
    scatter = """%all-reduce-scatter (p: f32[25000000]) -> f32[3125000] {
  %a = f32[25000000]{0} all-reduce(%p), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %s = f32[3125000]{0} dynamic-slice(%a, %i), dynamic_slice_sizes={3125000}
}"""
    line = "%f = f32[3125000]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter"
    (fused,) = read(line, V5E, scatter)
    (plain,) = read("%r = f32[3125000]{0} reduce-scatter(%x), replica_groups={}", V5E)
    assert fused == plain
    assert fused.kind == "reduce-scatter" and fused.sent == 87_500_000


def test_all_gather_in_pieces_counts_once() -> None:
    piece = """all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}"""
    bodies = f"""%starts (p: f32[8]) -> (f32[8], f32[64]) {{
  %g = f32[64]{{0}} {piece}
  ROOT %c = (f32[8]{{0}}, f32[64]{{0}}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}
%goes_on (p: f32[8]) -> (f32[8], f32[64]) {{
  %g2 = f32[64]{{0}} {piece}
  ROOT %t = (f32[8]{{0}}, f32[64]{{0}}) tuple(%p, %g2)
}}
%ends (p: f32[8]) -> f32[64] {{
  %g3 = f32[64]{{0}} {piece}
  ROOT %d = f32[64]{{0}} custom-call(%p, %g3), custom_call_target="AsyncCollectiveDone"
}}"""
    lines = """%f1 = (f32[8]{0}, f32[64]{0}) fusion(%x), kind=kCustom, calls=%starts
  %f2 = (f32[8]{0}, f32[64]{0}) fusion(%f1), kind=kOutput, calls=%goes_on
  %f3 = f32[64]{0} fusion(%f2), kind=kCustom, calls=%ends"""
    (found,) = read(lines, V5E, bodies)
    assert found.is_asynchronous and found.kind == "all-gather" and found.sent == 7 * 32


@pytest.mark.parametrize("between", ["", '%y = f32[8] add(%x, %x), "estimated_cycles":"9"'])
def test_asynchronous_with_work_between(between: str) -> None:
    start = "(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x)"
    lines = f"""%s = {start}, source_target_pairs={{{{0,1}},{{1,0}}}}
  {between}
  %d = f32[8]{{0}} collective-permute-done(%s)"""
    (found,) = read(lines, V5E)
    assert found.is_asynchronous == bool(between) and found.sent == 32


@pytest.mark.parametrize("opcode, key", [("call-start", "to_apply"), ("async-start", "calls")])
def test_asynchronous_call(opcode: str, key: str) -> None:
    body = """%called (p: f32[8]) -> f32[64] {
  ROOT %g = f32[64]{0} all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}
}"""
    lines = f"""%s = ((f32[8]{{0}}), f32[64]{{0}}) {opcode}(%x), {key}=%called
  %y = f32[8] add(%x, %x), "estimated_cycles":"9"
  %d = f32[64]{{0}} {opcode.replace("start", "done")}(%s)"""
    (found,) = read(lines, V5E, body)
    assert found.is_asynchronous and found.kind == "all-gather" and found.sent == 7 * 32


def test_other_instructions_are_none() -> None:
    assert not read("%r = f32[8] add(%x, %x)", V5E)


def test_device_coordinates_are_in_jax_order() -> None:
    """As `jax.experimental.topologies` lists them, with libtpu 0.0.42.1 and 0.0.50.1."""
    v3 = collectives.device_coordinates(parse_slices("v3:4x4")[0])
    assert v3[:3] == [(0, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 0)]
    assert v3[4::4] == [
        (0, 1, 0, 0), (2, 0, 0, 0), (2, 1, 0, 0), (0, 2, 0, 0), (0, 3, 0, 0), (2, 2, 0, 0),
        (2, 3, 0, 0),
    ]  # fmt: skip
    v4 = collectives.device_coordinates(parse_slices("v4:2x2x2")[0])
    assert v4[3:6] == [(1, 1, 0, 0), (0, 0, 1, 0), (1, 0, 1, 0)]
    assert len(collectives.device_coordinates(parse_slices("v5e:1x1")[0])) == 1
