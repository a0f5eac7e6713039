"""What a trained translator can be used for: it translates, and its translations are shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.translation import table
from benchmarks.uses import Exhibit, Uses

if TYPE_CHECKING:
    from benchmarks.translation.translator import Translation

_SHOWN = 12  # sentences in the table


class TranslatorUses(Uses):
    """The uses of a translator."""

    hint = "python -m scripts.translate --workdir=... translates text with it"
    commands = {"translate": "python -m scripts.translate --workdir={workdir} < sentences.txt"}

    def __init__(self, benchmark: Translation):
        self._benchmark = benchmark

    def exhibits(self, rows: Iterator[dict[str, np.ndarray]]) -> list[Exhibit]:
        """Sentences to read; translations.txt, and .tsv with sources and references."""
        lines = self._benchmark.translations(rows)
        decode = self._benchmark.vocabulary.decode
        sources = [decode(row) for row in self._benchmark.sides[0].tolist()]
        sentences = list(zip(sources, lines, self._benchmark.references, strict=True))
        exact = sum(line == reference for _, line, reference in sentences)
        return [
            Exhibit(
                title="Translations",
                text=f"{exact:,} of {len(sentences):,} translations equal their reference. Below "
                f"are the first {min(_SHOWN, len(sentences))}, whatever their result; "
                "translations.tsv has all of them.",
                columns=("source", "translation", "reference"),
                rows=[
                    (source, line, "the same" if line == reference else reference)
                    for source, line, reference in sentences[:_SHOWN]
                ],
                files={
                    "translations.txt": "".join(f"{line}\n" for line in lines).encode(),
                    "translations.tsv": table.tsv(sentences),
                    "sentences.txt": table.table(sentences, _SHOWN).encode(),
                },
            )
        ]
