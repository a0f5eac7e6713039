"""What a trained translator can be used for: it translates, and its translations are shown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.uses import Exhibit, Uses

Sentence = tuple[str, str, str]  # source, translation, reference
_SHOWN = 12  # sentences in the table
_WIDTH = 100  # columns of the terminal


class TranslatorUses(Uses):
    """The uses of a translator."""

    hint = "python -m scripts.translate --workdir=... translates text with it"
    commands = {"translate": "python -m scripts.translate --workdir={workdir} < sentences.txt"}

    def __init__(self, benchmark: Any):
        """`benchmark` is a `translator.Translator`, which imports this module."""
        self._benchmark = benchmark

    def exhibits(self, rows: Iterator[dict[str, np.ndarray]]) -> list[Exhibit]:
        """Sentences to read; translations.txt, and .tsv with sources and references."""
        translations = self._benchmark.translations(rows)
        decode = self._benchmark.vocabulary.decode
        sources = [decode(ids) for ids in self._benchmark.eval_pairs[0].tolist()]
        sentences = list(zip(sources, translations, self._benchmark.references, strict=True))
        return [
            Exhibit(
                title="Translations",
                text=f"{_exact(sentences):,} of {len(sentences):,} translations equal their "
                f"reference. Below are the first {min(_SHOWN, len(sentences))}, whatever their "
                "result; translations.tsv has all of them.",
                columns=("source", "translation", "reference"),
                rows=[
                    (source, line, "the same" if line == reference else reference)
                    for source, line, reference in sentences[:_SHOWN]
                ],
                files={
                    "translations.txt": "".join(f"{line}\n" for line in translations).encode(),
                    "translations.tsv": tsv(sentences),
                    "sentences.txt": table(sentences, _SHOWN).encode(),
                },
            )
        ]


def table(sentences: Sequence[Sentence], count: int) -> str:
    """The first `count` sentences in lines of at most 100 characters.

    A translation that equals its reference is marked with "=", and its reference left out; all
    others with "!". The last line counts the exact ones among all of `sentences`.
    """
    lines: list[str] = []
    for source, translation, reference in sentences[:count]:
        is_exact = translation == reference
        lines += _lines("  source       ", source)
        lines += _lines(f"{'=' if is_exact else '!'} translation  ", translation)
        lines += [] if is_exact else _lines("  reference    ", reference)
        lines.append("")
    shown = f"; the first {count:,} are above" if count < len(sentences) else ""
    total = f"{_exact(sentences):,} of {len(sentences):,}"
    lines.append(f"{total} translations equal their reference (=){shown}")
    return "\n".join(lines) + "\n"


def tsv(sentences: Sequence[Sentence]) -> bytes:
    """All sentences as tab-separated UTF-8: a line of names, then a line each.

    The columns are source, translation, reference, and exact, which is 1 or 0. Tabs and ends of
    lines within a text become spaces.
    """
    lines = ["source\ttranslation\treference\texact"]
    for sentence in sentences:
        lines.append("\t".join([*map(_plain, sentence), str(_exact([sentence]))]))
    return ("\n".join(lines) + "\n").encode()


def _exact(sentences: Sequence[Sentence]) -> int:
    """How many translations equal their reference."""
    return sum(translation == reference for _, translation, reference in sentences)


def _lines(label: str, text: str) -> list[str]:
    """`text` after `label`, on as many lines as it needs."""
    indent = " " * len(label)
    return textwrap.wrap(_plain(text), _WIDTH, initial_indent=label, subsequent_indent=indent) or [
        label.rstrip()
    ]


def _plain(text: str) -> str:
    """`text` on one line."""
    return " ".join(text.replace("\t", " ").splitlines())
