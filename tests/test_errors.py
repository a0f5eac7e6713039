"""Other libraries' errors, and what cannot be written, in one line."""

import logging
import sys
import types

import pytest

import errors
from engine import terminal
from engine.report.history import History
from engine.report.writers import Reporter
from errors import OutputError, one_line

JSON = """Error executing an HTTP request: HTTP response code 403 with body '{
  "error": {
    "code": 403,
    "message": "the caller may not create objects",
    "errors": []
  }
}'
when initiating an upload"""
XML = "code 404 with body '<?xml?>\n<Error><Message>No such bucket.</Message>\n<x/></Error>'"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\nb"), "a"),
        (ValueError("\n  \n a \n"), "a"),
        (KeyError(), "KeyError"),
        (OSError(28, "No space left on device", "/a"), "[Errno 28] No space left on device: '/a'"),
        (ValueError("lost: a [tensorstore_spec='{}'] [source='b']"), "lost: a"),
        (ValueError("x" * 5000), "x" * 1000),
        (type("Told", (Exception,), {"message": "the message"})("the str"), "the message"),
        (
            ValueError(JSON),
            "HTTP response code 403 (the caller may not create objects) when initiating an upload",
        ),
        (ValueError(XML), "code 404 (No such bucket.)"),
    ],
)
def test_one_line(error, line):
    assert one_line(error) == line


def reporting(folder, name):
    """Makes the file `name` of a report in a folder."""
    if name == "metrics.jsonl":
        return History(str(folder), writes=True).add({"split": "eval", "step": 1})
    reporter = Reporter(str(folder))
    if name == "parameters.txt":
        return reporter.overview({})
    if name == "config.json":
        return reporter.write(name, "{}")
    reporter._writer = types.SimpleNamespace(write_scalars=print)  # no TensorFlow for this
    reporter._drawn = -1e9  # long ago, so that it draws
    return reporter.eval({"step": 1, "epoch": 1.0}, "")


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "parameters.txt", "config.json", "learning_curves.png"]
)
def test_a_file_that_cannot_be_written_is_named(name, tmp_path):
    if name == "metrics.jsonl":
        (tmp_path / name).symlink_to(tmp_path / "nowhere" / "file")
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(OutputError) as refused:
        reporting(tmp_path, name)
    assert str(refused.value).startswith(f"cannot write {tmp_path / name}: ")
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\rb\x7f\x9bc", "a\\rb\\x7f\\x9bc"),
        ("a\u202eb\udce4", "a\\u202eb\\udce4"),
        ("Zürich 東京\n\t é", "Zürich 東京\n\t é"),
    ],
)
def test_control_characters_do_not_reach_a_terminal(text, shown, capsys):
    assert errors.visible(text) == str(errors.UserError(text)) == shown
    terminal.start(sys.stdout)
    logging.getLogger("tpu_suite").info("%s", text)
    assert capsys.readouterr().out == f"{shown}\n"
