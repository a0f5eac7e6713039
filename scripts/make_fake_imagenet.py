"""The former name of `python -m scripts.prepare fake`."""

import pathlib
import runpy

if __name__ == "__main__":
    runpy.run_path(str(pathlib.Path(__file__).with_name("former.py")), run_name="prepare fake")
