"""Shows what fine-tuning is worth: `bash scripts/quickstart.sh finetune` runs it.

A small ResNet learns the digits 0 to 4. It then learns 5 to 9 from 20 pictures each. So does the
same model from random weights, in as many steps. Both have three seeds. The program prints each
command that it runs, and keeps its output in FOLDER/*.log.
"""

from __future__ import annotations

import argparse
import pathlib
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from errors import parse_json
from ops import console

SEEDS = (2, 3, 4)  # 0 and 1 chose the rates
_MAIN = (sys.executable, "main.py", "--config=configs/finetune_digits.py")
# The rate of each is the best of those that docs/use.md lists.
_SCRATCH = (
    *("--config.init_without=", "--config.bn_statistics=batch"),
    "--config.base_learning_rate=0.1",
)


def run(log: pathlib.Path, *command: str) -> None:
    """Runs a command into a file; a failure shows the end of it and ends the program."""
    shown = shlex.join(["python", *command[1:]])
    print(f"$ {shown}", flush=True)
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        print(*log.read_text().splitlines()[-5:], sep="\n", file=sys.stderr)
        sys.exit(f"ERROR: exit code {done.returncode}; all of its output is in {log}")


def last_score(workdir: pathlib.Path, metric: str) -> float:
    """A score of the last evaluation."""
    rows = map(parse_json, (workdir / "metrics.jsonl").read_text().splitlines())
    *_, last = (row[metric] for row in rows if row["split"] == "eval")
    return last


def percent(score: float) -> str:
    """A share as a cell of a table."""
    return f"{100 * score:5.1f} %"


def table(scores: Mapping[str, Sequence[float]], cell: Callable[[float], str] = percent) -> str:
    """One row for each way to train: the score of each seed, and their mean."""
    lines = [f"{'':32}" + "".join(f"seed {seed:<6}" for seed in SEEDS) + "mean"]
    for name, values in scores.items():
        cells = "".join(f"{cell(value):<11}" for value in values)
        blank = " " * 11 * (len(SEEDS) - len(values))
        lines.append(f"{name:32}{cells}{blank}{cell(statistics.mean(values)).lstrip()}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """The command line; argv without the program's name."""
    parser = argparse.ArgumentParser(description=console.summary(__doc__))
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/finetune"))
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)

    for digits, more in (("0-4", ()), ("5-9", ("--per_class=20",))):
        run(
            folder / f"digits_{digits}.log",
            *(sys.executable, "-m", "scripts.prepare", "digits"),
            *(f"--out=data/digits_{digits}", f"--digits={digits}", *more),
        )
    pretrained = folder / "pretrained"
    run(
        folder / "pretrained.log",
        *(sys.executable, "main.py", "--config=configs/digits.py", f"--workdir={pretrained}"),
        *("--config.data_dir=data/digits_0-4", "--config.num_label_classes=5"),
        *("--config.num_filters=16", "--config.train_steps=12 epochs"),
    )
    start, probe = f"--config.init_from={pretrained}", folder / "probe"
    run(folder / "probe.log", *_MAIN, "--mode=probe", start, f"--workdir={probe}")
    scores = {
        "probe (no training)": [parse_json((probe / "probe.json").read_text())["top_1_accuracy"]]
    }
    tuned, scratch = "fine-tuned from 0-4", "from random weights"
    for name, short, flags in ((tuned, "tuned", (start,)), (scratch, "scratch", _SCRATCH)):
        scores[name] = []
        for seed in SEEDS:
            workdir = folder / f"{short}_{seed}"
            run(
                folder / f"{workdir.name}.log",
                *(*_MAIN, *flags, f"--config.seed={seed}", f"--workdir={workdir}"),
            )
            scores[name].append(last_score(workdir, "top_1_accuracy"))
    print(
        f"\nTop-1 accuracy on 180 pictures of 5 to 9, after 100 steps of 32:\n\n{table(scores)}\n"
    )
    print("Fine-tune on your own photos: docs/use.md")


if __name__ == "__main__":
    main()
