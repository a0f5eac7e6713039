"""Runs a command by its new name, such as "prepare coco": the name that this file is run under."""

import pathlib
import runpy
import sys

if __spec__ is None:  # a file with a former name runs this one; an import does nothing
    command, *words = __name__.split()
    sys.path[0] = str(pathlib.Path(__file__).parents[1])
    sys.argv[1:1] = words
    # As the main module, because processes of a pool import that one again by its name.
    runpy.run_module(f"scripts.{command}", run_name="__main__", alter_sys=True)
