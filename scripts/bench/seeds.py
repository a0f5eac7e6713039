"""Trains a recipe with several seeds, and prints the mean and the range of each score.

    python -m scripts.bench.seeds --seeds=0,1,2 --out=runs/seeds -- --config=configs/digits.py

Arguments after -- are main.py's. Each run has its own workdir, OUT/seed_N; a run that is finished
there is not repeated.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence

from engine.report.history import History
from errors import UserError
from scripts import console

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def train(seed: int, workdir: str, flags: Sequence[str]) -> dict[str, float]:
    """Trains in `workdir` and returns the scores of the last evaluation.

    Raises:
      UserError: the run failed or was not evaluated.
    """
    own = [f"--config.seed={seed}", f"--workdir={workdir}"]
    code = subprocess.run([sys.executable, "main.py", *flags, *own], cwd=_ROOT).returncode
    if code:
        raise UserError(f"the run with seed {seed} in {workdir} ended with exit code {code}")
    scores = History(workdir, writes=False).scores()
    if not scores:
        raise UserError(f"the run in {workdir} has no evaluation")
    return scores[max(scores)]


def table(scores: dict[int, dict[str, float]]) -> str:
    """A line for each score: mean, range and number of seeds, and the score of each seed."""
    lines = []
    for name in next(iter(scores.values())):
        values = [of_seed[name] for of_seed in scores.values()]
        each = ", ".join(f"{seed}: {of_seed[name]:.4f}" for seed, of_seed in scores.items())
        lines.append(
            f"{name}: mean {statistics.fmean(values):.4f}, from {min(values):.4f} to "
            f"{max(values):.4f} over {len(values)} seeds ({each})"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = console.Parser(
        prog="python -m scripts.bench.seeds", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seeds", default="0,1,2", help="with commas between")
    parser.add_argument("--out", default="runs/seeds", help="the parent of the runs' workdirs")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="for main.py")
    arguments = parser.parse_args(argv)
    seeds = arguments.seeds.split(",")
    if not all(seed.isdecimal() for seed in seeds):
        parser.error(f"--seeds={arguments.seeds}: must be whole numbers with commas between")
    out = arguments.out if "://" in arguments.out else os.path.join(os.getcwd(), arguments.out)
    try:
        scores = {
            seed: train(seed, f"{out}/seed_{seed}", arguments.flags) for seed in map(int, seeds)
        }
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    print(table(scores))
    return 0


if __name__ == "__main__":
    sys.exit(main())
