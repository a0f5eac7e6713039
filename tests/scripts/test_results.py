"""scripts/results.sh: which rows it trains, and that a score outside of its band fails."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
ROWS = {
    name: (float(low), float(high))
    for name, low, high in re.findall(
        r'^  "(\S+) \S+ \S+ (?:best|last) (\S+) (\S+) ',
        (ROOT / "scripts" / "results.sh").read_text(),
        re.M,
    )
}


@pytest.fixture
def results(tmp_path):
    """Runs the script with a Python that trains nothing: each run's evaluations are `scores`."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("*.py"))
    (tmp_path / "scripts" / "setup.sh").write_text("")
    for data in ("ml-latest-small", "ml-100k", "BCCD_Dataset"):
        (tmp_path / "data" / data).mkdir(parents=True)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "git").write_text("#!/bin/sh\necho 1234567\n")
    (tools / "python").write_text(
        f'#!/bin/sh\n[ "$1" = main.py ] || exec {sys.executable} "$@"\n'
        'for word; do case "$word" in --workdir=*) folder="${word#*=}";; esac; done\n'
        'mkdir -p "$folder" && cp scores "$folder/metrics.jsonl" && echo "$folder" >> runs.txt\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)

    def run(*names, scores=(), seeds="0 1 2"):
        rows = [f'{{"split": "eval", "hr_at_10": {one}, "AP50": {one}}}' for one in scores]
        (tmp_path / "scores").write_text("\n".join(['{"split": "train", "loss": 1}', *rows]))
        environment = {**os.environ, "VENV": f"{tmp_path}/none", "SEEDS": seeds}
        environment["PATH"] = f"{tools}:{os.environ['PATH']}"
        (tmp_path / "none").mkdir(exist_ok=True)
        if not (tmp_path / "none" / "bin").exists():
            (tmp_path / "none" / "bin").symlink_to(tools)
        command = ["bash", str(tmp_path / "scripts" / "results.sh"), *names]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    return run


def test_an_unknown_row_is_refused_with_the_names_of_all(results):
    done = results("ml-100k", "nosuch")
    assert done.returncode == 2 and done.stdout == ""
    assert "nosuch" in done.stderr and all(name in done.stderr for name in ROWS)


@pytest.mark.parametrize(
    ("name", "scores", "code"),
    [
        ("ml-100k", [0.5, 0.625, 0.1], 0),  # the best evaluation counts
        ("ml-100k", [0.5, 0.599], 1),
        ("ml-100k", [0.651, 0.62], 1),  # too good is a change, too
        ("bccd", [0.1, 0.875], 0),  # the last one counts
        ("bccd", [0.875, 0.1], 1),
    ],
)
def test_a_score_outside_of_its_band_fails(results, tmp_path, name, scores, code):
    done = results(name, scores=scores, seeds="3 4")
    assert done.returncode == code, done.stderr
    assert ("OUTSIDE" in done.stdout) == bool(code)
    runs = (tmp_path / "runs.txt").read_text().split()
    assert runs == [f"runs/results/1234567/{name}-{seed}" for seed in (3, 4)]


def test_the_published_means_are_in_the_bands():
    page = (ROOT / "docs" / "results.md").read_text()
    means = {
        "ml-latest-small-random": r"\| a random item of .*?\| HR@10 of 100 \| (\S+) ",
        "ml-latest-small": r"ml-latest-small, latest \|.*?\|.*?\| (\S+) ",
        "ml-100k": r"\| the latest item of .*?\| HR@10 of 100 \| (\S+) ",
        "ml-100k-all": r"\| ml-100k \|.*of all items \| (\S+) ",
        "ml-latest-small-all": r"\| ml-latest-small \|.*of all items \| (\S+) ",
        "bccd": r"\| AP50 \| (\S+) ",
    }
    assert means.keys() == ROWS.keys()
    for name, pattern in means.items():
        (mean,) = re.findall(pattern, page)
        low, high = ROWS[name]
        assert low < float(mean) < high, name
