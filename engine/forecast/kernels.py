"""Counts the bundles of instructions that an operation without estimated cycles issues.

These are Pallas kernels, sorts, gathers and scatters. A core issues one bundle per cycle. libtpu
writes the bundles to a file, if it is asked to before it is loaded. A bundle in a loop counts as
often as the loop runs, and once if that is not known; all branches count. Waiting for copies that
nothing hides, and for the matrix unit, is not in it.
"""

import dataclasses
import os
import pathlib
import re

FOLDER = "KERNEL_BUNDLES_FOLDER"
_DUMP = "--xla_jf_dump_to={} --xla_jf_dump_llo_pass_label_regex=final_bundles"
_FILE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
# "   0x3b LB: >> { ...": the number, a mark such as "loop body", a ">" for each loop around.
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|\d+)\s+(\w\w)?\s*:[\s>]*\{(.*)")
_EXIT = re.compile(
    r"%(\w+) = scmp\.ge\.s32\.totalorder (?:\(%\w+\), )?[^,]+, (\d+) /\* loop exit test \*/"
)
_BACK = re.compile(r"sbr\.rel \(!%(\w+)\)(?: target = \$region(\d+))?")
_REGION = re.compile(r"Start region (\d+)")
_SLOTS = 4  # bundles after a branch that still run
_PIPELINE = "iteration index, stage = 1"  # of the loop over the grid
_FILL = 2  # its further rounds, in which the first blocks come and the last ones go


def ask_for_bundles() -> None:
    """Has libtpu, which must not be loaded yet, write the bundles of what it compiles.

    They go to the folder in the environment variable `FOLDER`; without it nothing is written.
    """
    if folder := os.environ.get(FOLDER):
        arguments = os.environ.get("LIBTPU_INIT_ARGS", "")
        os.environ["LIBTPU_INIT_ARGS"] = f"{arguments} {_DUMP.format(folder)}".strip()


def read_bundles() -> dict[str, tuple[int, int]]:
    """What `issued` says of each operation, by its name, from the folder of `FOLDER`.

    Where several programs have an operation of one name, the newest counts.
    """
    folder = os.environ.get(FOLDER)
    return {
        match[1]: issued(path.read_text(errors="replace"))
        for path in (sorted(pathlib.Path(folder).iterdir()) if folder else ())
        if (match := _FILE.fullmatch(path.name))
    }


def issued(text: str) -> tuple[int, int]:
    """How many bundles a core issues in one run of an operation, from its file of final bundles.

    The second number is that of the loops of unknown length, which count once. (0, 1) if the file
    has no bundles.
    """
    loops, slots, unknown = [_Loop()], 0, 0
    trips: dict[str, int] = {}  # of the loop that a predicate ends
    for line in text.splitlines():
        if not (match := _BUNDLE.match(line)):
            continue
        mark, content = match.groups()
        if slots and content.startswith("}"):  # it runs while the branch before takes effect
            loops[-1].bundles += loops[-1].last
            slots -= 1
            continue
        slots = 0
        if mark == "LB":
            loops.append(_Loop(_PIPELINE in content, {*_REGION.findall(content)}))
        loops[-1].bundles += 1
        trips |= {predicate: int(count) for predicate, count in _EXIT.findall(content)}
        back = _BACK.search(content)
        if back and len(loops) > 1 and (back[1] in trips or back[2] in loops[-1].regions):
            inner = loops.pop()
            count = trips.get(back[1], 1 + _FILL * inner.is_grid) - _FILL * inner.is_grid
            unknown += back[1] not in trips
            loops[-1].bundles += inner.bundles * count
            loops[-1].last, slots = count, _SLOTS
    total = loops[0].bundles
    return (total, unknown) if len(loops) == 1 and total else (0, 1)


@dataclasses.dataclass
class _Loop:
    """A loop of an operation, or the operation itself."""

    is_grid: bool = False
    regions: set[str] = dataclasses.field(default_factory=set)  # that begin with it
    bundles: int = 0
    last: int = 1  # the trips of the inner loop that has just ended
