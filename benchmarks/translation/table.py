"""Shows translations beside their sources and references, for people and for other programs."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

Row = tuple[str, str, str]  # source, translation, reference
_WIDTH = 100  # columns of the terminal


def table(rows: Sequence[Row], count: int) -> str:
    """The first `count` sentences in lines of at most 100 characters.

    A translation that equals its reference is marked with "=", and its reference left out; all
    others with "!". The last line counts the exact ones among all of `rows`.
    """
    lines: list[str] = []
    for source, translation, reference in rows[:count]:
        exact = translation == reference
        lines += _lines("  source       ", source)
        lines += _lines(f"{'=' if exact else '!'} translation  ", translation)
        lines += [] if exact else _lines("  reference    ", reference)
        lines.append("")
    exact = sum(translation == reference for _, translation, reference in rows)
    shown = f"; the first {count:,} are above" if count < len(rows) else ""
    lines.append(f"{exact:,} of {len(rows):,} translations equal their reference (=){shown}")
    return "\n".join(lines) + "\n"


def tsv(rows: Sequence[Row]) -> bytes:
    """All sentences as tab-separated UTF-8: a line of names, then a line each.

    The columns are source, translation, reference, and exact, which is 1 or 0. Tabs and ends of
    lines within a text become spaces.
    """
    lines = ["source\ttranslation\treference\texact"]
    for source, translation, reference in rows:
        texts = [_plain(text) for text in (source, translation, reference)]
        lines.append("\t".join([*texts, str(int(translation == reference))]))
    return ("\n".join(lines) + "\n").encode()


def _lines(label: str, text: str) -> list[str]:
    """`text` behind `label`, on as many lines as it needs."""
    indent = " " * len(label)
    return textwrap.wrap(_plain(text), _WIDTH, initial_indent=label, subsequent_indent=indent) or [
        label.rstrip()
    ]


def _plain(text: str) -> str:
    """`text` on one line."""
    return " ".join(text.replace("\t", " ").splitlines())
