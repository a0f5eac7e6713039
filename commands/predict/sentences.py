"""Translates sentences: what predict.py does with a translator.

Translations become rows for programs and plain lines for the user.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from commands.predict import outputs, texts
from commands.predict.model import Predictor, Request, say
from commands.predict.outputs import FORMATS, format_rows
from commands.predict.texts import Line
from common.errors import ConfigError
from engine import locations, model_source

COLUMNS = ("line", "source", "translation", "score", "error")
# Read before the first is translated, so that lines of one length share a batch.
_LINES = 1024
_UNKNOWN = 0.2  # the share of unknown words that causes a NOTE


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of predict.py for translators; 0 and "" are what the run had."""

    formats = ("text", *FORMATS)
    files = ()  # flags that name a file to write

    beams: int = 0
    n_best: int = 1
    data_dir: str = ""


def run(request: Request, options: Options, model: model_source.Model, stdin: Iterable[str]) -> int:
    """Writes the translations of each line; see `commands.predict.run`."""
    del stdin  # a line is read as bytes, because it may not be text
    started = time.monotonic()
    sources = request.sources or ["-"]
    names = texts.files(sources, "a sentence")
    outputs.check_apart(names, [("out", request.out)])
    uses, predictor = opened(model, options, request.batch_size)
    say(f"{model.source}: loaded in {time.monotonic() - started:.1f} s")
    is_typed = "-" in sources and sys.stdin.isatty()
    if is_typed:
        say("type a sentence and press Enter; Ctrl-D ends")
    translator = Sentences(uses, predictor)
    rows = translator.rows(texts.lines(sources, names), 1 if is_typed else _LINES)
    text = (
        plain(rows, options.n_best)
        if request.format in ("", "text")
        else format_rows(request.format, rows, COLUMNS)
    )
    outputs.write(request.out, text)
    translator.summarize()
    return 1 if translator.errors else 0


def opened(model: model_source.Model, options: Options, batch_size: int) -> tuple[Any, Predictor]:
    """The uses of a translator, and its search for translations; UserError as of `run`."""
    model = _changed(model, options)
    benchmark: Any = model.benchmark
    uses = benchmark.uses
    uses.check_files(model.manifest, model.source)

    def predict(params: Any, model_state: Any, batch: Any) -> Any:
        del model_state
        tokens, score = benchmark.n_best(params, batch["inputs"], options.n_best)
        return {"tokens": tokens, "score": score}

    return uses, Predictor(predict, model, batch_size, uses.at_once)


def _changed(model: model_source.Model, options: Options) -> model_source.Model:
    """The model with the settings that the flags name; ConfigError if there are too few beams."""
    beams = options.beams or model.config.beam_size
    if options.n_best > beams:
        raise ConfigError(
            f"--n_best={options.n_best}: the search has {beams} beams; give "
            f"--beams={options.n_best} or more"
        )
    folder = locations.check_path(options.data_dir or model.config.data_dir, "--data_dir")
    return model.changed(beam_size=beams, data_dir=folder)


