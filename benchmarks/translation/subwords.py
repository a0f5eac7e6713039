r"""Splits text into the subwords of tensor2tensor 1.15.7, `SubwordTextEncoder`, and joins them.

A text is cut into tokens: maximal runs of letters and digits, and the runs between them. A single
space between two tokens of letters is implied. A token is escaped ("\" as "\\", "_" as "\u", a
character without a subword as "\" code ";"), gets "_" at its end, and is cut greedily into the
longest subwords of the vocabulary. The subwords of a text therefore give back exactly this text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from errors import DataError

RESERVED = ("<pad>", "<EOS>")  # the first two ids
_TOKENS = re.compile(r"[^\W_]+|[\W_]+")  # \w are the Unicode categories L and N, and "_"
_ESCAPED = re.compile(r"\\u|\\\\|\\([0-9]+);")
ESCAPE_CHARACTERS = frozenset("\\_u;0123456789")
# Tokens whose ids stay in memory, and the characters of the longest of them: about 80 MB.
_CACHED, _CACHED_LENGTH = 1 << 18, 40


def tokens(text: str) -> list[str]:
    """The tokens of a text, without the spaces that are implied."""
    runs = _TOKENS.findall(text)
    last = len(runs) - 1
    return [run for i, run in enumerate(runs) if run != " " or i in (0, last)]


def join(parts: Iterable[str]) -> str:
    """The text of tokens: the inverse of `tokens`."""
    joined, was_word = [], False
    for part in parts:
        is_word = part[0].isalnum()
        if was_word and is_word:
            joined.append(" ")
        joined.append(part)
        was_word = is_word
    return "".join(joined)


def escape(token: str, alphabet: frozenset[str] | set[str]) -> str:
    """A token as a string of characters of the alphabet that ends in the only "_"."""
    token = token.replace("\\", "\\\\").replace("_", "\\u")
    return "".join(c if c in alphabet and c != "\n" else f"\\{ord(c)};" for c in token) + "_"


def unescape(escaped: str) -> str:
    """The inverse of `escape`, for a string without the "_" at its end.

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


def parse(text: str, path: str) -> list[str]:
    """The subwords in the text of a vocabulary file: one in each line, in quotes or not.

    Raises:
      DataError: the text is not of this form.
    """
    lines = [line.rstrip() for line in text.removesuffix("\n").split("\n")]
    subwords = [s[1:-1] if len(s) > 1 and s[0] == s[-1] and s[0] in "'\"" else s for s in lines]
    if [s.removesuffix("_") for s in subwords[:2]] != list(RESERVED):
        raise DataError(
            f"{path} is no vocabulary of subwords: its first two lines must be '<pad>_' and "
            "'<EOS>_', as tensor2tensor writes them"
        )
    missing = sorted(ESCAPE_CHARACTERS - set(subwords))
    if missing:
        raise DataError(
            f"{path} has no subword {missing[0]!r}, which unknown characters need: it is no "
            "vocabulary of tensor2tensor, or it is cut short"
        )
    return subwords


class Encoder:
    """Text to ids and back, by a list of subwords of which the first two are RESERVED."""

    def __init__(self, subwords: Sequence[str]):
        self._subwords = list(subwords)
        reserved = len(RESERVED)
        self._ids = {s: i for i, s in enumerate(self._subwords) if s and i >= reserved}
        self._alphabet = {c for s in self._subwords for c in s} | ESCAPE_CHARACTERS
        self._longest = max(map(len, self._ids))
        self._cache: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        """The ids of a text, of which none is reserved."""
        ids: list[int] = []
        cache = self._cache
        for token in tokens(text):
            part = cache.get(token)
            if part is None:
                part = self._encode_token(token)
                if len(cache) >= _CACHED:
                    cache.clear()
                if len(token) <= _CACHED_LENGTH:  # text without blanks has long ones
                    cache[token] = part
            ids += part
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; an id outside of the vocabulary is skipped, as in tensor2tensor."""
        size = len(self._subwords)
        escaped = "".join(self._subwords[i] for i in ids if 0 <= i < size)
        return join(part for piece in escaped.split("_") if (part := unescape(piece)))

    def _encode_token(self, token: str) -> tuple[int, ...]:
        try:
            pieces = cut(escape(token, self._alphabet), self._ids, self._longest)
        except KeyError:  # a character that is in longer subwords only
            singles = {s for s in self._ids if len(s) == 1}
            pieces = cut(escape(token, singles), self._ids, self._longest)
        return tuple(self._ids[piece] for piece in pieces)


def cut(escaped: str, subwords: Mapping[str, int] | set[str], longest: int) -> list[str]:
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
