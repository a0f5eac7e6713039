"""docs/notebooks/tpu_in_a_notebook.ipynb is a valid notebook, and its commands exist and run.

The complete run is slow: bash scripts/test.sh -m slow -k notebook
"""

import importlib
import json
import os
import pathlib
import re
import shlex
import subprocess

import pytest

import main

ROOT = pathlib.Path(__file__).parents[1]
FILE = ROOT / "docs/notebooks/tpu_in_a_notebook.ipynb"
CELLS = json.loads(FILE.read_text())["cells"]
SOURCES = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
CODE = [re.sub(r"\\\n\s*", "", text) for text in SOURCES]  # with joined lines
COMMANDS = [line[1:] for text in CODE for line in text.splitlines() if line.startswith("!")]

# What the notebook's machine forces: the repository and its packages come from the network, and a
# CPU needs smaller models. All else is as it stands there.
INSTEAD = {
    r"^git clone \S+": f"git clone --quiet {shlex.quote(str(ROOT))}",
    r"^bash scripts/setup.sh .*": f"ln -s {shlex.quote(str(ROOT / '.venv'))} .venv",
    r".* -m pip install .*": ".venv/bin/python -c 'import sklearn'",
    r"(.*configs/fake_imagenet.py.*)": r"\1 --config.num_filters=4 --config.image_size=32"
    " --config.precision=float32 --config.train_batch_size=8 --config.train_steps=4",
    r"(.*configs/digits.py.*)": r"\1 --config.num_filters=4 --config.train_steps=20"
    " --config.steps_per_eval=20",
    r"(.*--mode=prove.*)": r"\1 --short",
}


def test_the_notebook_is_valid():
    content = json.loads(FILE.read_text())
    assert content["nbformat"] == 4 and content["metadata"]["kernelspec"]["language"] == "python"
    assert 0 < len(CELLS) <= 12
    for cell in CELLS:
        keys = {"cell_type", "metadata", "source"}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            keys |= {"outputs", "execution_count"}
        assert cell.keys() == keys and all(isinstance(line, str) for line in cell["source"])
    for text in CODE:  # commands, %cd and comments: the notebook's own Python never has the TPU
        assert all(line.startswith(("!", "%cd ", "# ")) for line in text.splitlines())


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith(".venv/bin/python main")])
def test_every_flag_exists(command):
    words = shlex.split(command)[2:]
    flags = dict(word.removeprefix("--").split("=", 1) for word in words)
    config = None
    if "config" in flags:
        assert (ROOT / flags["config"]).exists()
        module = flags["config"].removesuffix(".py").replace("/", ".")
        config = importlib.import_module(module).get_config()
    for name in flags:
        if name.startswith("config."):
            assert config is not None and name.removeprefix("config.") in config
        else:
            assert name in main.flags.FLAGS
    modes = main.flags.FLAGS["mode"].parser.enum_values  # type: ignore[attr-defined]
    assert flags.get("mode", "train") in modes


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    """Its cells in order, in a clone of this repository; the last one proves."""
    if not (ROOT / ".git").exists() or not (ROOT / ".venv").exists():
        pytest.skip("this copy of the repository cannot be cloned, or has no .venv")
    folder = tmp_path
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    for line in "\n".join(CODE).splitlines():
        if line.startswith("%cd "):
            folder /= line.removeprefix("%cd ")
        if not line.startswith("!"):
            continue
        command = line[1:]
        for pattern, other in INSTEAD.items():
            command = re.sub(pattern, other, command)
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    content = json.loads((folder / "prove.json").read_text())
    assert {check["status"] for check in content["checks"]} == {"ok", "skipped"}
