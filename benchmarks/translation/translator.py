"""What the translators share: a vocabulary, the sentences to evaluate, and BLEU."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.base import Benchmark, Exhibit, HostBatch
from benchmarks.translation import batches, bleu, records, table, vocabulary
from errors import ConfigError, DataError
from ops import files

_log = logging.getLogger("tpu_suite")

_SHOWN = 12  # sentences in the table


class Translation(Benchmark):
    """A benchmark that translates sentences.

    Its settings have `data_dir`, `vocabulary_file`, `vocabulary_size` and `eval_lengths`. `predict`
    returns id int32[b], the number of the sentence, and tokens int32[b, n], its translation up to
    EOS with PAD behind it.
    """

    scores_in_background = True
    use = "python -m scripts.translate --workdir=... translates text with it"
    uses = {"translate": "python -m scripts.translate --workdir={workdir} < sentences.txt"}

    _settings: Any
    published_vocabulary: int  # entries of the vocabulary that MLPerf's entries had

    @functools.cached_property
    def vocabulary(self) -> vocabulary.Vocabulary:
        """The vocabulary of the data; of several files, which must be equal, the first."""
        settings = self._settings
        paths = files.find(settings.data_dir, settings.vocabulary_file, "vocabulary")
        path, loaded = paths[0], vocabulary.load(paths[0])
        for other in paths[1:]:
            if vocabulary.load(other).digest != loaded.digest:
                raise DataError(
                    f"config.vocabulary_file={settings.vocabulary_file!r} matches {len(paths)} "
                    f"files that differ, such as {path} and {other}: name one"
                )
        if settings.vocabulary_size not in (0, loaded.size):
            raise ConfigError(
                f"config.vocabulary_size={settings.vocabulary_size:,}, but {path} has "
                f"{loaded.size:,} entries: set it to that number, or to 0, which takes the "
                "number of the file"
            )
        records.check_vocabulary(settings.data_dir, loaded, path)
        return loaded

    @property
    def vocabulary_size(self) -> int:
        """Entries of the vocabulary: of the config, else of the file, else the published number."""
        if self._settings.vocabulary_size or not self._settings.data_dir:
            return self._settings.vocabulary_size or self.published_vocabulary
        return self.vocabulary.size

    @property
    def eval_lengths(self) -> Sequence[int]:
        """The lengths in tokens that sentences are padded to."""
        return self._settings.eval_lengths

    def read_sides(self) -> tuple[np.ndarray, np.ndarray]:
        """Reads the sentences to evaluate and their translations, int32[n, length] each."""
        raise NotImplementedError

    def read_references(self) -> tuple[str, list[str]]:
        """The file of the true translations and its lines; ("", []) if there is none.

        Raises:
          DataError: the file cannot be read, or has not a line for each sentence.
        """
        raise NotImplementedError

    @functools.cached_property
    def sides(self) -> tuple[np.ndarray, np.ndarray]:
        """The sentences to evaluate and their translations, with zeros behind their ends."""
        return self.read_sides()

    @functools.cached_property
    def references(self) -> list[str]:
        """The true translations; without a file they are the decoded targets of the data."""
        path, lines = self.read_references()
        source = path or "the decoded targets of the evaluation"
        _log.info("references: %s; BLEU: sacrebleu %s", source, bleu.signature())
        return lines or [self.vocabulary.decode(row) for row in self.sides[1].tolist()]

    def notes(self, norm_examples: int, evaluating: bool) -> list[str]:
        del norm_examples
        if not evaluating or self.read_references()[0]:
            return []
        return [
            "there is no file of references: BLEU is against the decoded targets of the data, and "
            "not comparable with published scores; see config.eval_references"
        ]

    @property
    def metadata(self) -> dict[str, Any]:
        loaded = self.vocabulary
        return {"vocabulary": {"size": loaded.size, "digest": loaded.digest}}

    def eval_batches(self, batch_size: int, shard: int, num_shards: int) -> Iterator[HostBatch]:
        return batches.eval_batches(self.sides[0], self.eval_lengths, batch_size, shard, num_shards)

    def score(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        """BLEU as a fraction; see `benchmarks.translation.bleu`."""
        return bleu.score(self._translations(rows), self.references)

    def headline(self, scores: Mapping[str, float]) -> Mapping[str, float]:
        return {name: scores[name] for name in ("BLEU", "exact", "length_ratio")}

    def exhibits(self, rows: Iterator[dict[str, np.ndarray]]) -> list[Exhibit]:
        """Sentences to read; translations.txt, and .tsv with sources and references."""
        lines = self._translations(rows)
        sources = [self.vocabulary.decode(row) for row in self.sides[0].tolist()]
        sentences = list(zip(sources, lines, self.references, strict=True))
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

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a translation, in one line."""
        return self.vocabulary.decode(tokens).replace("\n", " ")

    def _translations(self, rows: Iterator[dict[str, np.ndarray]]) -> list[str]:
        """The translations in the order of the sentences."""
        lines = [""] * len(self.references)
        for row in rows:
            for i, tokens in zip(row["id"].tolist(), row["tokens"].tolist(), strict=True):
                lines[i] = self.decode(tokens)
        return lines
