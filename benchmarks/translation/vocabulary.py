"""Vocabularies and their tokenizers: text to token ids and back.

A vocabulary is a file of tensor2tensor, a file of subword-nmt, a model of sentencepiece, or what
Marian's models have: two models of sentencepiece and a list of pieces. Id 0 is the padding (PAD)
and id 1 the end of a sentence (EOS) in all of them.

The subwords are those of tensor2tensor's `SubwordTextEncoder`. A text is cut into tokens:
maximal runs of letters and digits, and the runs between them. A single space between two tokens of
letters is implied. A token is escaped (a backslash is doubled, "_" becomes a backslash and "u", a
character without a subword a backslash, its code and ";"), gets "_" at its end, and is cut greedily
into the longest subwords of the vocabulary. The subwords of a text therefore give back exactly this
text.
"""

import functools
import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from common import foreign
from common.errors import DataError, one_line, parse_json

PAD, EOS = 0, 1
RESERVED = ("<pad>", "<EOS>")  # what a file of subwords calls PAD and EOS
ESCAPE_CHARACTERS = frozenset("\\_u;0123456789")
_BPE_START = re.compile(rb"<pad>\r?\n<unk>\r?\n")  # tensor2tensor's files also begin with <pad>
_BPE_SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")  # in a file of subword-nmt; they are no words
_BPE_JOINT = re.compile("@@( |$)")
_MIN_LINES = 4  # lines of a file of subword-nmt
_TOKENS = re.compile(r"[^\W_]+|[\W_]+")  # \w are the Unicode categories L and N, and "_"
_ESCAPED = re.compile(r"\\u|\\\\|\\([0-9]+);")
# Tokens whose ids stay in memory, and the characters of the longest of them: about 80 MB.
_CACHED, _CACHED_LENGTH = 1 << 18, 40


class Vocabulary:
    """Text to ids and back; `digest` is the SHA-256 of the file's content in hexadecimal."""

    kind: str  # "subwords", "sentencepiece", "marian" or "words"
    size: int  # the number of ids, PAD and EOS included
    language = "de"  # ISO 639-1 code of the texts that `decode` makes
    languages = "", ""  # of the sources and the targets, where the vocabulary is for two; else ""
    codes: Sequence[str] = ()  # of target languages, with one of which each source must begin
    unknown: int | None = None  # the id of any text without an entry; None if each text has one

    def __init__(self, data: bytes, path: str):
        self.data, self.digest, self.path = data, hashlib.sha256(data).hexdigest(), path

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without EOS; none is PAD or EOS."""
        raise NotImplementedError

    def encode_target(self, text: str) -> list[int]:
        """The same for a translation, where a vocabulary cuts the two languages in two ways."""
        return self.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids before the first EOS; PAD is skipped."""
        raise NotImplementedError


class Subwords(Vocabulary):
    """A `Vocabulary` of tensor2tensor's subwords; the first two are RESERVED."""

    kind = "subwords"

    def __init__(self, data: bytes, path: str):
        super().__init__(data, path)
        self.pieces = _parse_subwords(data, path)
        self.size = len(self.pieces)
        self._ids = {s: i for i, s in enumerate(self.pieces) if s and i >= len(RESERVED)}
        self._alphabet = {c for s in self.pieces for c in s} | ESCAPE_CHARACTERS
        self._longest = max(map(len, self._ids))
        self._cache: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        cache = self._cache
        for token in split_tokens(text):
            part = cache.get(token)
            if part is None:
                part = self._encode_token(token)
                if len(cache) >= _CACHED:
                    cache.clear()
                if len(token) <= _CACHED_LENGTH:  # text without blanks has long ones
                    cache[token] = part
            ids += part
        return ids

    def _encode_token(self, token: str) -> tuple[int, ...]:
        try:
            pieces = cut_token(escape_token(token, self._alphabet), self._ids, self._longest)
        except KeyError:  # a character that is in longer subwords only
            singles = {s for s in self._ids if len(s) == 1}
            pieces = cut_token(escape_token(token, singles), self._ids, self._longest)
        return tuple(self._ids[piece] for piece in pieces)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; an id outside of the vocabulary is skipped, as in tensor2tensor."""
        escaped = "".join(self.pieces[i] for i in _sentence(ids) if 0 <= i < self.size)
        return join_tokens(part for piece in escaped.split("_") if (part := unescape_token(piece)))


def _parse_subwords(data: bytes, path: str) -> list[str]:
    """The subwords in a vocabulary file: one in each line, in quotes or not."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a vocabulary: it is not UTF-8") from error
    lines = [line.rstrip() for line in text.removesuffix("\n").split("\n")]
    subwords = [s[1:-1] if len(s) > 1 and s[0] == s[-1] and s[0] in "'\"" else s for s in lines]
    if [s.removesuffix("_") for s in subwords[:2]] != list(RESERVED):
        raise DataError(
            f"{path} is not a vocabulary of subwords: its first two lines must be '<pad>_' and "
            "'<EOS>_', as tensor2tensor writes them"
        )
    missing = sorted(ESCAPE_CHARACTERS - set(subwords))
    if missing:
        raise DataError(
            f"{path} has no subword {missing[0]!r}, which unknown characters need: it is not a "
            "vocabulary of tensor2tensor, or it is cut short"
        )
    return subwords


