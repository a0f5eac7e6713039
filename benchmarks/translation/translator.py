"""What the translators share: a vocabulary, the sentences to evaluate, and BLEU."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.base import Benchmark, HostBatch
from benchmarks.translation import batches, bleu, records, vocabulary
from errors import ConfigError, DataError
from ops import files

if TYPE_CHECKING:
    from benchmarks.uses import Uses

_log = logging.getLogger("tpu_suite")


class Translation(Benchmark):
    """A benchmark that translates sentences.

    Its settings have `data_dir`, `vocabulary_file`, `vocabulary_size` and `eval_lengths`. `predict`
    returns id int32[b], the number of the sentence, and tokens int32[b, n], its translation up to
    EOS with PAD behind it.
    """

    scores_in_background = True

    settings: Any
    published_vocabulary: int  # entries of the vocabulary that MLPerf's entries had

    @functools.cached_property
    def vocabulary(self) -> vocabulary.Vocabulary:
        """The vocabulary of the data; of several files, which must be equal, the first."""
        settings = self.settings
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
        if self.settings.vocabulary_size or not self.settings.data_dir:
            return self.settings.vocabulary_size or self.published_vocabulary
        return self.vocabulary.size

    @property
    def eval_lengths(self) -> Sequence[int]:
        """The lengths in tokens that sentences are padded to."""
        return self.settings.eval_lengths

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
        return bleu.score(self.translations(rows), self.references)

    def headline(self, scores: Mapping[str, float]) -> Mapping[str, float]:
        return {name: scores[name] for name in ("BLEU", "exact", "length_ratio")}

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a translation, in one line."""
        return self.vocabulary.decode(tokens).replace("\n", " ")

    def translations(self, rows: Iterator[dict[str, np.ndarray]]) -> list[str]:
        """The translations in the order of the sentences."""
        lines = [""] * len(self.references)
        for row in rows:
            for i, tokens in zip(row["id"].tolist(), row["tokens"].tolist(), strict=True):
                lines[i] = self.decode(tokens)
        return lines

    @property
    def uses(self) -> Uses:
        from benchmarks.translation.use import TranslatorUses

        return TranslatorUses(self)
