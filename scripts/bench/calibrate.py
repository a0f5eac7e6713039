"""Compares forecasts of train steps with measured runs on real TPUs, in one table.

python -m scripts.bench.calibrate                      the table and the error of each generation
python -m scripts.bench.calibrate --only=resnet,v4     the rows of a benchmark on a generation
python -m scripts.bench.calibrate --logs=DIR           the measured rates again, from the logs

measured.json has a row for each public run: the batch per device, the milliseconds of a step and
where they come from. A run of MLPerf logs when each block of epochs begins; the rate is the
examples of a block over the time to the next one, the median over all blocks of all runs. So the
input, checkpoints and most evaluations are inside. Runs of v0.5 log their evaluations, which are
left out. DIR has clones of the repositories, named as on GitHub, bare or not.

The forecasts are those of the baseline (scripts/bench/peers) and of our own step, for the slice
in the row and the same batch per device. Rows with a remark weigh less: they are outside of the
first interval. Needs libtpu (requirements-tpu.txt); compiling a program takes minutes, and is kept.
The errors belong into engine/forecast/calibration.py.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from commands import preflight
from common import cli, entry
from common.errors import UserError
from engine.forecast import topology
from engine.plan import read_settings
from scripts.bench.peers import step as peer_step
from scripts.bench.step import config_of

MEASURED = Path(__file__).with_name("measured.json")
_EVENT = re.compile(
    r":::MLLOG (?P<json>\{.*\})|:::MLL (?P<time>[\d.]+) (?P<key>\w+): (?P<value>\{.*\})"
    r"|:::MLPv0.5.0 \w+ (?P<old_time>[\d.]+) \(.*?\) (?P<old_key>eval_start|eval_stop)"
)
_BLOCK_OF_V0_5 = 4  # epochs between two evaluations
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, and returns the exit code."""
    flags = _flags(arguments)
    rows = json.loads(MEASURED.read_text())
    for word in filter(None, flags.only.split(",")):
        rows = [row for row in rows if word in (row["benchmark"], row["slice"].split("-")[0])]
    if not rows:
        raise UserError(f"--only={flags.only}: no row of {MEASURED.name} has all of these words")
    if flags.logs:
        return _check_logs(rows, Path(flags.logs))
    found: dict[tuple[Any, ...], float | None] = {}
    for row in rows:
        program = row["config"], row["slice"], row["batch_per_device"]
        for who, worker in (("plain", peer_step.__name__), ("ours", preflight.__name__)):
            if (*program, who) not in found:
                found[*program, who] = _forecast(row, worker)
            row[who] = found[*program, who]
    print(json.dumps(rows, indent=2) if flags.json else table(rows))
    return int(None in found.values())


def table(rows: Sequence[Row]) -> str:
    """Markdown: a row for each run, and the least and most of measured / plain by generation."""
    lines = [
        "| network | slice, examples per device | measured, ms | plain | measured / plain | ours "
        "| run | inside, or different |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ratios: dict[str, list[tuple[float, bool]]] = {}
    for row in rows:
        measured, plain, ours = row["milliseconds"], row["plain"], row["ours"]
        ratio = "?"
        if plain:
            name = row["slice"].split("-")[0]
            ratios.setdefault(name, []).append((measured / plain, not row["differs"]))
            ratio = f"{measured / plain:.2f}"
        where = f"{row['slice']}, {row['batch_per_device']}"
        source = row["repository"].removeprefix("mlcommons/training_results_")
        cells = [row["benchmark"], where, f"{measured:.1f}", f"{plain:.1f}" if plain else "?"]
        cells += [ratio, f"{ours:.1f}" if ours else "?", f"{source}, {row['devices']} devices"]
        cells.append(row["differs"])
        lines.append(f"| {' | '.join(cells)} |")
    for name, found in ratios.items():
        all_ = [ratio for ratio, _ in found]
        same = [ratio for ratio, is_same in found if is_same] or all_
        lines.append(
            f"\n{name}: measured runs were {min(same):.2f} to {max(same):.2f} of the plain "
            f"forecasts; all rows {min(all_):.2f} to {max(all_):.2f}"
        )
    return "\n".join(lines)


def _forecast(row: Row, worker: str) -> float | None:
    """The milliseconds of a step; None, with the reason on stderr, if it does not compile."""
    (one,) = topology.parse_slices(row["slice"])
    given = argparse.Namespace(
        tpu=row["slice"], config=row["config"], batch_per_device=row["batch_per_device"], set=[]
    )
    settings = read_settings(config_of(given, one.devices))
    outcome = preflight.inspect(settings, one, ("train",), worker)
    return 1e3 * outcome.train.seconds if outcome.train else None


def _check_logs(rows: Sequence[Row], clones: Path) -> int:
    """Prints the rate of each run of MLPerf beside the stored one; 1 if one differs by 1 %."""
    differ = False
    for row in rows:
        if "epoch" not in row:
            continue
        clone = clones / row["repository"].split("/")[1]
        if not clone.is_dir():
            raise UserError(f"--logs={clones}: there is no clone {clone.name} in it")
        milliseconds, blocks = step_of_logs(row, clone)
        differ |= abs(milliseconds / row["milliseconds"] - 1) > 0.01
        print(
            f"{row['benchmark']} {row['folder']}: {milliseconds:.1f} ms by {blocks} blocks, "
            f"stored {row['milliseconds']:.1f}"
        )
    return int(differ)


def step_of_logs(row: Row, clone: Path) -> tuple[float, int]:
    """The milliseconds of a step by the logs of a run in a clone, and how many blocks they have."""
    git = ["git", "-C", str(clone)]
    names = subprocess.run(
        [*git, "ls-tree", "--name-only", row["commit"], f"{row['folder']}/"],
        check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    rates = []
    for name in names:
        content = subprocess.run(
            [*git, "show", f"{row['commit']}:{name}"], check=True, capture_output=True
        ).stdout.decode(errors="replace")
        rates += [epochs * row["epoch"] / seconds for epochs, seconds in blocks_of(content)]
    rate = statistics.median(rates) / row["devices"]
    return 1e3 * row["batch_per_device"] / rate, len(rates)


def blocks_of(log: str) -> Iterator[tuple[float, float]]:
    """(epochs, seconds) of each block of a log of MLPerf that another one follows."""
    begun: tuple[float, float] | None = None  # when, how many epochs
    for match in _EVENT.finditer(log):
        if match["old_key"]:
            if match["old_key"] == "eval_stop":
                begun = float(match["old_time"]), _BLOCK_OF_V0_5
            elif begun:
                yield begun[1], float(match["old_time"]) - begun[0]
                begun = None
            continue
        try:
            event = json.loads(match["json"] or match["value"])
        except ValueError:  # a line that another process has written into
            continue
        if event.get("key", match["key"]) == "block_start":
            seconds = event["time_ms"] / 1e3 if match["json"] else float(match["time"])
            if begun and seconds > begun[0]:
                yield begun[1], seconds - begun[0]
            begun = seconds, (event.get("metadata") or {}).get("epoch_count") or 1


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words of the rows: a benchmark, a generation")
    parser.add_argument("--logs", default="", metavar="DIR", help="clones of MLPerf's results")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(entry.run(main))
