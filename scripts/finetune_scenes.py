"""Shows what fine-tuning a detector is worth: `bash scripts/quickstart.sh finetune_ssd` runs it.

A small SSD learns to find the digits 0 to 4. It then learns 5 to 9 from 60 images. So does an SSD
that begins with its backbone alone, in as many steps. Both have three seeds. The program prints
each command that it runs, and keeps its output in FOLDER/*.log.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from ops import console
from scripts import finetune_digits
from scripts.finetune_digits import SEEDS, last_score, table

_MAIN = (sys.executable, "main.py")
# The rate of each is the best of those that docs/notes/use.md lists.
_WAYS = {
    "fine-tuned from 0-4": ("tuned", ()),
    "from its backbone alone": ("backbone", ("--config.init_without=extra, head",)),
}


def main(argv: list[str] | None = None) -> None:
    """The command line; argv without the program's name."""
    parser = argparse.ArgumentParser(description=console.summary(__doc__))
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/finetune_ssd"))
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)

    for digits, images in (("0-4", 3000), ("5-9", 60)):
        finetune_digits.run(
            folder / f"scenes_{digits}.log",
            *(sys.executable, "-m", "scripts.prepare", "digit_scenes"),
            *(f"--out=data/scenes_{digits}", f"--digits={digits}", f"--train_images={images}"),
        )
    pretrained = folder / "pretrained"
    finetune_digits.run(
        folder / "pretrained.log",
        *(*_MAIN, "--config=configs/ssd_digits.py", f"--workdir={pretrained}"),
        *("--config.data_dir=data/scenes_0-4", "--config.num_classes=0"),
        *("--config.train_steps=1000", "--config.steps_per_eval=1000"),
    )
    scores: dict[str, list[float]] = {name: [] for name in _WAYS}
    for name, (short, flags) in _WAYS.items():
        for seed in SEEDS:
            workdir = folder / f"{short}_{seed}"
            finetune_digits.run(
                folder / f"{workdir.name}.log",
                *(*_MAIN, "--config=configs/finetune_ssd_digits.py", f"--workdir={workdir}"),
                *(f"--config.init_from={pretrained}", *flags, f"--config.seed={seed}"),
            )
            scores[name].append(last_score(workdir, "mAP"))
    rows = table(scores, "{:.4f}".format)
    print(f"\nmAP on 300 images of 5 to 9, after 200 steps of 8 images:\n\n{rows}\n")
    print("Fine-tune on your own photos: docs/use.md")


if __name__ == "__main__":
    main()
