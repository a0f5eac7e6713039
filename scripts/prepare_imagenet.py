"""Runs `python -m scripts.prepare imagenet`, for scripts that know the command by this name."""

import pathlib
import sys

sys.path[0] = str(pathlib.Path(__file__).parents[1])

from scripts import prepare  # noqa: E402 (the path comes first)

prepare.main(["imagenet", *sys.argv[1:]])
