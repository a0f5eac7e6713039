"""JSON with 200,000 brackets ends in one line, or counts as damaged, wherever it is read."""

import pathlib
import re

import pytest

from benchmarks.translation import manifest as translation_manifest
from engine import weights
from engine.cluster import lock
from errors import DataError, parse_json
from ops import counting
from ops.images import manifest

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
        translation_manifest.load(str(tmp_path))


def test_a_nested_manifest_of_a_checkpoint_is_not_peeked_at(tmp_path):
    (tmp_path / "checkpoints/1/manifest").mkdir(parents=True)
    (tmp_path / "checkpoints/1/manifest/metadata").write_bytes(NESTED)
    assert weights.peek(str(tmp_path)) is None


def test_a_nested_index_is_made_anew(tmp_path):
    (tmp_path / "train").write_bytes(b"12")
    cache = tmp_path / "index.json"
    cache.write_bytes(NESTED)
    count = counting.index([str(tmp_path / "train")], lambda path: {"count": 2}, str(cache), {})
    assert count == [{"count": 2}]
    assert parse_json(cache.read_bytes())["results"] == count


def test_a_nested_lock_names_no_owner():
    assert lock.owner(NESTED) == {}


def test_no_other_module_parses_json():
    """Except what the program itself has just written, in the same expression."""
    root = pathlib.Path(__file__).parents[2]
    direct = re.compile(r"json\.loads?\((?!json\.dumps|_json\()")
    folders = ("benchmarks", "configs", "engine", "modes", "ops", "scripts")
    paths = [*root.glob("*.py"), *(p for name in folders for p in (root / name).rglob("*.py"))]
    others = [str(path.relative_to(root)) for path in paths if direct.search(path.read_text())]
    others.remove("errors.py")
    own = [
        "engine/mesh.py",  # a host's own
        *("modes/prove/child.py", "modes/prove/models.py", "modes/prove/numbers.py"),  # our files
    ]
    assert sorted(others) == own