class Sentences:
    """Translates lines in batches, in their order, and counts.

    Attributes:
      errors: lines without a translation that are not empty.
    """

    def __init__(self, uses: Any, predictor: Predictor):
        """`uses` is a `benchmarks.translation.use.TranslatorUses`."""
        self._uses, self._predictor = uses, predictor
        self._lines = self._cut = self.errors = 0
        self._seconds = 0.0  # of translating
        self._said: set[str] = set()

    def rows(self, every: Iterator[Line], at_once: int) -> Iterator[Row]:
        """The row of each line; `at_once` lines are read before the first is translated."""
        while chunk := list(itertools.islice(every, at_once)):
            started = time.monotonic()
            rows = self._translated(chunk)
            self._seconds += time.monotonic() - started
            self._lines += len(rows)
            for row in rows:
                if row.error:
                    self.errors += 1
                    say(f"line {row.line:,}: {row.error}")
            yield from rows

    def _translated(self, chunk: Sequence[Line]) -> list[Row]:
        rows, sentences = [], {}
        for number, line in enumerate(chunk, self._lines + 1):
            ids = [] if line.error else self._uses.encode(line.text)
            error = line.error
            if len(ids) > self._uses.most_tokens:
                error = (
                    f"{len(ids):,} tokens, more than {self._uses.most_tokens:,}: split it into "
                    "sentences"
                )
            rows.append(Row(number, line.text, error=error))
            if ids and not error:
                sentences[number] = ids
        self._note(sentences)
        groups: dict[int, list[int]] = {}  # the numbers of lines by the size of their inputs
        for number, ids in sentences.items():
            groups.setdefault(self._uses.size(len(ids)), []).append(number)
        for size, numbers in groups.items():
            for begin in range(0, len(numbers), self._predictor.batch_size):
                batch = numbers[begin : begin + self._predictor.batch_size]
                for number, row in zip(batch, self._batch(size, batch, sentences), strict=True):
                    i = number - self._lines - 1
                    rows[i] = dataclasses.replace(rows[i], **row)
        return rows

    def _batch(
        self, size: int, batch: Sequence[int], sentences: dict[int, list[int]]
    ) -> Iterator[dict[str, Any]]:
        """The fields of the rows of some sentences, whose inputs have `size` tokens."""
        inputs = np.zeros((len(batch), size), np.int32)
        for row, number in zip(inputs, batch, strict=True):
            row[: len(sentences[number])] = sentences[number]
        results = self._predictor([{"inputs": row} for row in inputs])
        for number, every, scores in zip(batch, results["tokens"], results["score"], strict=True):
            if not np.isfinite(scores[0]):
                yield {"error": "the model's scores are not finite: its run has diverged"}
                continue
            exist = np.isfinite(scores)
            if self._uses.is_cut(every[0]):
                self._cut += 1
                self._say_once(
                    "cut",
                    f"NOTE the translation of line {number:,} reached the model's greatest length "
                    "before its end; it is cut off there",
                )
            translations = [
                Translation(self._uses.text(tokens), round(float(score), 6))
                for tokens, score in zip(every[exist], scores[exist], strict=True)
            ]
            yield {"translations": tuple(translations)}

    def _note(self, sentences: dict[int, list[int]]) -> None:
        """Says once if the text is not cut as the training data were, and if a line is long."""
        unknown = self._uses.unknown_words(sentences.values())
        if unknown > _UNKNOWN * sum(map(len, sentences.values())):
            self._say_once(
                "unknown",
                f"NOTE {unknown:,} words are not in the vocabulary: the input must be tokenized "
                "and cut into pieces as the training data were, see docs/gnmt.md",
            )
        for number, ids in sentences.items():
            if len(ids) > self._uses.longest:
                self._say_once(
                    "long",
                    f"NOTE line {number:,} has {len(ids):,} tokens: the model was evaluated on at "
                    f"most {self._uses.longest:,}, and may translate longer lines badly",
                )

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            say(text)

    def summarize(self) -> None:
        """Says how fast it was, and how many lines have no translation."""
        rate = self._lines / max(self._seconds, 1e-9)
        count = f"{self._lines:,} line{'s' * (self._lines != 1)}"
        say(f"{count} in {self._seconds:.1f} s: {rate:,.1f} lines/s")
        if self._cut:
            say(f"{self._cut:,} translations are cut off at the model's greatest length")
        if self.errors:
            say(f"{self.errors:,} of {self._lines:,} lines have no translation")


# Rows and lines.


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
        """See `outputs.Row`."""
        content: dict[str, Any] = {"line": self.line, "source": self.source}
        if self.error:
            return content | {"error": self.error}
        return content | {"translations": [each._asdict() for each in self.translations]}

    def cells(self) -> list[dict[str, Any]]:
        """See `outputs.Row`: a line for each translation; without any there is one line."""
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
