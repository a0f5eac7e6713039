"""Reads vocabularies of words and parts of words, as subword-nmt writes them, and joins the parts.

Byte pair encoding (Sennrich et al. 2016, arXiv:1508.07909) cuts rare words into parts. A part that
is not the last of its word ends with "@@": "nach H@@ aus" is "nach Haus".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

from errors import DataError

SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")  # lines of a file that are no words
UNKNOWN = "<unk>"
_LEAST = 4  # lines of a file
_JOINT = re.compile("@@( |$)")


def parse(data: bytes) -> list[str]:
    """The words of a vocabulary file in its order, without the specials.

    Only "\\n" ends a line; a "\\r" before it is dropped.

    Raises:
      ValueError: the file is no list of words; the message is the reason.
    """
    try:
        lines = data.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"line {data[: error.start].count(10) + 1} is not UTF-8") from error
    if len(lines) < _LEAST:
        raise ValueError(f"it has {len(lines)} lines")
    lines = [line.removesuffix("\r") for line in lines]
    for number, line in enumerate(lines, 1):
        if not line or " " in line or "\t" in line:
            raise ValueError(f"line {number} is not one token: {line[:40]!r}")
    return [line for line in lines if line not in SPECIALS]


def join(tokens: Sequence[str], path: str) -> str:
    """The text of tokens, in one line: parts joined, and the Moses tokenization undone.

    path: of the vocabulary, for the message of a DataError: sacremoses is not installed.
    """
    text = _JOINT.sub("", " ".join(tokens))
    return _detokenizer(path)(text.split(" "))


@functools.cache
def _detokenizer(path: str) -> Callable[[list[str]], str]:
    try:
        from sacremoses import MosesDetokenizer
    except ImportError as error:
        raise DataError(
            f"{path} needs sacremoses ({error}): pip install -r requirements.txt"
        ) from error
    # The language matters for English, French and others, whose apostrophes join words.
    return MosesDetokenizer(lang="de").detokenize
