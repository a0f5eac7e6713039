"""The arrays that fill the HBM, from what the compiler of TPUs writes.

The files are those of a loop of two steps over f32[70000,1024], shortened; sizes are smaller.
"""

from pathlib import Path

import pytest

from engine.forecast import buffers

ASSIGNMENT = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <2 reduce_sum.5 @0> (size=512,offset=0): f32[]{:T(128)}
allocation 1: size 4000, output shape is |f32[1000]|, maybe-live-out:
 value: <29 fusion.17 @0> (size=4000,offset=0): f32[1000]{0:T(1024)}
 value: <40 copy.12 @0> (size=4000,offset=0): f32[1000]{0:T(1024)}
 value: <48 arg_tuple.3{1} (phi) @0> (size=4000,offset=0): f32[1000]{0:T(1024)}
allocation 2: size 6000, parameter 0, shape |f32[1500]| at ShapeIndex {}:
 value: <39 x.1 @0> (size=6000,offset=0): f32[1500]{0:T(1024)}
allocation 3: size 700, parameter 1, shape |f32[175]| at ShapeIndex {}, maybe-live-out:
 value: <41 y.1 @0> (size=700,offset=0): f32[175]{0:T(1024)}
allocation 4: size 512, constant:
 value: <37 constant.10 @0> (size=512,offset=0): s32[]{:T(128)}
allocation 5: size 9000, preallocated-temp:
 value: <28 fusion.16{1} @0> (size=5000,offset=0): f32[1250]{0:T(1024)}
 value: <50 arg_tuple.3{2} (phi) @0> (size=3000,offset=6000): f32[750]{0:T(1024)}
 value: <51 update.3 @0> (size=3000,offset=6000): f32[750]{0:T(1024)}
 value: <25 copy.13 @0> (size=2000,offset=0): f32[500]{0:T(1024)}
 value: <26 copy.14 @0> (size=1000,offset=5000): f32[250]{0:T(1024)}
allocation 6: size 50000, color 1, preallocated-temp:
 value: <31 copy-start{0} @1> (size=50000,offset=0): f32[12500]{0:T(1024)S(1)}
"""
RANGES = """HloLiveRange (max 35):
  InstructionSequence:
    0:x.1
  BufferLiveRange:
    x.1{}:0-35
    copy.12{}:3-7
    arg_tuple.3{1}:7-20
    fusion.17{}:26-31
    copy.13{}:5-21
    fusion.16{1}:22-26
    arg_tuple.3{2}:7-29
    update.3{}:29-31
    copy.14{}:25-28
    copy-start{0}:1-35
  Live ranges at 26 (peak):
    copy-start{0}: 50000 bytes (cumulative: 50000 bytes)
"""
PROGRAM = """ENTRY %main (x.1: f32[1500]) -> f32[1000] {
  %fusion.16 = (f32[8]{0}, f32[1250]{0}) fusion(%x.1), metadata={op_name="jit(f)/first/dot"}
  %copy.14 = f32[250]{0:T(1024)} copy(%fusion.16)
  %update.3 = f32[750]{0:T(1024)} custom-call(%x.1), metadata={op_name="jit(f)/while/update"}
  ROOT %fusion.17 = f32[1000]{0:T(1024)} fusion(%x.1), metadata={op_name="jit(f)/last/dot"}
}
"""


@pytest.fixture(params=["", ", page 0"], ids=["0.0.42", "0.0.50"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What libtpu of either version writes."""
    name = tmp_path / "module_0000.jit_f.cl_1.after_optimizations"
    lines = ASSIGNMENT.splitlines(keepends=True)
    head = "allocation 5: size 9000"
    text = "".join(line.replace(head, head + request.param) for line in lines)
    Path(f"{name}-buffer-assignment.txt").write_text(text)
    Path(f"{name}-buffer-assignment-values.txt").write_text("allocation 9: size 1, constant:\n")
    Path(f"{name}-live-range.txt").write_text(RANGES)
    Path(f"{name}.txt").write_text(PROGRAM)
    return tmp_path


def test_sums(folder: Path) -> None:
    memory = buffers.read(folder)
    assert memory
    assert memory.parameters == {0: 6000, 1: 700}
    assert memory.lasting == 4000 + 512
    assert memory.temporaries == 9000


def test_largest(folder: Path) -> None:
    """From place 25 on, 5000 + 3000 + 1000 bytes are alive; copy.13 is not, nor what is in VMEM."""
    memory = buffers.read(folder, 4)
    assert memory
    assert [(x.name, x.size, x.scopes, x.is_lasting) for x in memory.largest] == [
        ("fusion.16", 5000, "jit(f)/first/dot", False),
        ("fusion.17", 4000, "jit(f)/last/dot", True),
        ("update.3", 3000, "jit(f)/while/update", False),  # makes the loop's array
        ("copy.14", 1000, "jit(f)/first/dot", False),  # of what it copies
    ]
    assert memory.largest[0].shape == "f32[1250]{0:T(1024)}"


def test_program_text(folder: Path) -> None:
    assert buffers.program_text(folder) == PROGRAM


def test_nothing_written(tmp_path: Path) -> None:
    assert buffers.read(tmp_path) is None
    assert buffers.program_text(tmp_path) == ""


def test_options_name_the_folder(tmp_path: Path) -> None:
    assert str(tmp_path) in buffers.options(tmp_path).values()
