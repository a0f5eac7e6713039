"""HLO texts: where in the source an instruction comes from."""

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
