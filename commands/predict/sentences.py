"""Translates sentences: what predict.py does with a translator."""

import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.uses import Sentences
from commands.predict import documents, outputs
from commands.predict.model import Batch, Predictor, Request
from commands.predict.outputs import Row, say
from commands.predict.sources import Line, read_lines
from common.errors import ConfigError, count
from common.placeholders import difference
from engine.checkpoint import model_source

FORMATS = ("text", *outputs.FORMATS)
COLUMNS = ("line", "source", "translation", "score", "placeholders", "error")
# Read before the first is translated, so that lines of one length share a batch.
_LINES = 1024
_MAX_TOKENS = 2048  # 8 such sentences take 2 GB for attention in the Transformer (big)
_UNKNOWN = 0.2  # the share of unknown words that causes a NOTE
_TOLD = 20  # lines whose placeholders differ that are told one by one


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of predict.py for translators."""

    beams: int = 0  # 0: as many as the run has; `prepare` sets them and `data_dir`
    n_best: int = 1
    data_dir: str = ""
    all: bool = False  # of a document also what is translated


def run(request: Request, options: Options, model: model_source.Model) -> int:
    """Writes the translations of each line; returns the exit code."""
    started = time.monotonic()
    sources = request.sources or ["-"]
    assert isinstance(uses := model.benchmark.uses, Sentences)
    document = documents.read(request, options.all, options.n_best, uses)
    lines = (
        documents.lines(document) if document else read_lines(sources, "a sentence", request.out)
    )
    translator = Translator(model, options, request.batch_size)
    say(f"{model.source}: loaded in {time.monotonic() - started:.1f} s")
    is_typed = "-" in sources and sys.stdin.isatty()
    if is_typed:
        say("type a sentence and press Enter; Ctrl-D ends")
    rows = translator.rows(lines, 1 if is_typed else _LINES)
    if document:
        documents.write(document, rows, request.out)
        translator.summarize()
        return 1 if translator.errors else 0
    plain = functools.partial(plain_text, options.n_best)
    outputs.write_rows(request.out, request.format, rows, COLUMNS, _cells, plain)
    translator.summarize()
    return 1 if translator.errors else 0


class Translator:
    """Translates lines in batches, in their order, and counts."""

    def __init__(self, model: model_source.Model, options: Options, batch_size: int):
        """Reads the weights; UserError for too few beams or another vocabulary than the model's."""
        uses = model.benchmark.uses
        assert isinstance(uses, Sentences)
        self._uses = uses
        if options.n_best > uses.beams:
            raise ConfigError(
                f"--n_best={options.n_best}: the search has {uses.beams} beams; give "
                f"--beams={options.n_best} or more"
            )
        uses.check_files(model.manifest, model.source)

        def predict(params: Any, model_state: Any, batch: Batch) -> Batch:
            del model_state
            top = uses.beams if "all" in batch else options.n_best
            tokens, score = uses.n_best(params, batch["inputs"], top)
            return {"tokens": tokens, "score": score}

        self._predictor = Predictor(predict, model, batch_size, uses.at_once)
        self._n_best = options.n_best
        self._repaired = self._marked = 0  # lines, by their placeholders
        self._lines = self._cut = self.errors = 0  # errors: lines that are not empty
        self._seconds, self._has_noted = 0.0, False  # of translating; unknown words

    def rows(self, every: Iterator[Line], at_once: int) -> Iterator[Row]:
        """The row of each line; `at_once` lines are read before the first is translated."""
        while chunk := list(itertools.islice(every, at_once)):
            started = time.monotonic()
            rows = self._translated(chunk)
            self._seconds += time.monotonic() - started
            begin = self._lines + 1
            self._lines += len(rows)
            for number, (line, row) in enumerate(zip(chunk, rows, strict=True), begin):
                place = line.place or f"line {number:,}"
                if row.error:
                    self.errors += 1
                    say(f"{place}: {row.error}")
                elif mark := row.content.get("placeholders"):
                    self._marked += 1
                    if self._marked <= _TOLD:
                        say(f"{place}: the translation {mark}")
            yield from rows

    def _translated(self, chunk: Sequence[Line]) -> list[Row]:
        """The rows of some lines; an empty line has neither translations nor an error."""
        rows: dict[int, Row] = {}  # by the numbers of lines, as is `sentences`
        sentences: dict[int, Sequence[int]] = {}
        max_tokens, codes = max(self._uses.lengths[-1], _MAX_TOKENS), tuple(self._uses.codes)
        for number, line in enumerate(chunk, self._lines + 1):
            ids = [] if line.error else self._uses.encode(line.text)
            error = line.error
            if len(ids) > max_tokens:
                error = f"{len(ids):,} tokens, more than {max_tokens:,}: split it into sentences"
            elif ids and codes and not line.text.startswith(codes):
                error = f"it must begin with the code of a target language, such as {codes[0]}"
            source = {"line": number, "source": line.text}
            rows[number] = Row(source, error, {"translations": []})
            if ids and not error:
                sentences[number] = ids
        self._note(sentences)
        inputs = [padded(ids, self._uses.lengths) for ids in sentences.values()]
        results = self._predictor([{"inputs": ids} for ids in inputs])
        for number, result in zip(sentences, results, strict=True):
            rows[number] = self._row(rows[number].source, result["tokens"], result["score"])
            self._cut += not rows[number].error and self._uses.is_cut(result["tokens"][0])
        self._repair(rows, sentences)
        return [*rows.values()]

    def _marks(self, row: Row) -> list[str]:
        """How the placeholders of each translation differ from those of the sentence; "" if not."""
        plain = self._uses.plain(row.source["source"])
        return [difference(plain, each["text"]) for each in row.content.get("translations", ())]

    def _repair(self, rows: dict[int, Row], sentences: Mapping[int, Sequence[int]]) -> None:
        """Puts the best translation that keeps the placeholders first, or marks the row."""
        marked = {n: mark for n in sentences for mark in self._marks(rows[n])[:1] if mark}
        every = {n: rows[n] for n in marked}
        if self._n_best < self._uses.beams:  # then with all that the search has
            inputs = [padded(sentences[n], self._uses.lengths) for n in marked]
            results = self._predictor(
                [{"inputs": ids, "all": np.ones((), np.int8)} for ids in inputs]
            )
            for n, result in zip(marked, results, strict=True):
                every[n] = self._row(rows[n].source, result["tokens"], result["score"])
        for n, row in every.items():
            if "" in (marks := self._marks(row)):
                translations = [*row.content["translations"]]
                translations.insert(0, translations.pop(marks.index("")))
                rows[n] = Row(row.source, "", {"translations": translations[: self._n_best]})
                self._repaired += 1
            else:
                content = {**rows[n].content, "placeholders": marked[n]}
                rows[n] = Row(row.source, "", content)

    def _row(self, source: Mapping[str, Any], every: np.ndarray, scores: np.ndarray) -> Row:
        """The row of a sentence with translations `every` int32[n, l] and their scores f32[n]."""
        if not np.isfinite(scores[0]):
            return Row(source, "the model's scores are not finite: its run has diverged")
        exist = np.isfinite(scores)
        translations = [
            {"text": self._uses.text(tokens), "score": round(float(score), 6)}
            for tokens, score in zip(every[exist], scores[exist], strict=True)
        ]
        return Row(source, "", {"translations": translations})

    def _note(self, sentences: Mapping[int, Sequence[int]]) -> None:
        """Says once if the text is not cut into words as the training data were."""
        unknown = self._uses.unknown_words(sentences.values())
        if unknown > _UNKNOWN * sum(map(len, sentences.values())) and not self._has_noted:
            self._has_noted = True
            say(
                f"NOTE {unknown:,} words are not in the vocabulary: the input must be tokenized "
                "and cut into pieces as the training data were, see docs/gnmt.md"
            )

    def summarize(self) -> None:
        """Says how fast it was, and how many lines have no translation."""
        rate = self._lines / max(self._seconds, 1e-9)
        say(f"{count(self._lines, 'line')} in {self._seconds:.1f} s: {rate:,.1f} lines/s")
        if self._cut:
            say(f"{count(self._cut, 'translation')} cut off at the model's greatest length")
        if self._repaired or self._marked:
            say(
                f"placeholders: {count(self._repaired, 'line')} repaired by a lower translation of "
                f"the search, {self._marked:,} whose placeholders differ"
            )
        if self.errors:
            say(f"{self.errors:,} of {self._lines:,} lines have no translation")


def padded(ids: Sequence[int], lengths: Sequence[int]) -> np.ndarray:
    """`ids`, then zeros, int32[n]: n is the first of `lengths` that fits, or the last, doubled."""
    size = next((length for length in lengths if length >= len(ids)), lengths[-1])
    while size < len(ids):
        size *= 2
    return np.pad(np.asarray(ids, np.int32), (0, size - len(ids)))


def _cells(row: Row) -> list[dict[str, Any]]:
    """The lines of a CSV for a sentence, one for each translation; the best one has the mark."""
    cells = [{"translation": t["text"], "score": t["score"]} for t in row.content["translations"]]
    for best in cells[:1]:
        best["placeholders"] = row.content.get("placeholders", "")
    return cells


def plain_text(n_best: int, rows: Iterable[Row], width: int) -> Iterator[str]:
    """`n_best` lines for each row: the text, after its score and a tab if `n_best` is above 1.

    A line is empty where there is no translation.
    """
    del width
    for row in rows:
        texts = [
            each["text"] if n_best == 1 else f"{each['score']:.4f}\t{each['text']}"
            for each in row.content.get("translations", ())
        ]
        texts += [""] * (n_best - len(texts))
        yield "".join(f"{text}\n" for text in texts)
