"""Loads the pairs of sentences of a split from text, from records, or from the run's cache.

Text is two files with a sentence per line, whose words spaces separate.
`benchmarks.translation.rows` defines the records. A packed row is cut into its pairs.
"""

import concurrent.futures
import dataclasses
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow
from pyarrow import compute

from benchmarks.translation import rows
from benchmarks.translation.gnmt.corpus import Corpus, Sentences, id_type, join_sentences
from benchmarks.translation.rows import SIDES, Columns
from benchmarks.translation.vocabulary import EOS, Vocabulary, Words
from common.console import Progress
from common.data import caches, files
from common.data.order import first_examples
from common.data.shards import record_name, tensorflow
from common.errors import ConfigError, DataError, one_line

_log = logging.getLogger("tpu_suite")
_VERSION = 1  # raise it when the same files give other arrays
_FILLER = 128  # lines after the sentences to evaluate: Google's files are padded to full batches
_BLOCK = 8 << 20  # bytes of text that are read and looked up at a time


def load(
    settings: Any, split: str, vocabulary: Vocabulary, most: int | None, cache_dir: str
) -> Corpus:
    """Reads the pairs of a split, or takes them from `cache_dir` if nothing has changed.

    The names, sizes and times of modification (in seconds) of the files, the vocabulary and the
    arguments decide whether the cache is used. Training leaves out pairs with an empty side or one
    that is longer than the last of `bucket_lengths`; to evaluate, such a source is an error.

    Args:
      settings: `gnmt.Settings`, of which those that name the data are read, and the lengths.
      split: "train" or "eval".
      vocabulary: of the ids; text needs `Words`.
      most: to evaluate on text, the pairs to take; a few lines of filling may follow them.
      cache_dir: folder for the cache, local or gs://; "" for none.
    """
    paths, is_text = _find(settings, split), bool(getattr(settings, f"{split}_source"))
    longest = (settings.bucket_lengths if split == "train" else settings.eval_lengths)[-1]
    facts = [_VERSION, is_text, vocabulary.digest, split, longest, most]
    key = json.dumps([facts, caches.file_stamps(paths)])

    def read() -> Corpus:
        if split == "train":
            return _select_usable(_read(paths, is_text, vocabulary, split, longest), longest)
        return _check_sentences(_read(paths, is_text, vocabulary, split, None), longest, most)

    cache = f"{cache_dir}/{split}.npz" if cache_dir else ""
    corpus = caches.cached_arrays(Corpus, cache, key, read)
    paths, counts = (tuple(np.array(x).tolist()) for x in (corpus.paths, corpus.counts))
    return dataclasses.replace(corpus, paths=paths, counts=counts)


def _find(settings: Any, split: str) -> tuple[str, ...]:
    """The two files of text, or the files of records."""
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
        fix = f"set --config.data_dir (or {keys}) to where the data are"
        raise DataError(f"{error}; {fix}") from error


def _read(
    paths: tuple[str, ...], is_text: bool, vocabulary: Vocabulary, split: str, longest: int | None
) -> Corpus:
    """All pairs; of sentences of more than `longest` tokens only the lengths."""
    if is_text:
        return read_text(paths, vocabulary, longest)
    return read_records(paths, split, vocabulary.size, longest)


def _select_usable(corpus: Corpus, longest: int) -> Corpus:
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


def _check_sentences(corpus: Corpus, longest: int, most: int | None) -> Corpus:
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
        name = corpus.describe(int((lengths == 1).argmax()))
        raise DataError(f"{name}: the sentence to translate is empty; correct the file")
    if lengths.max() > longest:
        name, size = corpus.describe(int(lengths.argmax())), lengths.max()
        raise DataError(
            f"{name}: the sentence has {size} tokens, and the evaluation allows {longest}: "
            f"set the last of --config.eval_lengths to {size} or more"
        )
    return corpus


