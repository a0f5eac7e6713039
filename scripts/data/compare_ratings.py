"""The former name of `python -m scripts.compare_ratings`."""

import pathlib
import runpy

if __name__ == "__main__":
    runpy.run_path(str(pathlib.Path(__file__).parents[1] / "former.py"), run_name="compare_ratings")
