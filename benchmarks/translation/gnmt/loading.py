"""Loads the pairs of sentences of a split from text, from records, or from the run's cache."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Any

import numpy as np

from benchmarks.translation.gnmt import records, text
from benchmarks.translation.gnmt.corpus import Corpus
from benchmarks.translation.vocabulary import Vocabulary
from errors import ConfigError, DataError
from ops import array_cache, files

_log = logging.getLogger("tpu_suite")
_VERSION = 1  # raise it when the same files give other arrays
_FILLER = 128  # lines after the sentences to evaluate: Google's files are padded to full batches


def load(
    settings: Any, split: str, vocabulary: Vocabulary, most: int | None, cache_dir: str
) -> Corpus:
    """Reads the pairs of a split, or takes them from `cache_dir` if nothing has changed.

    The names, sizes and times of modification (in seconds) of the files, the vocabulary and the
    arguments decide whether the cache is used. Training leaves out pairs with an empty side or one
    that is longer than the last of `bucket_lengths`.

    Args:
      settings: `gnmt.Settings`, of which those that name the data are read, and the lengths.
      split: "train" or "eval".
      vocabulary: of the ids; text needs `Words`.
      most: to evaluate on text, the pairs to take; a few lines of filling may follow them.
      cache_dir: folder for the cache, local or gs://; "" for none.

    Raises:
      ConfigError: there are sources without targets, or targets without sources.
      DataError: files are missing, cannot be read, are not UTF-8, differ in their numbers of lines
        or have no pair to use; a record cannot be used; to evaluate, a source is empty or longer
        than the last of `eval_lengths`, or there are fewer pairs than `most`, or many more.
    """
    paths, is_text = _find(settings, split), bool(getattr(settings, f"{split}_source"))
    longest = (settings.bucket_lengths if split == "train" else settings.eval_lengths)[-1]
    facts = [_VERSION, is_text, vocabulary.digest, split, longest, most]
    key = json.dumps([facts, array_cache.stamps(paths)])

    def read() -> Corpus:
        if split == "train":
            return _usable(_read(paths, is_text, vocabulary, split, longest), longest)
        return _checked(_read(paths, is_text, vocabulary, split, None), longest, most)

    cache = f"{cache_dir}/{split}.npz" if cache_dir else ""
    corpus = array_cache.cached(Corpus, cache, key, read)
    paths, counts = (tuple(np.array(x).tolist()) for x in (corpus.paths, corpus.counts))
    return dataclasses.replace(corpus, paths=paths, counts=counts)


def _find(settings: Any, split: str) -> tuple[str, ...]:
    """The two files of text, or those of records."""
    data_dir, records = settings.data_dir, getattr(settings, f"{split}_files")
    text = {side: getattr(settings, f"{split}_{side}") for side in ("source", "target")}
    try:
        if all(text.values()):
            return tuple(
                files.find_one(data_dir, pattern, f"{split} {side} text", f"{split}_{side}")
                for side, pattern in text.items()
            )
        if any(text.values()):
            missing = next(side for side, pattern in text.items() if not pattern)
            raise ConfigError(
                f"config.{split}_{missing}='': text needs {split}_source and {split}_target; "
                f"leave both empty to read the records {split}_files"
            )
        paths = files.find(data_dir, records, f"{split} records")
        if "*" in records:  # the pattern means all shards, not some by name
            files.check_complete(paths)
        return paths
    except DataError as error:
        keys = f"{split}_files, or {split}_source and {split}_target"
        remedy = f"set --config.data_dir (or {keys}) to where the data are"
        raise DataError(f"{error}; {remedy}") from error


def _read(
    paths: tuple[str, ...], is_text: bool, vocabulary: Vocabulary, split: str, longest: int | None
) -> Corpus:
    """All pairs; of sentences of more than `longest` tokens only the lengths."""
    if is_text:
        return text.read(paths, vocabulary, longest)
    return records.read(paths, split, vocabulary.size, longest)


def _usable(corpus: Corpus, longest: int) -> Corpus:
    """The pairs to train on; DataError if there is none."""
    is_usable = ((corpus.lengths > 1) & (corpus.lengths <= longest)).all(axis=1)
    left_out, total = int((~is_usable).sum()), len(corpus)
    fact = (
        f"{left_out:,} of {total:,} train pairs have an empty side or one of more than {longest} "
        "tokens and are left out"
    )
    if left_out == total:
        reason = f"{fact}: see config.bucket_lengths" if total else "the files are empty"
        raise DataError(f"{corpus.paths[0]} has no pairs to train on: {reason}")
    if left_out:
        _log.info("%s: %s", corpus.paths[0], fact)
    return corpus.take(np.flatnonzero(is_usable))


def _checked(corpus: Corpus, longest: int, most: int | None) -> Corpus:
    """The pairs to evaluate; DataError if they cannot be used."""
    total, first = len(corpus), corpus.paths[0]
    if not total:
        raise DataError(f"{first} has no sentences to evaluate: it is empty")
    if most is not None and not corpus.counts:
        if not most <= total <= most + _FILLER:
            raise DataError(
                f"{first} has {total:,} lines, and {most:,} sentences are to be evaluated: each "
                "needs the line of its reference; see config.eval_references"
            )
        corpus = corpus.take(np.arange(most))
    lengths = corpus.lengths[:, 0]
    if (lengths == 1).any():
        place = corpus.describe(int((lengths == 1).argmax()))
        raise DataError(f"{place}: the sentence to translate is empty; mend the file")
    if lengths.max() > longest:
        place, size = corpus.describe(int(lengths.argmax())), lengths.max()
        raise DataError(
            f"{place}: the sentence has {size} tokens, and the evaluation has room for {longest}: "
            f"set the last of --config.eval_lengths to {size} or more"
        )
    return corpus
