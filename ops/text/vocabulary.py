"""Opens vocabularies: tensor2tensor's files of subwords, and models of sentencepiece.

Id 0 is the padding and id 1 the end of a sentence (EOS) in both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from etils import epath

from errors import DataError, one_line
from ops.text import subwords

PAD, EOS = 0, 1


class Vocabulary(Protocol):
    """Text to ids and back.

    Attributes:
      kind: "subwords" or "sentencepiece".
      size: the number of ids, PAD and EOS included.
      digest: SHA-256 of the file's content, in hexadecimal.
    """

    kind: str
    size: int
    digest: str

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without EOS; none is PAD or EOS."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids before the first EOS; PAD is skipped."""
        ...


class Subwords:
    """A `Vocabulary` of tensor2tensor's subwords."""

    kind = "subwords"

    def __init__(self, data: bytes, path: str):
        self.digest = hashlib.sha256(data).hexdigest()
        try:
            entries = subwords.parse(data.decode(), path)
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is no vocabulary: it is not UTF-8") from error
        self.size = len(entries)
        self._encoder = subwords.Encoder(entries)

    def encode(self, text: str) -> list[int]:
        """See `Vocabulary`."""
        return self._encoder.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """See `Vocabulary`."""
        return self._encoder.decode(_sentence(ids))


class SentencePiece:
    """A `Vocabulary` by a model of sentencepiece.

    Its ids are moved up by two, unless the model already has 0 as padding and 1 as the end.
    """

    kind = "sentencepiece"

    def __init__(self, data: bytes, path: str):
        self.digest = hashlib.sha256(data).hexdigest()
        self._model = _load_model(data, path)
        own = (self._model.pad_id(), self._model.eos_id()) == (PAD, EOS)
        self._shift = 0 if own else 2
        self.size = self._model.vocab_size() + self._shift

    def encode(self, text: str) -> list[int]:
        """See `Vocabulary`."""
        return [i + self._shift for i in self._model.encode(text)]

    def decode(self, ids: Iterable[int]) -> str:
        """See `Vocabulary`."""
        return self._model.decode([i - self._shift for i in _sentence(ids) if i < self.size])


def load(path: str) -> Vocabulary:
    """Loads a vocabulary file, local or gs://; its content says of which kind it is.

    Raises:
      DataError: the file cannot be read, or is no vocabulary.
    """
    try:
        data = epath.Path(path).read_bytes()
    except Exception as error:  # gs:// raises TensorFlow's own classes
        fault = "there is no such file" if "No such file" in str(error) else one_line(error)
        raise DataError(f"cannot read the vocabulary {path}: {fault}") from error
    return parse(data, path)


def parse(data: bytes, path: str) -> Vocabulary:
    """The vocabulary in the bytes of a file; DataError, with the path, if they are none."""
    if data.lstrip(b"'\"").startswith(subwords.RESERVED[0].encode()):
        return Subwords(data, path)
    if data.startswith(b"\n"):  # the first piece of a sentencepiece model
        return SentencePiece(data, path)
    raise DataError(
        f"{path} is no vocabulary: give a file of tensor2tensor (vocab.*.subwords, of which the "
        "first line is '<pad>_') or a sentencepiece model (.model)"
    )


def _sentence(ids: Iterable[int]) -> Iterator[int]:
    """The ids before the first EOS, without PAD, as Python's integers."""
    for i in map(int, ids):
        if i == EOS:
            return
        if i != PAD:
            yield i


def _load_model(data: bytes, path: str) -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise DataError(
            f"{path} needs sentencepiece ({error}): pip install -r requirements.txt"
        ) from error
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.load_from_serialized_proto(data)
    except (RuntimeError, ValueError) as error:
        raise DataError(f"{path} is no sentencepiece model: {one_line(error)}") from error
    return model
