"""Errors as messages of one line, and JSON with 200,000 brackets, wherever it is read."""

import logging
import pathlib
import re
import sys
import types

import pytest

from benchmarks.translation import rows
from common import errors
from common.data import caches
from common.data.shards import tensorflow
from common.errors import DataError, OutputError, one_line, parse_json
from common.images import manifest
from engine import environment, model_source
from engine.cluster import lock
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


def test_one_line_of_tensorflow():
    tf = tensorflow()
    op = "{{function_node __wrapped__X_device_/job:localhost}} "
    error = tf.errors.DataLossError(None, None, f"{op}corrupted record at 9 [Op:X] name: \nmore")
    assert one_line(error) == "corrupted record at 9"
    assert one_line(ValueError("\n one\ntwo")) == "one"
    assert one_line(AssertionError()) == "AssertionError"


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
    environment.show_log(sys.stdout)
    logging.getLogger("tpu_suite").info("%s", text)
    assert capsys.readouterr().out == f"{shown}\n"


# --- JSON.

NESTED = b"[" * 200_000


@pytest.mark.parametrize("data", [NESTED, NESTED.decode(), b'{"a":' * 200_000, b"\xff", b"{", ""])
def test_what_is_no_json_is_a_value_error(data):
    with pytest.raises(ValueError):
        parse_json(data)


def test_options_are_those_of_the_standard_library():
    assert parse_json(b'[{"a": 1}]', object_hook=len) == [1]


def test_a_nested_manifest_of_data_is_named(tmp_path):
    with pytest.raises(DataError, match=r"m\.json is not one that .*nested too deeply"):
        manifest.parse(NESTED, "m.json")
    (tmp_path / "manifest.json").write_bytes(NESTED)
    with pytest.raises(DataError, match=r"manifest\.json is not one that .*nested too deeply"):
        rows.load_manifest(str(tmp_path))


def test_a_nested_manifest_of_a_checkpoint_is_not_peeked_at(tmp_path):
    (tmp_path / "checkpoints/1/manifest").mkdir(parents=True)
    (tmp_path / "checkpoints/1/manifest/metadata").write_bytes(NESTED)
    assert model_source.peek(str(tmp_path)) is None


def test_a_nested_index_is_made_anew(tmp_path):
    (tmp_path / "train").write_bytes(b"12")
    cache = tmp_path / "index.json"
    cache.write_bytes(NESTED)
    count = caches.scan_files([str(tmp_path / "train")], lambda path: {"count": 2}, str(cache), {})
    assert count == [{"count": 2}]
    assert parse_json(cache.read_bytes())["results"] == count


def test_a_nested_lock_names_no_owner():
    assert lock.owner(NESTED) == {}


def test_no_other_module_parses_json():
    """Except what the program itself has just written, in the same expression."""
    root = pathlib.Path(__file__).parents[2]
    direct = re.compile(r"json\.loads?\((?!json\.dumps|_json\()")
    folders = ("benchmarks", "commands", "common", "configs", "engine", "scripts")
    paths = [*root.glob("*.py"), *(p for name in folders for p in (root / name).rglob("*.py"))]
    others = [str(path.relative_to(root)) for path in paths if direct.search(path.read_text())]
    others.remove("common/errors.py")
    assert others == ["engine/mesh.py"]  # a host's own
