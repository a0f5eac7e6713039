"""Opens vocabularies: text to token ids and back.

A vocabulary is a file of tensor2tensor, a file of subword-nmt or a model of sentencepiece. Id 0 is
the padding (PAD) and id 1 the end of a sentence (EOS) in all of them.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from etils import epath

from benchmarks.translation import subwords
from errors import DataError, one_line

PAD, EOS = 0, 1
_BPE_START = re.compile(rb"<pad>\r?\n<unk>\r?\n")  # tensor2tensor's files also begin with <pad>
_BPE_SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")  # in a file of subword-nmt; they are no words
_BPE_JOINT = re.compile("@@( |$)")
_LEAST_LINES = 4  # of a file of subword-nmt


class Vocabulary:
    """Text to ids and back.

    Attributes:
      kind: "subwords", "sentencepiece" or "words".
      size: the number of ids, PAD and EOS included.
      digest: SHA-256 of the file's content, in hexadecimal.
      path: of the file.
      language: ISO 639-1 code of the texts that `decode` makes.
      unknown: the id of any text that it has no entry for; None if it has one for each.
    """

    kind: str
    size: int
    language = "de"
    unknown: int | None = None

    def __init__(self, data: bytes, path: str):
        self.digest, self.path = hashlib.sha256(data).hexdigest(), path

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without EOS; none is PAD or EOS."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids before the first EOS; PAD is skipped."""
        raise NotImplementedError


class Subwords(Vocabulary):
    """A `Vocabulary` of tensor2tensor's subwords."""

    kind = "subwords"

    def __init__(self, data: bytes, path: str):
        super().__init__(data, path)
        try:
            entries = subwords.parse(data.decode(), path)
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is no vocabulary: it is not UTF-8") from error
        self.size = len(entries)
        self._encoder = subwords.Encoder(entries)

    def encode(self, text: str) -> list[int]:
        return self._encoder.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoder.decode(_sentence(ids))


class SentencePiece(Vocabulary):
    """A `Vocabulary` by a model of sentencepiece.

    Its ids are moved up by two, unless the model already has 0 as padding and 1 as the end.
    """

    kind = "sentencepiece"

    def __init__(self, data: bytes, path: str):
        super().__init__(data, path)
        self._model = _load_model(data, path)
        own = (self._model.pad_id(), self._model.eos_id()) == (PAD, EOS)
        self._shift = 0 if own else 2
        self.size = self._model.vocab_size() + self._shift
        self.unknown = self._model.unk_id() + self._shift

    def encode(self, text: str) -> list[int]:
        return [i + self._shift for i in self._model.encode(text)]

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode([i - self._shift for i in _sentence(ids) if i < self.size])


class Words(Vocabulary):
    """A `Vocabulary` of the words and parts of words in a file of subword-nmt.

    Byte pair encoding (Sennrich et al. 2016, arXiv:1508.07909) cuts rare words into parts. A part
    that is not the last of its word ends with "@@": "nach H@@ aus" is "nach Haus". Id 2 is any
    unknown word; the words have the ids from 3 on, in the order of the file. The text to encode is
    tokenized and cut already: only spaces separate words.

    Attributes:
      words: those with the ids from 3 on; of a word that is listed twice, the first id counts.
    """

    kind = "words"
    UNKNOWN, FIRST = 2, 3

    def __init__(self, data: bytes, path: str):
        super().__init__(data, path)
        self.words = _parse_words(data)
        self.size = self.FIRST + len(self.words)
        self._names = ["<unk>", *self.words]
        self._ids: dict[str, int] = {}
        for i, word in enumerate(self.words, self.FIRST):
            self._ids.setdefault(word, i)

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(word, self.UNKNOWN) for word in text.split(" ") if word]

    def decode(self, ids: Iterable[int]) -> str:
        """As in `Vocabulary`; one line, without tokenization, with unknown words as <unk>.

        Raises:
          DataError: sacremoses is not installed.
        """
        tokens = [self._names[i - self.UNKNOWN] for i in _sentence(ids) if i < self.size]
        text = _BPE_JOINT.sub("", " ".join(tokens))
        return _detokenizer(self.path, self.language)(text.split(" "))


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
    """The vocabulary in the bytes of a file; DataError, with the path, if there is none in them."""
    reserved = subwords.RESERVED[0].encode()
    if data.lstrip(b"'\"").startswith(reserved) and not _BPE_START.match(data):
        return Subwords(data, path)
    if data.startswith(b"\n"):  # the first piece of a sentencepiece model
        return SentencePiece(data, path)
    try:
        return Words(data, path)
    except ValueError as error:
        raise DataError(
            f"{path} is no vocabulary: give a file of tensor2tensor (vocab.*.subwords, of which "
            "the first line is '<pad>_'), a sentencepiece model (.model), or a file of "
            f"subword-nmt with one token per line (vocab.bpe.*); {error}"
        ) from error


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


def _parse_words(data: bytes) -> list[str]:
    """The words of a file of subword-nmt in its order, without the specials.

    Only "\\n" ends a line; a "\\r" before it is dropped.

    Raises:
      ValueError: the file is no list of words; the message is the reason.
    """
    try:
        lines = data.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"line {data[: error.start].count(10) + 1} is not UTF-8") from error
    if len(lines) < _LEAST_LINES:
        raise ValueError(f"it has {len(lines)} lines")
    lines = [line.removesuffix("\r") for line in lines]
    for number, line in enumerate(lines, 1):
        if not line or " " in line or "\t" in line:
            raise ValueError(f"line {number} is not one token: {line[:40]!r}")
    return [line for line in lines if line not in _BPE_SPECIALS]


@functools.cache
def _detokenizer(path: str, language: str) -> Callable[[list[str]], str]:
    """The inverse of the Moses tokenizer; English and French have apostrophes that join words."""
    try:
        from sacremoses import MosesDetokenizer
    except ImportError as error:
        raise DataError(
            f"{path} needs sacremoses ({error}): pip install -r requirements.txt"
        ) from error
    return MosesDetokenizer(lang=language).detokenize
