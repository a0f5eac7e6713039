"""Shows where translations are wrong: the worst sentences, and BLEU by the source's length."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence

import numpy as np

from benchmarks.translation import evaluation
from benchmarks.uses import Bar, Exhibit, Picture
from ops import groups
from ops.tables import csv_text

Sentence = tuple[str, str, str]  # source, translation, reference
_WORST = 12
_GROUPS = 6
_INCHES = 0.3  # of a cell of the attention
_MOST_INCHES = 12.0


def sentence_bleu(sentences: Sequence[Sentence]) -> np.ndarray:
    """float64[n], the BLEU of each sentence alone, as a fraction, by sacrebleu.

    The settings are those of `evaluation.bleu`. Of a short sentence only the n-grams that it can
    have count.
    """
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU(**evaluation.SETTINGS, effective_order=True, force=True)
    scores = [metric.sentence_score(line, [true]).score for _, line, true in sentences]
    return np.array(scores, np.float64) / 100


def worst(sentences: Sequence[Sentence], scores: np.ndarray) -> Exhibit:
    """The sentences with the lowest `scores` float[n], of equal ones the longest first."""
    words = np.array([len(reference.split()) for _, _, reference in sentences], int)
    order = np.lexsort((-words, scores)).tolist()
    order = [i for i in order if sentences[i][1] != sentences[i][2]]
    text = "Every translation equals its reference."
    if order:
        text = (
            f"{len(order):,} translations differ from their reference. These have the lowest BLEU "
            "of their own, in per cent; among equal ones the longest come first. worst.csv has all."
        )
    head = ("BLEU", "source", "translation", "reference")
    rows = [(f"{100 * scores[i]:.1f}", *sentences[i]) for i in order]
    table = csv_text(
        [("sentence", *head), *((i + 1, *row) for i, row in zip(order, rows, strict=True))]
    )
    files = {"worst.csv": table.encode()}
    return Exhibit(
        title="Worst sentences", text=text, columns=head, rows=rows[:_WORST], files=files
    )


def by_length(sentences: Sequence[Sentence], lengths: np.ndarray) -> Exhibit:
    """BLEU of groups of sentences with similar `lengths` int[n] of their sources, in tokens."""

    def bleu(some: Sequence[Sentence]) -> dict[str, float]:
        return evaluation.bleu([line for _, line, _ in some], [true for _, _, true in some])

    overall, bars, table = bleu(sentences)["BLEU"], [], []
    for group in groups.even(lengths, _GROUPS):
        scores = bleu([sentences[i] for i in group])
        least, most = int(lengths[group].min()), int(lengths[group].max())
        label = f"{least:,} to {most:,}" if most > least else f"{least:,}"
        bars.append(Bar(label, scores["BLEU"], overall, len(group)))
        numbers = [f"{scores[name]:.6f}" for name in ("BLEU", "exact", "length_ratio")]
        table.append([least, most, len(group), *numbers])
    head = ["least_tokens", "most_tokens", "sentences", "BLEU", "exact", "length_ratio"]
    return Exhibit(
        title="BLEU by length",
        text="Each bar is the BLEU of the sentences whose source has so many tokens of the "
        "vocabulary, and beside it their number. The mark is the BLEU of all sentences.",
        bars=bars,
        files={"bleu_by_length.csv": csv_text([head, *table]).encode()},
    )


def attention(weights: np.ndarray, source: Sequence[str], target: Sequence[str]) -> Picture:
    """A PNG of float[T, S]: how much each token of the translation looks at each of the source."""
    from matplotlib.figure import Figure

    width, height = (min(1.6 + _INCHES * len(side), _MOST_INCHES) for side in (source, target))
    figure = Figure(figsize=(max(width, 4.0), max(height, 3.0)), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(weights, cmap="Blues", vmin=0, aspect="auto")
    for labels, place in ((source, axis.xaxis), (target, axis.yaxis)):
        place.set_ticks(range(len(labels)), labels, fontsize=8)
        for label in place.get_ticklabels():
            label.set_parse_math(False)
    axis.xaxis.tick_top()
    axis.tick_params(axis="x", rotation=90)
    figure.colorbar(image, shrink=0.8)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # a box stands for it
        figure.savefig(file, format="png", dpi=100)
    return Picture(file.getvalue(), (), wide=True)
