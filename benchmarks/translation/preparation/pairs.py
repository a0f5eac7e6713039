"""The pairs of sentences that the arguments of a preparation name, cleaned, in two splits."""

import argparse
import collections
import hashlib
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.translation.preparation import languages
from benchmarks.translation.preparation.text_formats import Corpus, Lines
from benchmarks.translation.vocabulary import Marian, Vocabulary, Words, load_vocabulary
from common import foreign
from common.data import storage
from common.errors import DataError, UserError
from common.placeholders import difference
from common.preparation.sources import SourceError
from common.tensorflow import tensorflow

_EVAL = 2000, 100, 50  # pairs taken for evaluation: the most, the least, and one in so many
_TAGS = re.compile("</?(doc|url|speaker|talkid|title|description|keywords|reviewer|translator)\\b")
_ROWS = 20  # lines about the files of a split, at most
_SHORT = 10  # characters: sides that have fewer count as so long in a ratio

Pair = tuple[str, str]


def _find_texts(argument: str) -> list[str]:
    """The files of a comma-separated argument."""
    gfile, paths = tensorflow().io.gfile, [*filter(None, argument.split(","))]
    for path in paths:
        if not gfile.exists(path):
            raise SourceError(f"there is no {path}")
        if gfile.isdir(path):
            raise SourceError(f"{path} is a folder; give files of text")
        if path.endswith((".tgz", ".tar", ".tar.gz", ".zip")):
            raise SourceError(f"{path} is an archive: unpack it, and give its files of text")
    return paths


def _load(path: str) -> Vocabulary:
    """A vocabulary for plain text, from a file or a Marian model's folder or name on the hub.

    DataError if it is for other text.
    """
    if path.startswith(foreign.NAMES):
        path = os.path.dirname(foreign.fetch(path, "--vocabulary")[1])
    if tensorflow().io.gfile.isdir(path):
        path = os.path.join(path, Marian.FILES[2])
    vocabulary = load_vocabulary(path)
    if isinstance(vocabulary, Words):
        raise DataError(
            f"{path} is a vocabulary of tokenized text, which the benchmark gnmt reads as it is; "
            "to prepare plain text, give subwords of tensor2tensor or a sentencepiece model"
        )
    return vocabulary


class Pairs(NamedTuple):
    """The pairs of a data set."""

    train: list[Pair]  # without space at their ends, as in tensor2tensor
    eval: list[Pair]  # unchanged
    left_out: dict[str, collections.Counter[str]]  # by split: how many pairs, by reason