class SentencePiece(Vocabulary):
    """A `Vocabulary` from a model of sentencepiece.

    Its ids are moved up by two, unless the model already has 0 as padding and 1 as the end.
    """

    kind = "sentencepiece"

    def __init__(self, data: bytes, path: str):
        import sentencepiece

        super().__init__(data, path)
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.load_from_serialized_proto(data)
        except (RuntimeError, ValueError) as error:
            raise DataError(f"{path} is not a sentencepiece model: {one_line(error)}") from error
        is_same = (self._model.pad_id(), self._model.eos_id()) == (PAD, EOS)
        self._shift = 0 if is_same else 2
        self.pieces = [*RESERVED][: self._shift]
        self.pieces += self._model.id_to_piece([*range(self._model.vocab_size())])
        self.size = len(self.pieces)
        self.unknown = self._model.unk_id() + self._shift

    def encode(self, text: str) -> list[int]:
        return [i + self._shift for i in self._model.encode(text)]

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode([i - self._shift for i in _sentence(ids) if i < self.size])


class Marian(Vocabulary):
    """A `Vocabulary` of Marian, of the models of OPUS-MT: pieces of two models of sentencepiece.

    It is a zip archive with the `FILES` of such a model's folder. PAD and EOS come first here; the
    other pieces keep their order. A text may begin with the code of a target language, ">>fr<<".
    """

    kind = "marian"
    NAME = "vocab.marian.zip"  # of the archive
    FILES = foreign.TRANSLATOR
    PAD_EOS_UNKNOWN = ("<pad>", "</s>", "<unk>")

    def __init__(self, data: bytes, path: str):
        import sentencepiece

        super().__init__(data, path)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                self.contents = {name: archive.read(name) for name in self.FILES}
            source, target, *described = self.contents.values()
            same = b"".join([*self.contents.values()][:3])  # the languages may be named otherwise
            self.digest = hashlib.sha256(same).hexdigest()
            ids, facts = map(parse_json, described)
            pad, eos, unknown = (ids[name] for name in self.PAD_EOS_UNKNOWN)
            names = {number: name for name, number in ids.items()}
            if sorted(names) != [*range(len(ids))]:
                raise ValueError("the ids of its pieces are not 0, 1, 2 ...")
            # The id that the model has for each of ours.
            self.marian_ids = [pad, eos, *sorted({*names} - {pad, eos})]
            self.pieces = [names[i] for i in self.marian_ids]
            self._source, self._target = (
                sentencepiece.SentencePieceProcessor(model_proto=model)
                for model in (source, target)
            )
        except Exception as error:  # of zipfile, of sentencepiece, of Python
            what = ", ".join(self.FILES)
            raise DataError(
                f"{path} is not the vocabulary of a Marian model ({what}): {one_line(error)}"
            ) from error
        self.languages = facts.get("source_lang") or "", facts.get("target_lang") or ""
        codes = [name for name in self.pieces if re.fullmatch(">>.+<<", name)]
        self.codes = codes if len(codes) > 1 else ()  # a single one says nothing
        self.size = len(self.pieces)
        self.unknown = self._unknown = self.pieces.index(self.PAD_EOS_UNKNOWN[2])
        self._ids = {name: i for i, name in enumerate(self.pieces)}

    def encode(self, text: str) -> list[int]:
        return self._encode(self._source, text)

    def encode_target(self, text: str) -> list[int]:
        return self._encode(self._target, text)

    def _encode(self, model: Any, text: str) -> list[int]:
        code = match[0] if (match := re.match(">>.*?<<", text)) else ""
        pieces = [code] * bool(code) + model.encode(text.removeprefix(code), out_type=str)
        ids = (self._ids.get(piece, PAD) for piece in pieces)
        return [i if i > EOS else self._unknown for i in ids]

    def decode(self, ids: Iterable[int]) -> str:
        pieces = [self.pieces[i] for i in _sentence(ids) if i < self.size]
        return self._target.decode_pieces(pieces).replace("\u2581", " ").strip()


