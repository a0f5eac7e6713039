"""Runs `python -m scripts.validate`, for scripts that know the command by this name."""

import pathlib
import runpy
import sys

sys.path[0] = str(pathlib.Path(__file__).parents[1])
runpy.run_module("scripts.validate", run_name="__main__", alter_sys=True)
