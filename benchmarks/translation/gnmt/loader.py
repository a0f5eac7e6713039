"""Loads the pairs of sentences of a split from text, from records, or from the run's cache.

Text is two files with a sentence per line, whose words spaces separate.
`benchmarks.translation.schema` defines the records. A packed row is cut into its pairs.
"""

import array
import concurrent.futures
import dataclasses
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.translation import schema
from benchmarks.translation.gnmt.corpus import Corpus, Sentences, id_type
from benchmarks.translation.vocabulary import EOS, Vocabulary, Words
from common.data import caches, files, storage
from common.data.order import first_examples
from common.data.shards import record_name
from common.errors import ConfigError, DataError, one_line
from common.progress import Progress
from common.tensorflow import tensorflow
from common.text import decoded

if TYPE_CHECKING:
    from benchmarks.translation.gnmt import Settings

_log = logging.getLogger("tpu_suite")
_VERSION = 1  # raise it when the same files give other arrays
_FILLER = 128  # lines after the sentences to evaluate: Google's files are padded to full batches
_BLOCK = 8 << 20  # bytes of text that are read and looked up at a time


def load(
    settings: "Settings", split: str, vocabulary: Vocabulary, count: int | None, cache_dir: str
) -> Corpus:
    """Reads the pairs of a split, or takes them from `cache_dir` if nothing has changed.

    The names, sizes and times of modification (in seconds) of the files, the vocabulary and the
    arguments decide whether the cache is used. Training leaves out pairs with an empty side or one
    that is longer than the last of `bucket_lengths`; to evaluate, such a source is an error.

    Text needs `Words`. `count` is the number of pairs to evaluate on; in text, a few lines of
    filling may follow them. `cache_dir` is local or gs://; "" keeps nothing.
    """
    paths, is_text = _find(settings, split), bool(getattr(settings, f"{split}_source"))
    longest = (settings.bucket_lengths if split == "train" else settings.eval_lengths)[-1]
    facts = [_VERSION, is_text, vocabulary.digest, split, longest, count]
    key = json.dumps([facts, caches.file_stamps(paths)])

    def read() -> Corpus:
        kept = longest if split == "train" else None  # training leaves out longer ones
        if is_text:
            corpus = read_text(paths, vocabulary, kept)
        else:
            corpus = read_records(paths, split, vocabulary.size, kept)
        if split == "train":
            return _select_usable(corpus, longest)
        return _check_sentences(corpus, longest, count)

    cache = f"{cache_dir}/{split}.npz" if cache_dir else ""
    corpus = caches.cached_arrays(Corpus, cache, key, read)
    paths, counts = (tuple(np.array(x).tolist()) for x in (corpus.paths, corpus.counts))
    return dataclasses.replace(corpus, paths=paths, counts=counts)


def _find(settings: "Settings", split: str) -> tuple[str, ...]:
    """The two files of text, or the files of records."""
    data_dir, records = settings.data_dir, getattr(settings, f"{split}_files")
    text = {side: getattr(settings, f"{split}_{side}") for side in ("source", "target")}
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
    return files.find_shards(data_dir, records, split, marker="*")


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


def _check_sentences(corpus: Corpus, longest: int, count: int | None) -> Corpus:
    """The pairs to evaluate; DataError if they cannot be used."""
    total, first = len(corpus), corpus.paths[0]
    if not total:
        raise DataError(f"{first} has no sentences to evaluate: it is empty")
    if count is not None and not corpus.counts:
        if not count <= total <= count + _FILLER:
            raise DataError(
                f"{first} has {total:,} lines, and {count:,} sentences are to be evaluated: each "
                "needs the line of its reference; see config.eval_references"
            )
        corpus = corpus.take(np.arange(count))
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
    """Reads the files of sources and of targets; line i of one translates line i of the other.

    `vocabulary` must be `Words`. Only the lengths of sentences above `longest` are kept, if given.
    """
    if not isinstance(vocabulary, Words):
        raise DataError(
            f"{paths[0]} is text, which needs a vocabulary with one token per line "
            f"(vocab.bpe.*), not one of {vocabulary.kind}; or make records of raw text: "
            "python -m scripts.prepare text"
        )
    total, done = sum(storage.sizes(paths)), 0
    progress = Progress(total)

    def report(size: int) -> None:
        nonlocal done
        done += size
        share = done / max(total, 1)
        progress.at(done, f"reading sentences, once per workdir: {share:.0%} of the text")

    sources, targets = (read_text_side(path, vocabulary, report) for path in paths)
    counts = len(sources.lengths), len(targets.lengths)
    if counts[0] != counts[1]:
        raise DataError(
            f"{paths[0]} has {counts[0]:,} lines and {paths[1]} {counts[1]:,}: line i of one is "
            "the translation of line i of the other; correct or prepare both again"
        )
    return Corpus.make(paths, (), np.arange(counts[0]), (sources, targets), longest)


