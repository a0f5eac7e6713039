"""docs/tour.md: the functions that it names exist, its code is the fixture's, its commands run."""

import ast
import re
import subprocess
import sys

import pytest

from tests.conftest import FIXTURES
from tests.test_main import ROOT, environment

TEXT = (ROOT / "docs" / "tour.md").read_text()
WALK, REST = TEXT.split("## Where the papers' things are")
TABLE, ADD = REST.split("## Add a benchmark in an hour")


def definitions(path):
    """The names of all functions and classes in a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}


def test_the_walk_names_functions_that_exist():
    links = re.findall(r"\[`(\w+)`\]\(\.\./([\w/]+\.py)\)", WALK)
    assert len(links) >= 10 and len({path for _, path in links}) <= 8
    for name, path in links:
        assert name in definitions(ROOT / path), (name, path)


def test_the_papers_things_are_where_the_table_says():
    rows = re.findall(r"^\| .+ \| \[`(\w+)`\]\(\.\./([\w/]+\.py)\) \|$", TABLE, re.M)
    assert len(rows) == TABLE.count("\n| ") - 1  # the head
    for name, path in rows:
        assert name in definitions(ROOT / path), (name, path)


def code_blocks():
    """{file: the code blocks below its name, joined}."""
    blocks, name = {}, ""
    for match in re.finditer(r"^`([\w/]+\.py)`$|^```python\n(.*?)^```$", ADD, re.M | re.S):
        if match[1]:
            name = match[1]
        else:
            blocks[name] = blocks.get(name, "") + match[2]
    return blocks


def test_the_code_is_what_the_tests_of_the_benchmark_run():
    """But for blank lines between the blocks."""

    def lines(text):
        return [line for line in text.splitlines() if line.strip()]

    blocks = code_blocks()
    files = [path for path in FIXTURES.rglob("*.py") if path.read_text().strip()]
    files = [path for path in files if path.name != "mlperf.py"]  # few benchmarks need it
    assert sorted(blocks) == sorted(path.relative_to(FIXTURES).as_posix() for path in files)
    for name, text in blocks.items():
        assert lines(text) == lines((FIXTURES / name).read_text()), name


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """The folder that a reader of the page has made."""
    folder = tmp_path_factory.mktemp("mine")
    for name, text in code_blocks().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.slow
def test_the_commands_run(mine):
    commands = re.findall(r"^```bash\n(.*?)^```$", ADD, re.M | re.S)
    assert len(commands) == 2
    script = "set -euo pipefail\n" + "\n".join(commands)
    done = subprocess.run(
        ["bash", "-c", script.replace("python ", f"{sys.executable} ")],
        cwd=ROOT,
        env=environment(MINE=str(mine)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "doctor: 0 of" in done.stdout
    assert done.stdout.count("target 95.00 % reached") == 1
    assert "target 90.00 % reached" in done.stdout
    assert "2 new (params/head/bias, params/head/kernel)" in done.stdout
