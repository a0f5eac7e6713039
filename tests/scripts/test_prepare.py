"""`python -m scripts.prepare`: its list of preparations and their help."""

import re

import pytest

from scripts import prepare
from tests.test_main import ROOT


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
