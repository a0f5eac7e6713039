"""Prices Pallas kernels and random bits, to which the TPU's compiler gives no cycles.

A run of a kernel takes the longer of two times: the time of its bytes at the HBM's bandwidth, and
the time of its bundles of instructions, of which a core issues one per cycle. libtpu writes the
bundles to a file, if it is asked to before it is loaded. A bundle in a loop counts as often as the
loop runs; all branches count, so the price is an upper bound of the issue slots. Waiting for copies
that nothing hides, and for the matrix unit, is not in it.
"""

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Mapping

from engine.forecast import hlo
from engine.forecast.topology import Chip

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


def priced(cost: hlo.Cost, chip: Chip, bundles: Mapping[str, int | None]) -> hlo.Cost:
    """The cost of a program on a chip with the cycles of its kernels; `read_bundles` has `bundles`.

    A kernel without bundles has the count of an equal kernel, else its bytes alone count.
    """
    equal = {kernel.body: bundles[kernel.name] for kernel in cost.kernels if kernel.name in bundles}
    bandwidth = chip.bandwidth / chip.devices
    kernels, names, total = [], dict(cost.names), 0.0
    for kernel in cost.kernels:
        issued = bundles.get(kernel.name, equal.get(kernel.body))
        cycles = max(math.ceil(kernel.moved / bandwidth * chip.clock), issued or 0)
        kernels.append(kernel._replace(cycles=cycles, bundles=issued, body=""))
        before = names.get(kernel.scopes, (0, 0))
        names[kernel.scopes] = before[0] + round(kernel.times * cycles), before[1]
        total += kernel.times * cycles
    return dataclasses.replace(
        cost, cycles=cost.cycles + round(total), names=names, kernels=tuple(kernels)
    )


def notes(kernels: tuple[hlo.Kernel, ...], chip: Chip) -> list[str]:
    """What a table should say about the kernels of a program on a chip."""
    if not kernels:
        return []
    count = round(sum(kernel.times for kernel in kernels))
    milliseconds = 1e3 * chip.seconds(sum(kernel.times * kernel.cycles for kernel in kernels))
    lines = [
        f"{count} runs of kernels without an estimate count as {milliseconds:.1f} ms: each is the "
        "longer of bytes / bandwidth and bundles / clock"
    ]
    if unknown := [kernel.name for kernel in kernels if kernel.bundles is None]:
        lines.append(
            f"too short: {len(unknown)} kernels count by their bytes alone, because libtpu does "
            f"not say how many bundles they issue ({', '.join(unknown[:3])})"
        )
    return lines
