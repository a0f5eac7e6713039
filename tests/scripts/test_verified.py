"""docs/verified.md shows what the files say, and trusts none of them."""

import json

import pytest
from etils import epath

from scripts import verified


def proof(**changes):
    """A proof with two checks."""
    row = {"name": "values", "status": "ok", "summary": "fine", "figures": {}}
    speed = {**row, "name": "speed: SSD", "figures": {"step_seconds": 0.1234, "small": True}}
    return {
        **{"format": 1, "date": "2026-11-24", "short": False, "checks": [row, speed]},
        **{"devices": {"kind": "TPU v5 lite", "count": 8}, "versions": {"jax": "0.10.2"}},
        **changes,
    }


def page(tmp_path, content, name="a.json"):
    file = epath.Path(tmp_path) / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.write_text(json.dumps(content))
    return verified.page([file])


def test_the_page_is_current():
    assert verified.main(["--check"]) == 0


def test_a_page_that_is_not_current_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verified, "_DOCS", epath.Path(tmp_path))
    assert verified.main(["--check"]) == 1
    assert "python -m scripts.verified" in capsys.readouterr().err
    assert verified.main([]) == 0 and verified.main(["--check"]) == 0


def test_a_proof_is_a_row(tmp_path):
    (row,) = [line for line in page(tmp_path, proof()).splitlines() if "a.json" in line]
    assert "| a.json | 2026-11-24 | 8 x TPU v5 lite | 0.10.2 |" in row
    assert "**missing**: devices, all devices as one" in row and "; 2 passed |" in row
    assert "| 123.4 ms, small |" in row


def test_a_failed_check_is_shown_as_failed(tmp_path):
    bad = {"name": "values", "status": "failed", "summary": "x differs", "look": "at x"}
    text = page(tmp_path, proof(checks=[{**bad, "figures": {}}]))
    assert "**FAILED**: values" in text
    assert "## Failed checks\n\n* a.json: values: x differs. Look at: at x.\n" in text


HOSTILE = "<img src=x>|[a](http://b)\n# c\x1b[2J `d` \u202e"


def test_hostile_text_is_plain_text(tmp_path):
    check = {"name": HOSTILE, "status": "failed", "summary": HOSTILE * 100, "figures": {}}
    text = page(tmp_path, proof(devices={"kind": HOSTILE, "count": [1]}, checks=[check]))
    rest = text.removeprefix(verified._HEAD)
    assert "<" not in rest.replace("\\<", "") and "\x1b" not in rest and "\u202e" not in rest
    assert "[a]" not in rest and "\n# c" not in rest
    assert max(map(len, rest.splitlines())) < 1500


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe{", "can't decode"),
        (b"[" * 100_000, "brackets are nested too deeply"),
        (b" " * (1 << 20) + b" ", "more than 1,048,576 bytes"),
        ([], "no format 1"),
        (proof(format=2), "no format 1"),
        (proof(date="<b>"), "the date is not YYYY-MM-DD"),
        (proof(devices=None), "no devices"),
        (proof(checks=[3]), "a check has no status"),
        (proof(checks=[{"status": "ok"}]), "no name or no summary"),
        (proof(checks=[{"status": "ok", "name": "a", "summary": "b"}]), "no figures"),
        (proof(checks=proof()["checks"][:1] * 2), "a check is there twice"),
        (json.dumps(proof()).replace("8}", "9" * 5000 + "}").encode(), "4300 digits"),
    ],
)
def test_a_file_that_is_no_proof_is_one_line(content, reason, tmp_path):
    text = page(tmp_path, content)
    (line,) = [line for line in text.splitlines() if "a.json" in line]
    plain = line.replace("\\", "")
    assert plain.startswith("* a.json is no proof: ") and reason in plain
