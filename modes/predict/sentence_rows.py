"""The translations of a sentence: rows for programs, plain lines for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

COLUMNS = ("line", "source", "translation", "score", "error")


class Translation(NamedTuple):
    """One translation; `score` is that of the search, the logarithm of a probability."""

    text: str
    score: float


@dataclasses.dataclass(frozen=True)
class Row:
    """The translations of a line, the best first, or an error; an empty line has neither.

    `line` counts the lines of all sources from 1.
    """

    line: int
    source: str
    translations: tuple[Translation, ...] = ()
    error: str = ""

    def content(self) -> dict[str, Any]:
        """See `rows.Row`."""
        content: dict[str, Any] = {"line": self.line, "source": self.source}
        if self.error:
            return content | {"error": self.error}
        return content | {"translations": [each._asdict() for each in self.translations]}

    def cells(self) -> list[dict[str, Any]]:
        """See `rows.Row`: a line for each translation; without any there is one line."""
        common = {"line": self.line, "source": self.source, "error": self.error}
        cells = [
            common | {"translation": each.text, "score": each.score} for each in self.translations
        ]
        return cells or [common]


def plain(rows: Iterable[Row], n_best: int) -> Iterator[str]:
    """`n_best` lines for each row: the text, after its score and a tab if `n_best` is above 1.

    A line is empty where there is no translation.
    """
    for row in rows:
        texts = [
            each.text if n_best == 1 else f"{each.score:.4f}\t{each.text}"
            for each in row.translations
        ]
        texts += [""] * (n_best - len(texts))
        yield "".join(f"{text}\n" for text in texts)
