"""What scripts/quickstart.sh refuses before it installs anything."""

import os
import pathlib
import shlex
import shutil
import subprocess

import pytest

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


@pytest.mark.parametrize("name", ["digits:", "digits:mild", "imagenet"])
def test_an_unknown_name_is_refused_with_the_names_of_all(name, refusal):
    line = refusal(name)
    assert line.startswith(f"ERROR: quickstart.sh {name}: give nothing, ssd, mask_rcnn, ")
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    "name",
    [
        *("", "ssd", "mask_rcnn", "transformer", "gnmt", "ncf", "finetune", "finetune_ssd"),
        *("translate", "recommend", "flowers"),
    ],
)
def test_the_last_lines_are_commands_with_the_paths_of_the_run(name, tmp_path):
    """The script runs with a Python that prints a command at most, as a preparation does."""
    shutil.copytree(SCRIPT.parent, tmp_path / "scripts", ignore=shutil.ignore_patterns("*.py"))
    (tmp_path / "scripts" / "setup.sh").write_text("")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/bin/sh\nif [ $2 = scripts.prepare ] && [ $3 = download ]; then\n"
        "echo 'from random weights: python main.py --config=configs/small.py:x --config.data_dir=d "
        '--config.train_steps="20 epochs" --workdir=runs/x\'\n'
        "echo 'python main.py --config=configs/finetune.py --workdir=runs/x'; fi\n"
        '[ $1 != main.py ] || for word; do echo "$word"; done\n'
    )
    python.chmod(0o755)
    command = ["bash", str(tmp_path / "scripts/quickstart.sh"), *([name] if name else [])]
    command.append("--workdir=runs/my run")
    environment = {key: value for key, value in os.environ.items() if key != "VENV"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    before, _, after = done.stdout.partition("Next:\n")
    lines = after.splitlines()
    commands = [shlex.split(line[24:]) for line in lines]
    ours = [words for words in commands if words[:1] == [".venv/bin/python"]]
    assert all("--workdir=runs/my run" in words for words in ours)
    assert ours[0][1] == "predict.py" and "--mode=report" in ours[1]
    assert "--mode=export" in ours[2]
    if name in ("", "finetune"):  # pictures that the preparation leaves
        assert ours[0][2] == ("data/digits_5-9_photos" if name else "data/digits_photos")
    if name in ("translate", "recommend", "flowers"):
        words = before.splitlines()
        assert "--config.train_steps=20 epochs" in words and "--config=configs/small.py:x" in words
        assert "--config.train_steps=20 epochs" in commands[-2]
        is_tested = any("test_2016_flickr.de" in word for word in words)
        assert is_tested == (name == "translate")