def read_text(paths: tuple[str, ...], vocabulary: Vocabulary, longest: int | None) -> Corpus:
    """Reads two files, local or gs://; line i of one is the translation of line i of the other.

    Args:
      paths: of the sources and of the targets.
      vocabulary: must be `Words`.
      longest: see `Sentences.cut`.

    Raises:
      DataError: the vocabulary is of another kind, or a file cannot be read, is not UTF-8 or has
        another number of lines than the other.
    """
    if not isinstance(vocabulary, Words):
        raise DataError(
            f"{paths[0]} is text, which needs a vocabulary with one token per line "
            f"(vocab.bpe.*), not one of {vocabulary.kind}; or make records of raw text: "
            "python -m scripts.prepare text"
        )
    total, done = sum(files.sizes(paths)), 0
    progress = Progress(total)

    def report(size: int) -> None:
        nonlocal done
        done += size
        share = done / max(total, 1)
        progress.at(done, f"reading sentences, once per workdir: {share:.0%} of the text")

    sources, targets = (read_text_side(path, vocabulary, longest, report) for path in paths)
    counts = len(sources.lengths), len(targets.lengths)
    if counts[0] != counts[1]:
        raise DataError(
            f"{paths[0]} has {counts[0]:,} lines and {paths[1]} {counts[1]:,}: line i of one is "
            "the translation of line i of the other; correct or prepare both again"
        )
    return Corpus.make(paths, (), np.arange(counts[0]), (sources, targets), longest)


