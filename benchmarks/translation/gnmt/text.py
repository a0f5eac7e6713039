"""Reads pairs of sentences from two files of text, one per line, whose words spaces separate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow
from pyarrow import compute

from benchmarks.translation.gnmt.corpus import Corpus, Sentences, id_type, join
from benchmarks.translation.vocabulary import EOS, Vocabulary, Words
from errors import DataError, one_line
from ops import files
from ops.progress import Progress
from ops.shards import tensorflow

_BLOCK = 8 << 20  # bytes that are read and looked up at a time
_LONGEST = 1 << 20  # bytes of a line, and of lines without text; a sentence has 100 to 1,000


def read(paths: tuple[str, ...], vocabulary: Vocabulary, longest: int | None) -> Corpus:
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

    sources, targets = (read_side(path, vocabulary, longest, report) for path in paths)
    counts = len(sources.lengths), len(targets.lengths)
    if counts[0] != counts[1]:
        raise DataError(
            f"{paths[0]} has {counts[0]:,} lines and {paths[1]} {counts[1]:,}: line i of one is "
            "the translation of line i of the other; mend or prepare both again"
        )
    return Corpus.make(paths, (), np.arange(counts[0]), (sources, targets), longest)


def read_side(
    path: str, vocabulary: Words, longest: int | None, report: Callable[[int], None]
) -> Sentences:
    """Reads one file; only "\\n" ends a line, and a "\\r" before it is dropped.

    Args:
      path: the file.
      vocabulary: words that it does not have become Words.UNKNOWN.
      longest: see `Sentences.cut`.
      report: is called with the bytes of each block that was read.

    Raises:
      DataError: the file cannot be read, or is not UTF-8.
    """
    tf = tensorflow()
    words = pyarrow.array([word.encode() for word in vocabulary.words], pyarrow.binary())
    options = compute.SetLookupOptions(words)
    dtype, number = id_type(vocabulary.size), 0
    parts = [Sentences(np.zeros(0, dtype), np.zeros(0, np.int32))]
    try:
        with files.reading(lambda: [path]), tf.io.gfile.GFile(path, "rb") as file:
            for block in _blocks(file):
                if len(block) >= _LONGEST and (block.isspace() or b"\n" not in block[:-1]):
                    fault = f"{len(block):,} bytes without text, or without the end of a line"
                    raise DataError(f"{path}, line {number + 1:,} and on: {fault}; mend it")
                part = _encode(block, options, dtype)
                parts.append(part.cut(longest))
                number += len(part.lengths)
                report(len(block))
    except tf.errors.OpError as error:
        raise DataError(f"cannot read {path}: {one_line(error)}") from error
    except UnicodeDecodeError as error:
        line = number + error.object[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: not UTF-8; convert the file") from error
    return join(parts)


def _blocks(file: Any) -> Iterator[bytes]:
    """The content in pieces that end with "\\n"."""
    rest = b""
    while data := file.read(_BLOCK):
        head, newline, rest = (rest + data).rpartition(b"\n")
        if newline:
            yield head + newline
        elif len(rest) >= _LONGEST:
            break
    if rest:
        yield rest + b"\n"


def _encode(block: bytes, words: Any, dtype: type[np.generic]) -> Sentences:
    """The sentences of complete lines; UnicodeDecodeError if they are not UTF-8.

    words: pyarrow's options of index_in for the words of the vocabulary.
    """
    block.decode()
    lines = [line.removesuffix(b"\r") for line in block.split(b"\n")[:-1]]
    call, space = compute.call_function, compute.SplitPatternOptions(" ")
    cut = call("split_pattern", [pyarrow.array(lines, pyarrow.binary())], space)
    # index_in has null for an unknown word; several spaces have empty words between them.
    places = call("index_in", [cut.flatten()], words).fill_null(-1).to_numpy()
    is_word = call("binary_length", [cut.flatten()]).to_numpy() > 0
    ids = np.where(places < 0, Words.UNKNOWN, places + Words.FIRST).astype(dtype)[is_word]
    counts = np.concatenate([[0], np.cumsum(is_word)])  # words before each cut
    stops = counts[cut.offsets.to_numpy()[1:]]  # for each line: the words up to its end
    lengths = np.diff(stops, prepend=0) + 1
    return Sentences(np.insert(ids, stops, EOS), lengths.astype(np.int32))
