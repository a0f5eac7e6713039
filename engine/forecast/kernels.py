"""Counts the bundles of instructions that a Pallas kernel issues: it has no estimated cycles.

A core issues one bundle per cycle. libtpu writes the bundles to a file, if it is asked to before it
is loaded. A bundle in a loop counts as often as the loop runs; all branches count, so the count is
an upper bound of the issue slots. Waiting for copies that nothing hides, and for the matrix unit,
is not in it.
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
_EXIT = re.compile(r"%(\w+) = scmp\.ge\.s32\.totalorder [^,]+, (\d+) /\* loop exit test \*/")
_BACK = re.compile(r"sbr\.rel \(!%(\w+)\)")
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


def read_bundles() -> dict[str, int | None]:
    """How many bundles a run of each operation issues, by its name, from the folder of `FOLDER`.

    Where several programs have an operation of one name, the newest counts.
    """
    folder = os.environ.get(FOLDER)
    return {
        match[1]: issued(path.read_text(errors="replace"))
        for path in (sorted(pathlib.Path(folder).iterdir()) if folder else ())
        if (match := _FILE.fullmatch(path.name))
    }


def issued(text: str) -> int | None:
    """How many bundles a core issues in one run of a kernel, from its file of final bundles.

    None if the file has no bundles, or does not say how often a loop runs.
    """
    loops, slots = [_Loop(trips=1)], 0
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
            loops.append(_Loop(is_grid=_PIPELINE in content))
        loops[-1].bundles += 1
        if match := _EXIT.search(content):
            loops[-1].predicate = match[1]
            loops[-1].trips = int(match[2]) - _FILL * loops[-1].is_grid
        back = _BACK.search(content)
        if back and back[1] == loops[-1].predicate and len(loops) > 1:
            inner = loops.pop()
            loops[-1].bundles += inner.bundles * inner.trips
            loops[-1].last, slots = inner.trips, _SLOTS
    total = loops[0].bundles
    return round(total) if len(loops) == 1 and total else None


@dataclasses.dataclass
class _Loop:
    """A loop of a kernel, or the kernel itself."""

    bundles: float = 0
    trips: int = 0
    predicate: str = ""  # of the branch that ends it
    is_grid: bool = False
    last: int = 1  # the trips of the inner loop that has just ended