def read_text_side(path: str, vocabulary: Words, report: Callable[[int], None]) -> Sentences:
    """Reads one file; only "\\n" ends a line, and a "\\r" before it is dropped.

    Words without an entry become Words.UNKNOWN. `report` gets the number of bytes of each block.
    """
    tf = tensorflow()
    ids, lengths = array.array(np.dtype(id_type(vocabulary.size)).char), array.array("i")
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            for block in _text_blocks(file):
                text = decoded(block, path, line=len(lengths) + 1)
                for line in text.removesuffix("\n").split("\n"):
                    words = vocabulary.encode(line.removesuffix("\r"))
                    ids.extend(words)
                    ids.append(EOS)
                    lengths.append(len(words) + 1)
                report(len(block))
    except tf.errors.OpError as error:
        raise DataError(f"cannot read {path}: {one_line(error)}") from error
    return Sentences(np.array(ids), np.array(lengths))


def _text_blocks(file: Any) -> Iterator[bytes]:
    """The content in pieces that end with "\\n"."""
    line = b""
    while data := file.read(_BLOCK):
        head, newline, line = (line + data).rpartition(b"\n")
        if newline:
            yield head + newline
    if line:
        yield line + b"\n"


@dataclasses.dataclass(frozen=True)
class _File:
    """The pairs of one file."""

    count: int  # the number of records
    packed: bool | None  # None if the file is empty
    records: np.ndarray  # int64[pairs], the record of each pair, counted in the file
    sides: list[Sentences]


def read_records(paths: Sequence[str], split: str, vocab_size: int, longest: int | None) -> Corpus:
    """Reads and checks all records, whose ids must be below `vocab_size`.

    Where packed rows and single pairs lie in one folder, evaluation reads only the single pairs.
    Only the lengths of sentences above `longest` are kept, if given.
    """
    lengths, results = storage.sizes(paths), []
    progress = Progress(sum(lengths))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        # The first file alone: TensorFlow may crash if an operation is first used by two threads.
        first = _read_file(paths[0], vocab_size)
        others = pool.map(lambda path: _read_file(path, vocab_size), paths[1:])
        for result in itertools.chain([first], others):
            results.append(result)
            text = f"reading pairs, once per workdir: {len(results)} of {len(paths)} files"
            progress.at(sum(lengths[: len(results)]), text)
    indices = schema.usable(paths, [file.packed for file in results], split)
    paths, results = tuple(paths[i] for i in indices), [results[i] for i in indices]
    counts = tuple(file.count for file in results)
    numbers = [
        file.records + first for file, first in zip(results, first_examples(counts), strict=False)
    ]
    sides = zip(*(file.sides for file in results), strict=True)
    sources, targets = (Sentences(*map(np.concatenate, zip(*x, strict=True))) for x in sides)
    return Corpus.make(paths, counts, np.concatenate(numbers), (sources, targets), longest)


def _read_file(path: str, vocab_size: int) -> _File:
    """All pairs of a file; DataError names the first record that cannot be used."""
    numbers: list[int] = []
    sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    packed: set[bool] = set()  # whether records are packed

    def add(chunk: Any, first: int) -> None:
        for number, row in enumerate(schema.parse(chunk), first):
            packed.add(schema.is_packed(row))
            wrong = schema.error(row, vocab_size)
            if len(packed) > 1:
                wrong = "packed rows and single pairs are mixed in this file"
            if wrong:
                raise DataError(f"{record_name(path, number)}: {wrong}")
            for pair in schema.pairs(row):
                numbers.append(number)
                for sentences, ids in zip(sides, pair, strict=True):
                    sentences.append(ids)

    count = caches.count_records(path, add, schema.SCHEMA)
    joined = []
    for sentences in sides:
        ids = np.concatenate([np.zeros(0, np.int64), *sentences]).astype(id_type(vocab_size))
        joined.append(Sentences(ids, np.array([len(ids) for ids in sentences], np.int32)))
    return _File(count, packed.pop() if packed else None, np.array(numbers, np.int64), joined)
