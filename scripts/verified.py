"""Writes docs/verified.md, a table of the proofs in docs/verified/*.json.

python -m scripts.verified            writes the page
python -m scripts.verified --check    only says whether the page is as it would be written

The files come from `python main.py --mode=prove` on other people's machines, so that nothing in
them is trusted: a file that is no proof is one line, and all text is escaped.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from etils import epath

from errors import one_line, parse_json, visible
from modes.prove.checks import CHECKS
from modes.prove.record import FORMAT, STATUSES

_DOCS = epath.Path(__file__).parent.parent / "docs"
_MOST_BYTES = 1 << 20  # of a file; a proof has 20 kB
_MARKUP = re.compile(r"([\\`*_{}\[\]()<>#|&~!:@^])")
_SPEEDS = ("speed: ResNet-50", "speed: SSD", "speed: Transformer")
_HEAD = """\
# Verified: on which devices the checks have passed

```bash
python main.py --mode=prove    # writes prove.json, see prove.md
```

[Prove](prove.md) says what the checks compare. To add your devices, send the file as
`docs/verified/NAME.json`. `python -m scripts.verified` makes this page from these files. A device
that is not in the table is **not verified**.

"""
_COLUMNS = ("file", "date", "devices", "jax", "checks", "ResNet-50", "SSD", "Transformer", "input")


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or checks the page; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    flags, target = parser.parse_args(arguments), _DOCS / "verified.md"
    text = page(sorted((_DOCS / "verified").glob("*.json"), key=lambda path: path.name))
    if not flags.check:
        target.write_text(text)
        print(f"wrote {target}")
    elif not target.exists() or target.read_text() != text:
        print("docs/verified.md is not current: python -m scripts.verified", file=sys.stderr)
        return 1
    return 0


def page(files: Sequence[Any]) -> str:
    """The page about files of proofs, in their order."""
    rows, failures, broken = [], [], []
    for file in files:
        name = _cell(file.name)
        try:
            proof = read(file)
            row, failed = _row(proof), list(_failures(proof))
        except Exception as error:  # whatever a stranger's file makes the parser raise
            broken.append(f"* {name} is no proof: {_cell(one_line(error))}")
            continue
        rows.append([name, *row])
        failures += [f"* {name}: {line}" for line in failed]
    lines = [f"| {' | '.join(line)} |" for line in [_COLUMNS, ["---"] * len(_COLUMNS), *rows]]
    text = _HEAD + "\n".join(lines) + "\n\n"
    text += (
        "The last columns are the median time of a train step and the JPEGs that the host prepares."
        '\n"small" is a small form of the model, as CPUs and `--short` have it: no figure of speed.'
        "\n`--short` is beside the date. Times in brackets are preflight's estimates.\n"
    )
    for title, parts in (("Failed checks", failures), ("Files that are no proofs", broken)):
        text += f"\n## {title}\n\n" + "\n".join(parts) + "\n" if parts else ""
    return text


def read(file: Any) -> dict[str, Any]:
    """Reads a proof; the values that the page shows have the kinds that it expects.

    Raises:
      ValueError: it is no proof of this format.
      OSError: it cannot be read.
    """
    if file.stat().length > _MOST_BYTES:
        raise ValueError(f"the file has more than {_MOST_BYTES:,} bytes")
    proof = parse_json(file.read_bytes())
    if not isinstance(proof, dict) or proof.get("format") != FORMAT:
        raise ValueError(f"the file has no format {FORMAT}")
    kinds = {"date": str, "short": bool, "devices": dict, "versions": dict, "checks": list}
    for name, kind in kinds.items():
        if not isinstance(proof.get(name), kind):
            raise ValueError(f"the file has no {name}")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", proof["date"], re.ASCII):
        raise ValueError("the date is not YYYY-MM-DD")
    names = []
    for check in proof["checks"]:
        if not isinstance(check, dict) or check.get("status") not in STATUSES:
            raise ValueError("a check has no status")
        if not all(isinstance(check.get(key), str) for key in ("name", "summary")):
            raise ValueError("a check has no name or no summary")
        if not isinstance(check.get("figures"), dict):
            raise ValueError("a check has no figures")
        names.append(check["name"])
    if len(names) != len(set(names)):
        raise ValueError("a check is there twice")
    return proof


def _row(proof: dict[str, Any]) -> list[str]:
    devices, checks = proof["devices"], {check["name"]: check for check in proof["checks"]}
    date = proof["date"] + (", short" if proof["short"] else "")
    kind = f"{_cell(devices.get('count', '?'))} x {_cell(devices.get('kind', '?'))}"
    rate = _number(checks, "input of the host", "images_per_second")
    speeds = [_speed(checks, name) for name in _SPEEDS]
    version = _cell(proof["versions"].get("jax", "?"))
    return [date, kind, version, _summary(checks), *speeds, f"{rate:,.0f}/s" if rate else ""]


def _summary(checks: dict[str, Any]) -> str:
    """How many checks passed, and the names of those that did not."""
    count = {status: [n for n, c in checks.items() if c["status"] == status] for status in STATUSES}
    missing = [check.name for check in CHECKS if check.name not in checks]
    parts = []
    for label, names in (("**FAILED**", count["failed"]), ("**missing**", missing)):
        parts += [f"{label}: {', '.join(map(_cell, names))}"] if names else []
    parts += [f"{len(count['ok'])} passed"]
    parts += [f"{len(count['skipped'])} skipped"] if count["skipped"] else []
    return "; ".join(parts)


def _speed(checks: dict[str, Any], name: str) -> str:
    """The time of a train step, "small" for a small model, and preflight's estimate."""
    if (seconds := _number(checks, name, "step_seconds")) is None:
        return ""
    text = f"{1e3 * seconds:,.1f} ms"
    estimate = _number(checks, name, "estimated_step_seconds")
    text += f" [{1e3 * estimate:,.1f}]" if estimate is not None else ""
    return text + (", small" if checks[name]["figures"].get("small") else "")


def _failures(proof: dict[str, Any]) -> Iterator[str]:
    for check in proof["checks"]:
        if check["status"] == "failed":
            look = f" Look at: {_cell(check['look'], 200)}." if check.get("look") else ""
            yield f"{_cell(check['name'])}: {_cell(check['summary'], 300)}.{look}"


def _number(checks: dict[str, Any], name: str, figure: str) -> float | None:
    value: Any = checks[name]["figures"].get(figure) if name in checks else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < 1e9 else None


def _cell(value: Any, most: int = 60) -> str:
    """Text of a stranger as plain text of a Markdown cell, cut to `most` characters."""
    text = visible(" ".join(str(value).split()))
    text = text if len(text) <= most else f"{text[: most - 3]}..."
    return _MARKUP.sub(r"\\\1", text)


if __name__ == "__main__":
    raise SystemExit(main())
