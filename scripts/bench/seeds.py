"""Trains a recipe with several seeds, and prints the mean and the range of each score.

    python -m scripts.bench.seeds --seeds=0,1,2 --out=runs/seeds -- --config=configs/digits.py

Arguments after -- are main.py's. Each run has its own workdir, OUT/seed_N; a run that is finished
there is not repeated. --names=plain,mild trains several recipes of the config file; their workdirs
are OUT/NAME/seed_N.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from engine.report.history import History
from errors import UserError
from ops import console

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def train(seed: int, workdir: str, flags: Sequence[str]) -> dict[str, float]:
    """Trains in `workdir` and returns the scores of the last evaluation.

    Raises:
      UserError: the run failed or was not evaluated.
    """
    own = [f"--config.seed={seed}", f"--workdir={workdir}"]
    start = time.monotonic()
    code = subprocess.run([sys.executable, "main.py", *flags, *own], cwd=_ROOT).returncode
    if code:
        raise UserError(f"the run with seed {seed} in {workdir} ended with exit code {code}")
    scores = History(workdir, writes=False).scores()
    if not scores:
        raise UserError(f"the run in {workdir} has no evaluation")
    print(f"{workdir} took {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
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


def named(flags: Sequence[str], name: str) -> list[str]:
    """main.py's flags with the recipe of a name from the file of --config; "" is no name."""
    suffix = f":{name}" if name else ""
    return [flag + suffix if flag.startswith("--config=") else flag for flag in flags]


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = console.Parser(
        prog="python -m scripts.bench.seeds", description=console.summary(__doc__)
    )
    parser.add_argument("--seeds", default="0,1,2", help="with commas between")
    parser.add_argument("--names", default="", help="recipes of --config's file, commas between")
    parser.add_argument("--out", default="runs/seeds", help="the parent of the runs' workdirs")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="for main.py")
    arguments = parser.parse_args(argv)
    seeds = arguments.seeds.split(",")
    if not all(seed.isdecimal() for seed in seeds):
        parser.error(f"--seeds={arguments.seeds}: must be whole numbers with commas between")
    out = arguments.out if "://" in arguments.out else os.path.join(os.getcwd(), arguments.out)
    names = arguments.names.split(",")
    scores: dict[str, dict[int, dict[str, float]]] = {name: {} for name in names}
    try:
        for number, name in itertools.product(seeds, names):
            seed = int(number)
            workdir = f"{out}/{name}/seed_{seed}" if name else f"{out}/seed_{seed}"
            scores[name][seed] = train(seed, workdir, named(arguments.flags, name))
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    for name, by_seed in scores.items():
        print("\n".join(f"{name} {line}".lstrip() for line in table(by_seed).splitlines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