def marian_archive(folder: str) -> bytes:
    """The file of a `Marian` vocabulary from the folder of a model, local or gs://.

    Equal files give equal bytes. DataError if the folder is of another form.
    """
    content = {}
    try:
        for name in Marian.FILES:
            file = epath.Path(folder) / name
            content[name] = file.read_bytes() if name != Marian.FILES[3] or file.exists() else b"{}"
        ids, facts = (parse_json(content[name]) for name in Marian.FILES[2:])
        if facts.get("separate_vocabs"):
            raise ValueError("its source and its target have a list of pieces each")
        pieces = dict(sorted(ids.items(), key=lambda item: item[1]))
    except Exception as error:  # gs:// raises TensorFlow's classes
        raise DataError(
            f"{folder} has no vocabulary of a Marian model: {one_line(error)}"
        ) from error
    languages = {key: facts.get(key) or "" for key in ("source_lang", "target_lang")}
    for name, value in zip(Marian.FILES[2:], (pieces, languages), strict=True):
        content[name] = json.dumps(value, ensure_ascii=False, indent=0).encode()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, data in content.items():  # with the oldest time there is
            file.writestr(zipfile.ZipInfo(name), data)
    return archive.getvalue()


class Words(Vocabulary):
    """A `Vocabulary` of byte pair encoding (BPE): words and their parts in a file of subword-nmt.

    Byte pair encoding (Sennrich et al. 2016, arXiv:1508.07909) cuts rare words into parts. A part
    that is not the last of its word ends with "@@": "nach H@@ aus" is "nach Haus". Id 2 is any
    unknown word; the words have the ids from 3 on, in the order of the file. The text to encode is
    tokenized and cut already: only spaces separate words.
    """

    kind = "words"
    UNKNOWN, FIRST = 2, 3

    def __init__(self, data: bytes, path: str):
        super().__init__(data, path)
        self.words = _parse_words(data)  # the first id of a word counts
        self.size = self.FIRST + len(self.words)
        self._names = ["<unk>", *self.words]
        self._ids: dict[str, int] = {}
        for i, word in enumerate(self.words, self.FIRST):
            self._ids.setdefault(word, i)

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(word, self.UNKNOWN) for word in text.split(" ") if word]

    def decode(self, ids: Iterable[int]) -> str:
        """The text in one line, without tokenization; unknown words are <unk>."""
        tokens = [self._names[i - self.UNKNOWN] for i in _sentence(ids) if i < self.size]
        text = _BPE_JOINT.sub("", " ".join(tokens))
        return _detokenizer(self.language)(text.split(" "))


