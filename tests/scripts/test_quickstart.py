"""What scripts/quickstart.sh refuses before it installs anything."""

import pathlib
import shutil
import subprocess

import pytest

from configs.recipes import RECIPES

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "quickstart.sh"


@pytest.fixture
def refusal(tmp_path):
    """Runs the script alone, where there is nothing to install or to train."""
    script = tmp_path / "scripts" / "quickstart.sh"
    script.parent.mkdir()
    for name in ("quickstart.sh", "usage.sh"):
        shutil.copy(SCRIPT.with_name(name), script.parent)

    def run(argument: str) -> str:
        command = ["bash", str(script), argument]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2 and done.stdout == ""
        return done.stderr

    return run


def test_an_unknown_miniature_is_refused_with_the_names_of_all(refusal):
    line = refusal("digits:milt")
    assert line.startswith("ERROR: quickstart.sh digits:milt: ") and line.count("\n") == 1
    assert set(line.partition("known are ")[2].split()) == {"plain", *RECIPES}


@pytest.mark.parametrize("name", ["digits:", "digits:mild medium", "imagenet"])
def test_other_mistakes_are_refused(name, refusal):
    assert refusal(name).startswith(f"ERROR: quickstart.sh {name}: ")