class TextInput:
    """The files of text that the arguments name.

    `languages` are the tags of both sides, "" where unknown.
    `vocabulary` is None if it is to be built. `size` is the number of bytes of training text.
    `settings` are the arguments that change the records, beside those of every preparation.
    """

    def __init__(self, args: argparse.Namespace):
        wanted = args.source_language, args.target_language
        columns = [*filter(None, args.columns.split(","))]
        self._inputs: dict[str, list[Corpus | Lines]] = {}
        for split in ("train", "eval"):
            sides = [_find_texts(getattr(args, f"{split}_{s}")) for s in ("source", "target")]
            paths = filter(None, getattr(args, split).split(","))
            tables = [Corpus.open(path, columns, wanted) for path in paths]
            self._inputs[split] = [*map(Lines, *sides), *tables]
        self.vocabulary = _load(args.vocabulary) if args.vocabulary else None
        self._paths: list[str] = []  # of training text
        for each in self._inputs["train"]:
            self._paths += each if isinstance(each, Lines) else [each.path]
        self.size = sum(storage.sizes(self._paths))
        self._clean, self._max_ratio = args.clean, args.max_ratio
        first = self._inputs["train"][0]
        names = first.names if isinstance(first, Corpus) else map(languages.of_path, first)
        tags = [asked or languages.code(name) for asked, name in zip(wanted, names, strict=True)]
        self.languages = ["" if tag in ("source", "target") else tag for tag in tags]
        self.settings: dict[str, Any] = {}
        if args.clean or args.max_ratio:
            self.settings = {"clean": args.clean, "max_ratio": args.max_ratio}
        if not self._inputs["eval"]:
            self.settings["eval"] = "drawn"

    def stamps(self) -> dict[str, str]:
        """The names, sizes and times of the files of training text, by flag."""
        rows: list[Any] = [str(each) for each in self._inputs["train"]]
        for path in dict.fromkeys(self._paths):
            stat = tensorflow().io.gfile.stat(path)
            rows.append((path, stat.length, stat.mtime_nsec))
        digest = hashlib.sha256(repr(rows).encode()).hexdigest()
        return {"train": digest, "vocabulary": self.vocabulary.digest if self.vocabulary else ""}

    def read(self) -> Pairs:
        """Reads both splits; without text to evaluate on, it is a part of the training pairs."""
        left_out = {split: collections.Counter(empty=0) for split in ("train", "eval")}
        pairs = [*self._read("eval", left_out["eval"])]
        evaluation = [pair for pair in pairs if all(side.strip() for side in pair)]
        if self._inputs["eval"] and not evaluation:
            raise UserError("the evaluation files hold no pair with text on both sides")
        left_out["eval"]["empty"] = len(pairs) - len(evaluation)
        train = self._read_train(left_out["train"])
        if not self._inputs["eval"]:
            train, evaluation = _draw(train)
        return Pairs(train, evaluation, left_out)

    def _read(self, split: str, left_out: collections.Counter[str]) -> Iterator[Pair]:
        inputs = self._inputs[split]
        for number, each in enumerate(inputs, 1):
            if number < _ROWS or len(inputs) == _ROWS:
                print(f"{split}: {each}", flush=True)
            elif number == _ROWS:
                print(f"... and {len(inputs) - _ROWS + 1:,} more", flush=True)
            yield from each.pairs()
            if isinstance(each, Corpus):
                left_out.update(each.left_out)

    def _read_train(self, left_out: collections.Counter[str]) -> list[Pair]:
        """The pairs to train on; counts in `left_out`, by reason, how many are not."""
        pairs, seen = [], set()
        for source, target in self._read("train", left_out):
            pair = source.strip(), target.strip()
            sizes = [max(len(side), _SHORT) for side in pair]
            if not all(pair):
                left_out["empty"] += 1
            elif self._clean and pair in seen:
                left_out["repeated"] += 1
            elif self._clean and all(map(_TAGS.match, pair)):
                left_out["tags"] += 1
            elif self._clean and pair[0] == pair[1]:
                left_out["equal"] += 1
            elif self._clean and difference(*pair):
                left_out["placeholders"] += 1
            elif self._max_ratio and max(sizes) > self._max_ratio * min(sizes):
                left_out["ratio"] += 1
            else:
                pairs.append(pair)
            if self._clean:
                seen.add(pair)
        if not pairs:
            reasons = ", ".join(f"{reason}: {count:,}" for reason, count in left_out.items())
            raise UserError(
                "the training files hold no pair with text on both sides that is kept; left out: "
                f"{reasons}"
            )
        return pairs


def _draw(pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """The pairs to train on and to evaluate on, by a hash of the source.

    So pairs with equal sources are on one side, on every machine.
    """
    print("eval: no text for it was given: taking some of the training pairs", flush=True)
    digests = (hashlib.blake2b(source.encode(), digest_size=8).digest() for source, _ in pairs)
    keys = np.array([int.from_bytes(digest, "little") for digest in digests], np.uint64)
    most, least, share = _EVAL
    size = min(most, max(least, len(keys) // share), len(keys) // 5)
    is_drawn = keys < np.partition(keys, size)[size]
    if not is_drawn.any():
        raise UserError(
            f"{len(keys):,} training pairs are too few to take some for the evaluation: give "
            "text for it, as --eval or --eval_source"
        )
    train, drawn = ([pairs[i] for i in np.flatnonzero(part)] for part in (~is_drawn, is_drawn))
    return train, drawn
