"""What scripts/quickstart.sh refuses before it installs anything."""

import pathlib
import subprocess

import pytest

from configs.recipes import RECIPES

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "quickstart.sh"


def refusal(*arguments: str) -> str:
    command = ["bash", str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 2 and done.stdout == ""
    return done.stderr


def test_an_unknown_miniature_is_refused_with_the_names_of_all():
    line = refusal("digits:milt")
    assert line.startswith("ERROR: quickstart.sh digits:milt: ") and line.count("\n") == 1
    assert set(line.partition("known are ")[2].split()) == {"plain", *RECIPES}


@pytest.mark.parametrize("name", ["digits:", "imagenet"])
def test_other_mistakes_are_refused(name):
    assert refusal(name).startswith(f"ERROR: quickstart.sh {name}: ")
