"""Errors as messages of one line, and JSON, which one function reads for all."""

import logging
import pathlib
import re
import sys

import pytest

from common import errors
from common.errors import OutputError, one_line, parse_json
from common.tensorflow import tensorflow
from engine import environment
from engine.report.history import History
from engine.report.writers import Reporter

JSON = """Error executing an HTTP request: HTTP response code 403 with body '{
  "error": {
    "code": 403,
    "message": "the caller may not create objects",
    "errors": []
  }
}'
when initiating an upload"""
BODY = '{\n  "error": {\n    "code": 404,\n    "message": "No bucket.",\n    "errors": []\n  }\n}'
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
            "Error executing an HTTP request: HTTP response code 403 (the caller may not create "
            "objects) when initiating an upload",
        ),
        (ValueError(XML), "code 404 (No such bucket.)"),
        (ValueError(f"POST https://x/o: {BODY}: ('failed', 404)"), "POST https://x/o: No bucket."),
    ],
)
def test_one_line(error, line):
    assert one_line(error) == line


def test_one_line_of_tensorflow():
    tf = tensorflow()
    op = "{{function_node __wrapped__X_device_/job:localhost}} "
    error = tf.errors.DataLossError(None, None, f"{op}corrupted record at 9 [Op:X] name: \nmore")
    assert one_line(error) == "corrupted record at 9"


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "nowhere" / "file")
    (tmp_path / "config.json").mkdir()
    row, words = {"split": "eval", "step": 1}, f"^cannot write {tmp_path}"
    with pytest.raises(OutputError, match=f"{words}/metrics.jsonl: "):
        History(str(tmp_path), writes=True).add(row)
    with pytest.raises(OutputError, match=f"{words}/config.json: "):
        Reporter(str(tmp_path)).write("config.json", "{}")


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
    environment.show_log(sys.stdout)
    logging.getLogger("tpu_suite").info("%s", text)
    assert capsys.readouterr().out == f"{shown}\n"


# --- JSON.


@pytest.mark.parametrize("data", [b"[" * 200_000, "[" * 200_000, b"\xff", b"{", ""])
def test_what_is_no_json_is_a_value_error(data):
    with pytest.raises(ValueError):
        parse_json(data)


def test_the_page_has_the_table_of_the_exit_codes():
    root = pathlib.Path(__file__).parents[2]
    text, page = ((root / path).read_text() for path in ("common/errors.py", "docs/run.md"))
    table = re.findall(r"^([A-Z_]+) = (\d+)  # (.*)$", text, re.MULTILINE)
    (section,) = re.findall(r"^## Exit codes$(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    zero, *rows = re.findall(r"^\| (\d+) \| (.*) \|", section, re.MULTILINE)
    assert zero[0] == "0" and len(rows) == len(table) == 7
    for (name, code, meaning), row in zip(table, rows, strict=True):
        assert (row[0], getattr(errors, name)) == (code, int(code))
        assert row[1].startswith(meaning.removesuffix(" ..."))


@pytest.mark.parametrize(
    ("names", "most", "text"),
    [
        ([], 4, ""),
        (["a", "b"], 4, "a, b"),
        ([*"abcd"], 4, "a, b, c, d"),
        ([*"abcdefg"], 4, "a, b, c, d and 3 more"),
        ([*"abc"], 2, "a, b and 1 more"),
        (["x" * 121], 1, "x" * 120),
    ],
)
def test_some_names_and_how_many_more(names, most, text):
    assert errors.some(iter(names), most) == text
    if most == 4:
        assert errors.some(names) == text


def test_numbers_of_things():
    found = [errors.count(n, "image") for n in (0, 1, 2, 2000)]
    assert found == ["0 images", "1 image", "2 images", "2,000 images"]
    assert errors.count(3, "class", "classes") == "3 classes"
    assert one_line(ValueError("y" * 1001 + "\nz")) == "y" * 1000
