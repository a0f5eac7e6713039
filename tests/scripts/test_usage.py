"""--help of each shell script prints its own usage and does nothing else."""

import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# The first prints what main.py's parser says.
OTHERS = {"run_and_time.sh", "usage.sh", "find_python.sh"}
PATHS = [*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run"]


@pytest.mark.parametrize("path", [path for path in PATHS if path.name not in OTHERS], ids=str)
def test_help(path, tmp_path):
    first = path.read_text().splitlines()[1].removeprefix("# ")
    for flag in ("--help", "-h"):
        # From another folder, with a path that is relative to it.
        command = ["bash", os.path.relpath(path, tmp_path), flag]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        head, *_, last = done.stdout.splitlines()
        assert head == first and not last.startswith(("set ", "#"))


def test_help_behind_other_arguments_is_the_scripts_own():
    command = ["bash", str(ROOT / "scripts" / "quickstart.sh"), "ssd", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("Trains a small model on this machine")


def test_the_tests_that_ci_names_exist():
    named = re.findall(r"\btests/[\w/]+\.py", (ROOT / ".ci" / "run").read_text())
    assert named and all((ROOT / path).is_file() for path in named), named
