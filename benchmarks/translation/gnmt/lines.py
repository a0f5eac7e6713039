"""Reads files of sentences, one per line, cut into words by spaces, as ids of a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow
from pyarrow import compute

from benchmarks.translation.vocabulary import EOS, Words
from errors import DataError, one_line
from ops import files
from ops.shards import tensorflow

_BLOCK = 8 << 20  # bytes that are read and looked up at a time
_SPACE, _NEWLINE, _RETURN = b" \n\r"


class Sentences(NamedTuple):
    """Sentences as ids, EOS included, one behind the other.

    Attributes:
      ids: [tokens], of the type of `id_type`.
      lengths: int32[sentences], those of sentences without ids included.
    """

    ids: np.ndarray
    lengths: np.ndarray

    def cut(self, longest: int | None) -> Sentences:
        """Drops the ids, and not the lengths, of sentences of more than `longest` tokens."""
        if longest is None or (self.lengths <= longest).all():
            return self
        return Sentences(self.ids[np.repeat(self.lengths <= longest, self.lengths)], self.lengths)


def id_type(vocab_size: int) -> type[np.generic]:
    """The smallest of NumPy's integers, uint16 or int32, that holds all ids."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def join(parts: list[Sentences]) -> Sentences:
    """The sentences of all parts, of which there is at least one."""
    return Sentences(*map(np.concatenate, zip(*parts, strict=True)))


def read(
    path: str, vocabulary: Words, longest: int | None, report: Callable[[int], None]
) -> Sentences:
    """Reads a file, local or gs://; only "\\n" ends a line, and a "\\r" before it is dropped.

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
                part = _encode(block, options, dtype)
                parts.append(part.cut(longest))
                number += len(part.lengths)
                report(len(block))
    except tf.errors.OpError as error:
        raise DataError(f"cannot read {path}: {one_line(error)}") from error
    except UnicodeDecodeError as error:
        line = number + error.object[: error.start].count(_NEWLINE) + 1
        raise DataError(f"{path}, line {line}: not UTF-8; convert the file") from error
    return join(parts)


def _blocks(file: Any) -> Iterator[bytes]:
    """The content in pieces that end with "\\n"."""
    rest = b""
    while data := file.read(_BLOCK):
        head, newline, rest = (rest + data).rpartition(b"\n")
        if newline:
            yield head + newline
    if rest:
        yield rest + b"\n"


def _encode(block: bytes, words: Any, dtype: type[np.generic]) -> Sentences:
    """The sentences of whole lines; UnicodeDecodeError if they are not UTF-8.

    words: pyarrow's options of index_in for the words of the vocabulary.
    """
    block.decode()
    data = np.frombuffer(block, np.uint8)
    is_end = data == _NEWLINE
    is_word = ~(is_end | (data == _SPACE))
    ends = np.flatnonzero(is_end)
    before = np.maximum(ends - 1, 0)
    is_word[before[data[before] == _RETURN]] = False
    edges = np.flatnonzero(np.diff(is_word, prepend=False))  # a block ends with a gap
    begins, stops = edges[::2], edges[1::2]
    offsets = np.concatenate([[0], np.cumsum(stops - begins)]).astype(np.int32)
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(data[is_word])]
    tokens = pyarrow.Array.from_buffers(pyarrow.binary(), len(begins), buffers)
    # index_in has null for an unknown word.
    places = compute.call_function("index_in", [tokens], words).fill_null(-1).to_numpy()
    ids = np.where(places < 0, Words.UNKNOWN, places + Words.FIRST).astype(dtype)
    behind = np.searchsorted(begins, ends)  # for each line: the tokens up to its end
    lengths = np.diff(behind, prepend=0) + 1
    return Sentences(np.insert(ids, behind, EOS), lengths.astype(np.int32))