def read_text_side(
    path: str, vocabulary: Words, longest: int | None, report: Callable[[int], None]
) -> Sentences:
    """Reads one file; only "\\n" ends a line, and a "\\r" before it is dropped.

    Args:
      path: the file.
      vocabulary: words that it does not have become Words.UNKNOWN.
      longest: see `Sentences.cut`.
      report: is called with the bytes of each block that was read.
    """
    tf = tensorflow()
    words = pyarrow.array([word.encode() for word in vocabulary.words], pyarrow.binary())
    options = compute.SetLookupOptions(words)
    dtype, number = id_type(vocabulary.size), 0
    parts = [Sentences(np.zeros(0, dtype), np.zeros(0, np.int32))]
    try:
        with files.reading(lambda: [path]), tf.io.gfile.GFile(path, "rb") as file:
            for block in _text_blocks(file):
                part = _encode_block(block, options, dtype)
                parts.append(part.cut(longest))
                number += len(part.lengths)
                report(len(block))
    except tf.errors.OpError as error:
        raise DataError(f"cannot read {path}: {one_line(error)}") from error
    except UnicodeDecodeError as error:
        line = number + error.object[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: not UTF-8; convert the file") from error
    return join_sentences(parts)


def _text_blocks(file: Any) -> Iterator[bytes]:
    """The content in pieces that end with "\\n"."""
    rest = b""
    while data := file.read(_BLOCK):
        head, newline, rest = (rest + data).rpartition(b"\n")
        if newline:
            yield head + newline
    if rest:
        yield rest + b"\n"


def _encode_block(block: bytes, words: Any, dtype: type[np.generic]) -> Sentences:
    """The sentences of complete lines; UnicodeDecodeError if they are not UTF-8.

    words: pyarrow's options of index_in for the words of the vocabulary.
    """
    block.decode()
    lines = [line.removesuffix(b"\r") for line in block.split(b"\n")[:-1]]
    call, space = compute.call_function, compute.SplitPatternOptions(" ")
    cut = call("split_pattern", [pyarrow.array(lines, pyarrow.binary())], space)
    # index_in has null for an unknown word; several spaces have empty words between them.
    indices = call("index_in", [cut.flatten()], words).fill_null(-1).to_numpy()
    is_word = call("binary_length", [cut.flatten()]).to_numpy() > 0
    ids = np.where(indices < 0, Words.UNKNOWN, indices + Words.FIRST).astype(dtype)[is_word]
    counts = np.concatenate([[0], np.cumsum(is_word)])  # words before each cut
    stops = counts[cut.offsets.to_numpy()[1:]]  # for each line: the words up to its end
    lengths = np.diff(stops, prepend=0) + 1
    return Sentences(np.insert(ids, stops, EOS), lengths.astype(np.int32))


@dataclasses.dataclass(frozen=True)
class _File:
    """The pairs of one file."""

    count: int  # of records
    packed: bool | None  # None if the file is empty
    records: np.ndarray  # int64[pairs], the record of each pair, counted in the file
    sides: tuple[Sentences, Sentences]


def read_records(paths: Sequence[str], split: str, vocab_size: int, longest: int | None) -> Corpus:
    """Reads and checks all records.

    Args:
      paths: the files.
      split: "train" or "eval". To evaluate, single pairs alone are read where packed rows lie
        in the same folder.
      vocab_size: ids are below it.
      longest: see `Sentences.cut`.
    """
    lengths, results = files.sizes(paths), []
    progress = Progress(sum(lengths))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:

        def one(path: str) -> _File:
            return _read_file(path, vocab_size, longest)

        # The first file alone: TensorFlow may crash if an operation is first used by two threads.
        with files.reading(lambda: list(paths[len(results) :])):
            for result in itertools.chain([one(paths[0])], pool.map(one, paths[1:])):
                results.append(result)
                text = f"reading pairs, once per workdir: {len(results)} of {len(paths)} files"
                progress.at(sum(lengths[: len(results)]), text)
    indices = rows.usable(paths, [file.packed for file in results], split)
    paths, results = tuple(paths[i] for i in indices), [results[i] for i in indices]
    counts = tuple(file.count for file in results)
    numbers = [
        file.records + first for file, first in zip(results, first_examples(counts), strict=False)
    ]
    sources, targets = (join_sentences([file.sides[side] for file in results]) for side in range(2))
    return Corpus.make(paths, counts, np.concatenate(numbers), (sources, targets), longest)


def _read_file(path: str, vocab_size: int, longest: int | None) -> _File:
    """All pairs of a file; DataError names the first record that cannot be used."""
    dtype = id_type(vocab_size)
    empty = Sentences(np.zeros(0, dtype), np.zeros(0, np.int32))
    records, sides, kinds = [np.zeros(0, np.int64)], ([empty], [empty]), list[bool]()

    def add(chunk: Any, first: int) -> None:
        columns = rows.columns(chunk)
        packed_rows = np.diff(columns["targets_segmentation"][1]) > 0
        kinds.append(bool(packed_rows[0]))
        if (other := packed_rows != kinds[0]).any():
            record = record_name(path, first + int(other.argmax()))
            raise DataError(f"{record}: packed rows and single pairs are mixed in this file")
        cut = _cut_rows(columns, kinds[0], vocab_size)
        if cut is None:
            raise _first_fault(path, first, columns, vocab_size)
        records.append(first + cut[0])
        for parts, (ids, lengths) in zip(sides, cut[1], strict=True):
            part = Sentences(ids.astype(dtype), lengths.astype(np.int32))
            parts.append(part.cut(longest))

    count = caches.count_records(path, add, rows.SCHEMA)
    joined = join_sentences(sides[0]), join_sentences(sides[1])
    return _File(count, kinds[0] if kinds else None, np.concatenate(records), joined)


def _cut_rows(
    columns: Columns, packed: bool, vocab_size: int
) -> tuple[np.ndarray, list[Any]] | None:
    """The row of each pair of a chunk, and (ids, lengths) of each side; None if a row is wrong.

    `_first_fault` then looks at the rows one by one.
    """
    keys, sides = [], []
    for side in SIDES:
        ids, splits = columns[side]
        segments, others = (
            columns[f"{side}_segmentation"] if packed else (np.ones_like(ids), splits)
        )
        if not np.array_equal(splits, others) or (np.diff(splits) == 0).any():
            return None
        if ((ids > 0) != (segments > 0)).any() or ids.min() < 0 or ids.max() >= vocab_size:
            return None
        row = np.repeat(np.arange(len(splits) - 1), np.diff(splits))
        key = ((row << 32) + segments)[ids > 0]  # rises from pair to pair
        ids = ids[ids > 0]
        first = np.flatnonzero(np.diff(key, prepend=-1))
        lengths = np.diff(first, append=len(ids))
        if (np.diff(key[first]) < 0).any() or (ids[first + lengths - 1] != EOS).any():
            return None
        keys.append(key[first])
        sides.append((ids, lengths))
    return (keys[0] >> 32, sides) if np.array_equal(*keys) else None


def _first_fault(path: str, first: int, columns: Columns, vocab_size: int) -> DataError:
    """The error for the first wrong row of a chunk."""
    for i, row in enumerate(rows.split(columns), first):
        wrong = rows.fault(row, vocab_size)
        if not wrong and not rows.is_packed(row) and not all(row[side].all() for side in SIDES):
            wrong = "it has the id 0 (padding) inside of a sentence; write it again"
        if wrong:
            return DataError(f"{record_name(path, i)}: {wrong}")
    fault = "a segment is out of order, or has no end"
    return DataError(f"{record_name(path, first)} or one of the next: {fault}")
