"""HLO texts: places in the source, bytes of shapes, and how often loops and branches run."""

import types
from typing import Any

import pytest

from engine.forecast import hlo

TABLES = """\
HloModule jit_step, is_scheduled=true

FileNames
1 "/home/me/train.py"
2 "/venv/lib/python3.11/site-packages/flax/linear.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=33 end_line=33 column=5 end_column=9}
2 {file_name_id=2 function_name_id=1 line=271 end_line=271 column=5 end_column=9}
3 {file_name_id=1 function_name_id=1 line=48 end_line=48 column=5 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=3 parent_frame_id=2}
3 {file_location_id=2 parent_frame_id=3}
4 {file_location_id=2 parent_frame_id=1}

ENTRY %main.1 (x: f32[8]) -> f32[8] {
  %a.1 = f32[8]{0} negate(%x), metadata={op_name="jit(step)/neg" stack_frame_id=3}
  %a.2 = f32[8]{0} negate(%x), metadata={op_name="jit(step)/neg" stack_frame_id=2}
  %a.3 = f32[8]{0} negate(%x), metadata={op_name="neg" source_file="old.py" source_line=7}
  %a.4 = f32[8]{0} negate(%x), metadata={op_name="jit(step)/neg" stack_frame_id=4}
  ROOT %a.5 = f32[8]{0} negate(%x)
}
"""


@pytest.mark.parametrize("shift", [0, 1])
def test_places_are_in_the_users_code(shift):
    """Frames of installed libraries give way to the frame that called them."""
    text = TABLES
    if not shift:  # another compiler writes the parent as it is
        for frame, parent in ((1, 1), (2, 2), (3, 3), (4, 1)):
            row = f"\n{frame} {{file_location_id="
            start = text.index(row, text.index("StackFrames"))
            end = text.index("}", start)
            changed = text[start:end].replace(f"frame_id={parent}", f"frame_id={parent - 1}")
            text = text[:start] + changed + text[end:]
    computations, entry = hlo.parse_computations(text)
    places = hlo.Places(text)
    found = [places.of(instruction) for instruction in computations[entry].values()]
    library = "/venv/lib/python3.11/site-packages/flax/linear.py:271"
    assert found == ["/home/me/train.py:48", "/home/me/train.py:48", "old.py:7", library, ""]


def test_a_text_that_is_no_hlo():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse_computations("module @jit_step {\n}")


@pytest.mark.parametrize(
    ("shape", "in_hbm", "values"),
    [
        ("f32[]", 4, 4),
        ("f32[3,5]{1,0}", 60, 60),
        ("f32[9,129]{1,0:T(8,128)}", 16 * 256 * 4, 9 * 129 * 4),
        ("bf16[3,5]{0,1:T(8,128)(2,1)}", 8 * 128 * 2, 3 * 5 * 2),  # the first side is the minor one
        ("f32[2,9,128]{2,1,0:T(8,128)}", 2 * 16 * 128 * 4, 2 * 9 * 128 * 4),
        ("s8[130]{0:T(128)}", 256, 130),
        ("s4[10]{0}", 5, 5),
        ("pred[7]{0}", 7, 7),
        ("f32[8]{0:T(128)S(1)}", 0, 32),
        ("f32[8]{0:T(128)S(0)}", 512, 32),
        ("(f32[2]{0}, s32[3]{0:S(2)}, f8e4m3fn[5]{0})", 8 + 5, 8 + 12 + 5),
    ],
)
def test_bytes_of_shapes(shape, in_hbm, values):
    reduced: Any = types.SimpleNamespace(opcode="all-reduce-start", shape=shape)
    assert (hlo.size(shape), hlo.result_bytes(reduced)) == (in_hbm, values)
    everywhere = hlo.size_anywhere(shape)
    assert everywhere == hlo.size(shape.replace("S(1)", "").replace("S(2)", "")) >= in_hbm


