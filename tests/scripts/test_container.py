"""The Dockerfile: hadolint, what it must have, what it copies; and the file for SkyPilot."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def instructions() -> list[tuple[str, str]]:
    """The instructions with their arguments, in order."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines) if word]


def test_hadolint():
    beside = Path(sys.executable).parent / "hadolint"
    linter = str(beside) if beside.exists() else shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed (requirements-dev.txt)")
    command = [linter, "--failure-threshold=info", str(ROOT / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_slim_with_hashes_and_not_as_root():
    parts = instructions()
    images = [rest.split()[0] for word, rest in parts if word == "FROM"]
    assert len(set(images)) == 1 and re.fullmatch(r"python:3\.1[123]-slim-[a-z]+", images[0])
    (install,) = [rest for _, rest in parts if "pip install" in rest]
    assert "--require-hashes -r" in install
    last = dict(parts)
    assert last["USER"] not in ("root", "0")
    assert json.loads(last["ENTRYPOINT"]) == ["python", "main.py"]


def test_all_of_the_program_is_copied():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and line[0] not in "#!"]
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    left_out = set()
    for parts in (file.split("/") for file in tracked if file):
        for pattern in patterns:
            where = parts if pattern.startswith("**/") else parts[:1]
            if any(fnmatch.fnmatch(part, pattern.removeprefix("**/")) for part in where):
                left_out.add(parts[0])
    programs = {name for name in left_out if name[0] != "." and not name.endswith(".md")}
    assert programs == {"Dockerfile", "docs", "gradient"}  # --mode=prove runs tests


# What SkyPilot's own schema of a task allows (November 2026), as far as it is used here.
TASK = {"name", "workdir", "num_nodes", "resources", "envs", "setup", "run"}
RESOURCES = {"infra", "accelerators", "accelerator_args", "use_spot", "job_recovery"}


@pytest.mark.parametrize("hardware", ["tpu", "gpu"])
def test_the_file_for_skypilot(hardware, tmp_path):
    """As it is, and with the lines for GPUs at its end instead."""
    text = (ROOT / "deploy" / "skypilot.yaml").read_text()
    task = yaml.safe_load(text)
    if hardware == "gpu":
        comments = text[text.index("# num_nodes") :]
        task |= yaml.safe_load(re.sub("^# ?", "", comments, flags=re.MULTILINE))
    assert set(task) <= TASK and set(task["resources"]) <= RESOURCES
    assert all(isinstance(value, str) for value in (task["setup"], task["run"]))
    assert set(task["resources"].get("accelerator_args", {})) <= {"runtime_version"}
    assert task["resources"]["accelerators"] == {"tpu": "tpu-v6e-16", "gpu": "H100:8"}[hardware]
    assert task["resources"]["use_spot"] is True
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [75, 143]}
    # Both commands are a shell's, and the flags and variables are main.py's.
    (tmp_path / "scripts").mkdir()
    python = "mkdir -p .venv/bin; cp python .venv/bin\n"  # what the installation makes
    (tmp_path / "scripts/setup.sh").write_text(f'[ "$#" = 0 ] && {python}')
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    subprocess.run(["bash", "-c", task["setup"]], cwd=tmp_path, check=True)
    sky = {"NODE_IPS": "10.0.0.2\n10.0.0.3", "NUM_NODES": "2", "NODE_RANK": "1"}
    env = {**{f"SKYPILOT_{k}": v for k, v in sky.items()}, "PATH": os.environ["PATH"]}
    command = ["bash", "-c", task["run"]]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    flags = ["--coordinator=10.0.0.2:8476", "--num_processes=2", "--process_id=1"]
    expected = ["main.py", "--config=configs/resnet50.py", *(flags if hardware == "gpu" else [])]
    assert done.stdout.splitlines() == expected
