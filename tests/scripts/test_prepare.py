"""`python -m scripts.prepare`: its help, and the former names of its commands."""

import importlib.abc
import importlib.util
import re
import runpy
import subprocess
import sys

import pytest

from scripts import prepare
from tests.test_main import ROOT

# Every spelling that README.md or a page in docs/ has named, and the command of today.
FILES = {
    "prepare_imagenet.py": "prepare imagenet",
    "prepare_coco.py": "prepare coco",
    "prepare_text.py": "prepare text",
    "make_fake_imagenet.py": "prepare fake",
    "make_ratings.py": "prepare ratings",
    "data/ratings.py": "prepare ratings",
    "data/compare_ratings.py": "compare_ratings",
    "validate_records.py": "validate",
    "prune.py": "job.prune",
}
MODULES = {
    **{f"scripts.data.{name}": f"prepare {name}" for name in prepare.PREPARATIONS},
    "scripts.data.compare_ratings": "compare_ratings",
    "scripts.data.validate": "validate",
    **{f"scripts.prepare_{name}": f"prepare {name}" for name in ("imagenet", "coco", "text")},
}


@pytest.fixture
def started(monkeypatch):
    """(module, arguments) of each program that a former name starts."""
    programs = []
    run_path = runpy.run_path  # runs former.py, which asks for the module

    def run_module(name, run_name, alter_sys):
        assert (run_name, alter_sys) == ("__main__", True)
        programs.append((name, sys.argv[1:]))

    monkeypatch.setattr(runpy, "run_module", run_module)
    monkeypatch.setattr(runpy, "run_path", run_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["program", "--flag"])
    return programs


def expected(command):
    module, *words = command.split()
    return [(f"scripts.{module}", [*words, "--flag"])]


@pytest.mark.parametrize(("file", "command"), FILES.items())
def test_a_former_file_starts_the_command(file, command, started):
    runpy.run_path(str(ROOT / "scripts" / file), run_name="__main__")
    assert started == expected(command)


@pytest.mark.parametrize(("module", "command"), MODULES.items())
def test_a_former_module_starts_the_command(module, command, started):
    spec = importlib.util.find_spec(module)
    assert spec
    assert isinstance(spec.loader, importlib.abc.InspectLoader)
    code = spec.loader.get_code(module)
    assert code
    exec(code, {"__file__": spec.origin, "__name__": "__main__"})
    assert started == expected(command)


@pytest.mark.parametrize(
    ("words", "today"),
    [
        ("-m scripts.prepare ratings", "prepare ratings"),
        ("-m scripts.data.ratings", "prepare ratings"),
        ("scripts/make_ratings.py", "prepare ratings"),
        ("scripts/compare_ratings.py", "compare_ratings"),
        ("scripts/data/compare_ratings.py", "compare_ratings"),
    ],
)
def test_help_names_the_command_of_today(words, today):
    command = [sys.executable, *words.split(), "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: python -m scripts.{today} [-h] ")


@pytest.mark.parametrize("name", prepare.PREPARATIONS)
def test_each_preparation_has_its_help(name, capsys):
    with pytest.raises(SystemExit) as leaving:
        prepare.parse(name, ["--help"])
    printed = capsys.readouterr().out
    assert leaving.value.code == 0 and "--out OUT" in printed
    assert printed.startswith(f"usage: python -m scripts.prepare {name} [-h] ")


@pytest.mark.parametrize(("argv", "code"), [([], 2), (["--help"], 0), (["-h"], 0)])
def test_the_list_of_preparations(argv, code, capsys):
    with pytest.raises(SystemExit) as leaving:
        prepare.main(argv)
    lines = capsys.readouterr().out.splitlines()
    assert leaving.value.code == code and lines[0].startswith("usage: python -m scripts.prepare ")
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [*prepare.PREPARATIONS]


def test_an_unknown_name_takes_one_line(capsys):
    with pytest.raises(SystemExit) as leaving:
        prepare.main(["movies", "--out=x"])
    (line,) = capsys.readouterr().err.splitlines()
    assert leaving.value.code == 2 and line.startswith("prepare: there is no 'movies'; choose ")
    assert all(name in line for name in prepare.PREPARATIONS)


def test_an_interruption_has_its_exit_code(monkeypatch, capsys):
    def stop(name, argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "make", stop)
    with pytest.raises(SystemExit) as leaving:
        prepare.run("digits", [])
    assert leaving.value.code == 130
    assert capsys.readouterr().err == "prepare digits: stopped; the same command continues\n"


def test_the_pages_name_commands_of_today():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    names = set(re.findall(r"scripts\.prepare (\w+)", text))
    assert names - {"NAME"} <= prepare.PREPARATIONS.keys()
    former = [re.escape(file) for file in FILES if not file.startswith("data/")]
    assert not re.findall("|".join([*former, r"scripts[./]data\b"]), text)