def test_arrays_and_sides():
    shape = "(f32[2,7]{1,0}, pred[]{:T(128)})"
    assert hlo.arrays(shape) == ["f32[2,7]{1,0}", "pred[]{:T(128)}"]
    assert hlo.sides(shape) == [2, 7] and hlo.sides("pred[]") == hlo.sides("token") == []


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("f32[6]{0} all-reduce(%x)", 24),
        ("(f32[6]{0}, f32[5]{0}) all-reduce-start(%x, %y)", 44),
        ("(f32[2]{0}, f32[16]{0}) all-gather-start(%x)", 64),
        ("(f32[1], f32[2], f32[8], f32[16]) all-gather-start(%x, %y)", 96),
        ("(f32[3], f32[5], u32[], u32[]) collective-permute-start(%x)", 20),
    ],
)
def test_what_a_collective_gives(line, size):
    assert hlo.result_bytes(one(line)) == size


def one(line):
    """The instruction of a program."""
    computations, entry = hlo.parse_computations(
        f"ENTRY %m (x: f32[8]) -> f32[8] {{\n  %r = {line}"
    )
    return computations[entry]["r"]


@pytest.mark.parametrize(
    ("line", "called", "chances"),
    [
        ("f32[8] fusion(%x), calls=%f", ["f"], [1]),
        ("f32[8] while(%x), condition=%c, body=%b", ["c", "b"], [1, 1]),
        ("f32[8] conditional(%i, %x), branch_computations={%a, %b, %c}", [*"abc"], [1 / 3] * 3),
        ("f32[8] conditional(%x), true_computation=%t, false_computation=%f", [*"ft"], [0.5] * 2),
    ],
)
def test_what_an_instruction_runs(line, called, chances):
    found = one(line)
    assert (found.called, found.chances) == (called, pytest.approx(chances))
    rare = one(f'{line}, metadata={{op_name="jit(f)/one_step_in_5/cond"}}')
    assert rare.is_weighed and not found.is_weighed
    assert rare.chances == pytest.approx([0.8, 0.2] if len(found.branches) == 2 else chances)


def test_operands_end_with_their_parenthesis():
    found = one('f32[] fusion(f32[] %a, (f32[], s32[]) %b.1), calls=%f, metadata={op_name="%no"}')
    assert found.operands == ("a", "b.1") and not found.is_root and found.target == ""
    assert one('f32[] custom-call(%a), custom_call_target="TopK"').target == "TopK"


@pytest.mark.parametrize(
    ("start", "limit", "step", "count"),
    [(0, 4, 1, 4), (2, 11, 4, 3), (2, 10, 4, 2), (5, 5, 1, 0), (7, 2, 1, 0), (0, 9, 0, None)],
)
def test_trips_of_a_loop(start, limit, step, count):
    text = f"""%c (p: (f32[8], s32[])) -> pred[] {{
  %p = (f32[8], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=1
  %n = s32[] constant({limit})
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}
%b (q: (f32[8], s32[])) -> (f32[8], s32[]) {{
  %q = (f32[8], s32[]) parameter(0)
  %x = f32[8] get-tuple-element(%q), index=0
  %j = s32[] get-tuple-element(%q), index=1
  %one = s32[] constant({step})
  %k = s32[] add(%j, %one)
  ROOT %t = (f32[8], s32[]) tuple(%x, %k)
}}
ENTRY %m (x: f32[8]) -> f32[8] {{
  %zero = s32[] constant({start})
  %s = (f32[8], s32[]) tuple(%x, %zero)
  %w = (f32[8], s32[]) while(%s), condition=%c, body=%b
"""
    computations, entry = hlo.parse_computations(text)
    assert hlo.trips(computations[entry]["w"], computations[entry], computations) == count
    told = text.replace("body=%b", 'body=%b, backend_config={"known_trip_count":{"n":"12"}}')
    computations, entry = hlo.parse_computations(told)
    assert hlo.trips(computations[entry]["w"], computations[entry], computations) == 12