def load_vocabulary(path: str) -> Vocabulary:
    """Loads a vocabulary file, local or gs://; its content says of which kind it is.

    "vocab.json" stands for the files of a Marian model in its folder.
    """
    if os.path.basename(path) == Marian.FILES[2]:
        return Marian(marian_archive(os.path.dirname(path)), path)
    try:
        data = epath.Path(path).read_bytes()
    except Exception as error:  # gs:// raises TensorFlow's classes
        problem = "there is no such file" if "No such file" in str(error) else one_line(error)
        raise DataError(f"cannot read the vocabulary {path}: {problem}") from error
    return parse_vocabulary(data, path)


def parse_vocabulary(data: bytes, path: str) -> Vocabulary:
    """The vocabulary in the bytes of a file; DataError, with the path, if there is none in them."""
    reserved = RESERVED[0].encode()
    if data.lstrip(b"'\"").startswith(reserved) and not _BPE_START.match(data):
        return Subwords(data, path)
    if data.startswith(b"PK\x03\x04"):
        return Marian(data, path)
    if data.startswith(b"\n"):  # the first piece of a sentencepiece model
        return SentencePiece(data, path)
    try:
        return Words(data, path)
    except ValueError as error:
        raise DataError(
            f"{path} is not a vocabulary: give a file of tensor2tensor (vocab.*.subwords, of which "
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


def _parse_words(data: bytes) -> list[str]:
    """The words of a file of subword-nmt in its order, without the specials.

    Only "\\n" ends a line; a "\\r" before it is dropped. ValueError says why a file is no list.
    """
    try:
        lines = data.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"line {data[: error.start].count(10) + 1} is not UTF-8") from error
    if len(lines) < _MIN_LINES:
        raise ValueError(f"it has {len(lines)} lines")
    lines = [line.removesuffix("\r") for line in lines]
    for number, line in enumerate(lines, 1):
        if not line or " " in line or "\t" in line:
            raise ValueError(f"line {number} is not one token: {line[:40]!r}")
    return [line for line in lines if line not in _BPE_SPECIALS]


@functools.cache
def _detokenizer(language: str) -> Callable[[list[str]], str]:
    """The inverse of the Moses tokenizer; English and French have apostrophes that join words."""
    from sacremoses import MosesDetokenizer

    return MosesDetokenizer(lang=language).detokenize


def split_tokens(text: str) -> list[str]:
    """The tokens of a text, without the spaces that are implied."""
    runs = _TOKENS.findall(text)
    last = len(runs) - 1
    return [run for i, run in enumerate(runs) if run != " " or i in (0, last)]


def join_tokens(parts: Iterable[str]) -> str:
    """The text of tokens: the inverse of `split_tokens`."""
    joined, was_word = [], False
    for part in parts:
        is_word = part[0].isalnum()
        if was_word and is_word:
            joined.append(" ")
        joined.append(part)
        was_word = is_word
    return "".join(joined)


def escape_token(token: str, alphabet: frozenset[str] | set[str]) -> str:
    """A token as a string of characters of the alphabet that ends in the only "_"."""
    token = token.replace("\\", "\\\\").replace("_", "\\u")
    return "".join(c if c in alphabet and c != "\n" else f"\\{ord(c)};" for c in token) + "_"


def unescape_token(escaped: str) -> str:
    """The inverse of `escape_token`, for a string without the "_" at its end.

    A number that is no character gives U+3013, as in tensor2tensor; so does a surrogate, which no
    file could store.
    """

    def character(match: re.Match[str]) -> str:
        if match[1] is None:
            return "_" if match[0] == "\\u" else "\\"
        if len(match[1].lstrip("0")) > 7:  # they could cost much time; the last is 1114111
            return "\u3013"
        code = int(match[1])
        return chr(code) if code < 0xD800 or 0xE000 <= code < 0x110000 else "\u3013"

    return _ESCAPED.sub(character, escaped)


def cut_token(escaped: str, subwords: Mapping[str, int] | set[str], longest: int) -> list[str]:
    """An escaped token as subwords, always the longest that matches; KeyError if none does."""
    pieces, start, end = [], 0, len(escaped)
    while start < end:
        for stop in range(min(end, start + longest), start, -1):
            if (piece := escaped[start:stop]) in subwords:
                pieces.append(piece)
                start = stop
                break
        else:
            raise KeyError(escaped[start])
    return pieces
