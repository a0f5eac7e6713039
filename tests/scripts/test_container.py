"""The Dockerfile: hadolint, what it must have, and that the program runs with what it copies."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    done = subprocess.run(
        [linter, "--failure-threshold=info", str(ROOT / "Dockerfile")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_slim_with_hashes_and_not_as_root():
    parts = instructions()
    images = [rest.split()[0] for word, rest in parts if word == "FROM"]
    assert len(set(images)) == 1 and re.fullmatch(r"python:3\.1[123]-slim-[a-z]+", images[0])
    installs = [rest for word, rest in parts if "pip install" in rest]
    assert len(installs) == 1 and "--require-hashes -r" in installs[0]
    last = dict(parts)
    assert last["USER"] not in ("root", "0")
    assert json.loads(last["ENTRYPOINT"]) == ["python", "main.py"]
    assert parts.index(("USER", last["USER"])) > [word for word, _ in parts].index("WORKDIR")
    # A program is no part of the build that a later stage does not copy.
    assert [word for word, _ in parts].count("COPY") == 3


def test_the_files_of_packages_exist():
    text = (ROOT / "Dockerfile").read_text()
    files = set(re.findall(r"requirements[a-z-]*\.txt", text)) - {"requirements.txt"}
    assert files == {"requirements-tpu.txt", "requirements-cuda.txt"}
    for file in (*files, "requirements.txt"):
        assert "--hash=sha256:" in (ROOT / file).read_text()


def is_left_out(path: str, patterns: list[str]) -> bool:
    """Whether .dockerignore's patterns, of which none has "!", leave out a file."""
    parts = path.split("/")
    above = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    return any(
        any(fnmatch.fnmatch(part, pattern[3:]) for part in parts)
        if pattern.startswith("**/")
        else any(
            part.count("/") == pattern.count("/") and fnmatch.fnmatch(part, pattern)
            for part in above
        )
        for pattern in patterns
    )


@pytest.mark.long
def test_the_program_runs_with_what_is_copied(tmp_path):
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    kept = [file for file in listed if file and not is_left_out(file, patterns)]
    assert "main.py" in kept and "requirements-tpu.txt" in kept
    folders = {file.split("/")[0] for file in kept}
    assert not folders & {"tests", "docs", ".git", ".github", "README.md", "Dockerfile"}
    app = tmp_path / "app"
    for file in kept:
        if (ROOT / file).is_file():
            (app / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, app / file)
    command = json.loads(dict(instructions())["ENTRYPOINT"])
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *command[1:], "--config=configs/fake_imagenet.py"]
        + [f"--workdir={tmp_path}/run", "--config.train_steps=2", "--config.resnet_depth=18"]
        + ["--config.num_filters=4", "--config.image_size=32", "--config.train_batch_size=8"]
        + ["--config.eval_batch_size=8", "--config.num_eval_images=8"],
        cwd=app,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
