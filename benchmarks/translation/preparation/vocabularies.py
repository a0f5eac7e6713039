"""The vocabulary of a preparation: the user's file, or one built from a sample of the text.

Subwords are learned as tensor2tensor 1.15.7's `SubwordTextEncoder` does.
"""

import collections
import hashlib
import itertools
import os
from collections.abc import Iterable, Mapping

from benchmarks.translation.vocabulary import (
    ESCAPE_CHARACTERS,
    RESERVED,
    Marian,
    Vocabulary,
    cut_token,
    escape_token,
    parse_vocabulary,
    split_tokens,
)
from common.data import storage
from common.errors import UserError
from common.preparation import writing
from common.tensorflow import tensorflow

# Names in OUT, by kind.
FILES = {"subwords": "vocab.subwords", "sentencepiece": "vocab.model", "marian": Marian.NAME}
_FACTS = "vocabulary.json"
_ROUNDS = 4  # rounds of refinement, as in tensor2tensor
_MOST_COUNT = 1000  # the largest minimum count that the search for a size tries
# Characters of a token that count. One of 5,000 would have 12 million subwords.
_LONGEST_TOKEN = 100
# Text without blanks, such as Chinese, has hardly a token twice. These bound what it takes to about
# a gigabyte; a sample of WMT has less than half as many.
_CHARACTERS = 3 << 20  # the most characters of different tokens; later tokens do not count
_CANDIDATES = 1 << 21  # longer ones are not looked at beyond so many


def load_saved(state: writing.State) -> Vocabulary | None:
    """The vocabulary that `build` has made in an earlier run."""
    path, facts = os.path.join(state.out, FILES["subwords"]), state.read(_FACTS)
    data = storage.read(path) if facts else None
    if data is None or hashlib.sha256(data).hexdigest() != facts["sha256"]:
        return None
    return parse_vocabulary(data, path)


def build(state: writing.State, texts: Iterable[str], size: int) -> Vocabulary:
    """Builds a vocabulary of about `size` subwords and writes it to the output folder."""
    print(f"building a vocabulary of about {size:,} subwords", flush=True)
    counts = collections.Counter(token for text in texts for token in split_tokens(text))
    data = learn_subwords(counts, size).encode()
    vocabulary = parse_vocabulary(data, FILES["subwords"])
    if vocabulary.size > 2 * size:
        least = len({c for token in counts for c in token})
        raise UserError(
            f"--vocabulary_size={size} is too small for text of {least:,} different characters: "
            f"the smallest vocabulary has {vocabulary.size:,} subwords"
        )
    save(state.out, vocabulary)
    state.write(_FACTS, {"sha256": vocabulary.digest})
    return vocabulary


def save(out: str, vocabulary: Vocabulary) -> None:
    """Writes the vocabulary, and deletes one of another kind that an earlier preparation made."""
    for kind, name in FILES.items():
        path = os.path.join(out, name)
        if kind == vocabulary.kind:
            writing.save(out, name, vocabulary.data)
        elif tensorflow().io.gfile.exists(path):
            tensorflow().io.gfile.remove(path)


def learn_subwords(counts: Mapping[str, int], size: int) -> str:
    """Makes a vocabulary of about `size` subwords: the text of its file.

    The algorithm is that of `SubwordTextEncoder.build_to_target_size(size, counts, 1, 1e3)`: a
    binary search for the least count of a subword, which ends within 1 % of the size. Other than
    there, only the first 100 characters of a token count, and only a part of text without blanks.

    Args:
      counts: how often each token of `split_tokens` occurs.
      size: the number of subwords, the reserved ones included; small alphabets may give fewer.
    """
    alphabet = {c for token in (*counts, *RESERVED) for c in token} | ESCAPE_CHARACTERS
    tokens, remaining = [], _CHARACTERS
    for token, count in counts.items():
        escaped = escape_token(token[:_LONGEST_TOKEN], alphabet)[:_LONGEST_TOKEN]
        remaining -= len(escaped)
        if remaining < 0:
            break
        tokens.append((escaped, count))

    def distance(subwords: list[str]) -> int:
        return abs(len(subwords) - size)

    def search(least: int, most: int) -> list[str]:
        middle = (least + most) // 2
        text = f"  subwords that occur at least {middle} times"
        print(f"{text} ...", flush=True)
        subwords = [*alphabet]
        for _ in range(_ROUNDS):
            subwords = _select(_candidates(tokens, set(subwords), middle), alphabet, middle)
        subwords = [*(escape_token(token, alphabet) for token in RESERVED), *subwords]
        print(f"{text}: {len(subwords):,} of {size:,}", flush=True)
        if distance(subwords) * 100 < size or least >= most or middle < 2:
            return subwords
        larger = len(subwords) > size
        other = search(middle + 1, most) if larger else search(least, middle - 1)
        return other if distance(other) < distance(subwords) else subwords

    return "".join(f"'{subword}'\n" for subword in search(1, _MOST_COUNT))


def _candidates(tokens: list[tuple[str, int]], subwords: set[str], least: int) -> dict[str, int]:
    """How often each string begins where the present subwords begin.

    Strings of several characters that occur less than `least` times are left out: a string
    occurs no more often than its beginning, so no longer one needs to be counted.
    """
    occurrences: dict[str, int] = {}
    longest, rows = max(map(len, subwords)), []
    for escaped, count in tokens:
        ends = itertools.accumulate(map(len, cut_token(escaped, subwords, longest)))
        rows.append((escaped, count, [0, *ends][:-1]))
    for length in range(1, _LONGEST_TOKEN):
        counts: dict[str, int] = collections.defaultdict(int)
        for escaped, count, starts in rows:
            for start in starts:
                counts[escaped[start : start + length]] += count
        often = {string: n for string, n in counts.items() if n >= least}
        occurrences |= counts if length == 1 else often
        if len(occurrences) > _CANDIDATES:
            break
        frequent = []
        for escaped, count, starts in rows:
            ends = ((start, start + length) for start in starts)
            starts = [a for a, b in ends if b < len(escaped) and escaped[a:b] in often]
            if starts:
                frequent.append((escaped, count, starts))
        rows = frequent
    return occurrences


def _select(occurrences: dict[str, int], alphabet: set[str], least: int) -> list[str]:
    """The candidates that occur often enough, and the alphabet, the most frequent first.

    The occurrences of a chosen subword no longer count for its beginnings.
    """
    taken = []
    for candidate in sorted(occurrences, key=len, reverse=True):
        count = occurrences[candidate]
        if count >= least:
            if candidate not in alphabet:
                taken.append((count, candidate))
            for end in range(1, len(candidate)):
                occurrences[candidate[:end]] -= count
    taken += [(occurrences.get(c, 0), c) for c in alphabet]
    return [subword for _, subword in sorted(taken, reverse=True)]
