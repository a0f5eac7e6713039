"""The pairs of sentences that the arguments of a preparation name, cleaned, in two splits."""

import argparse
import collections
import hashlib
import posixpath
import re
import tarfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.translation.preparation import corpora
from benchmarks.translation.preparation.corpora import Corpus, Lines, Text
from benchmarks.translation.vocabulary import Vocabulary, Words, load_vocabulary
from common.data import files
from common.data.shards import tensorflow
from common.errors import DataError, UserError, one_line
from common.preparation.sources import SourceError

_ARCHIVE = r"(.+?\.(?:tgz|tar|tar\.gz|tar\.bz2|tar\.xz))"
_EVAL = 2000, 100, 50  # pairs taken for evaluation: the most, the least, and one in so many
_SHORT = 10  # characters: sides that have fewer count as so long in a ratio

Pair = tuple[str, str]


def _find_texts(argument: str) -> list[Text]:
    """The files of a comma-separated argument: FILE, FILE.gz, or ARCHIVE.tgz/MEMBER."""
    gfile, texts = tensorflow().io.gfile, []
    for path in filter(None, argument.split(",")):
        match = re.fullmatch(f"{_ARCHIVE}/(.+)", path)
        text = Text(match[1], posixpath.normpath(match[2])) if match else Text(path)
        if not gfile.exists(text.path):
            raise SourceError(f"there is no {text.path}")
        if gfile.isdir(text.path):
            raise SourceError(f"{text.path} is a folder; give files of text")
        if not match and re.fullmatch(_ARCHIVE, path):
            raise SourceError(
                f"{path} is an archive: give {path}/MEMBER, or --train_archives={path}"
            )
        texts.append(text)
    return texts


def _pairs_in(archive: str, source: str, target: str) -> list[Lines]:
    """The pairs of files in an archive whose names differ in the language only.

    They are NAME.en with NAME.de (each perhaps .gz), and NAME-src.en.sgm with NAME-ref.de.sgm.
    """
    if not tensorflow().io.gfile.exists(archive):
        raise SourceError(f"there is no {archive}")
    print(f"listing {archive}", flush=True)
    try:
        with corpora.open_file(archive) as raw, tarfile.open(fileobj=raw, mode="r|*") as tar:
            names = [posixpath.normpath(info.name) for info in tar if info.isreg()]
    except corpora.DAMAGE as error:
        fault = one_line(error)
        raise SourceError(f"{archive} is no tar archive, or is damaged: {fault}") from error
    sides: list[dict[str, str]] = []
    for language, role in ((source, "src"), (target, "ref")):
        pattern = rf"(?P<stem>.*?)(-{role}\.{language}\.sgm|\.{language})(\.gz)?"
        matches = {name: re.fullmatch(pattern, name) for name in names if "/._" not in f"/{name}"}
        sides.append({match["stem"]: name for name, match in matches.items() if match})
    stems = [stem for stem in sides[0] if stem in sides[1]]
    if not stems:
        few = ", ".join(names[:4])
        raise SourceError(
            f"{archive} holds no files NAME.{source} and NAME.{target} (it holds {few} ...): set "
            "--source_language and --target_language"
        )
    return [Lines(Text(archive, sides[0][stem]), Text(archive, sides[1][stem])) for stem in stems]


def _load(path: str) -> Vocabulary:
    """A vocabulary for plain text, from a file; DataError if it is for other text."""
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
    eval: list[Pair | None]  # None for a pair with an empty side
    left_out: dict[str, int]  # training pairs by the reason why they are left out


class TextInput:
    """The files of text that the arguments name.

    Attributes:
        vocabulary: the one to use; None if it is to be built.
        size: bytes of the training text; archives count for each member.
        settings: what changes the records, beside the settings that each preparation has.
    """

    def __init__(self, args: argparse.Namespace):
        wanted = args.source_language, args.target_language
        columns = [*filter(None, args.columns.split(","))]
        self._inputs: dict[str, list[Corpus | Lines]] = {}
        for split in ("train", "eval"):
            sides = [_find_texts(getattr(args, f"{split}_{s}")) for s in ("source", "target")]
            inputs: list[Corpus | Lines] = [*map(Lines, *sides)]
            archives = args.train_archives if split == "train" else ""
            for archive in filter(None, archives.split(",")):
                inputs += _pairs_in(archive, wanted[0] or "en", wanted[1] or "de")
            for path in filter(None, getattr(args, split).split(",")):
                inputs.append(Corpus.open(path, columns, wanted))
            self._inputs[split] = inputs
        self.vocabulary = _load(args.vocabulary) if args.vocabulary else None
        self._paths = [path for each in self._inputs["train"] for path in each.paths]
        self.size = sum(files.sizes(self._paths))
        self._clean, self._max_ratio = args.clean, args.max_ratio
        self.settings: dict[str, Any] = {}
        if args.clean or args.max_ratio:
            self.settings = {"clean": args.clean, "max_ratio": args.max_ratio}
        if not self._inputs["eval"]:
            self.settings["eval"] = "drawn"

    def stamps(self) -> dict[str, str]:
        """What the training rows are made of: names, sizes and times of the files, by flag."""
        rows: list[Any] = [str(each) for each in self._inputs["train"]]
        for path in dict.fromkeys(self._paths):
            stat = tensorflow().io.gfile.stat(path)
            rows.append((path, stat.length, stat.mtime_nsec))
        digest = hashlib.sha256(repr(rows).encode()).hexdigest()
        return {"train": digest, "vocabulary": self.vocabulary.digest if self.vocabulary else ""}

    def read(self) -> Pairs:
        """Reads both splits; without text to evaluate on, it is a part of the training pairs.

        Raises:
            SourceError: a file is damaged, not UTF-8, or has another number of lines than the
                other one.
        """
        evaluation: list[Pair | None] = []
        for pair in self._read("eval"):
            evaluation.append(pair if all(side.strip() for side in pair) else None)
        if self._inputs["eval"] and not any(evaluation):
            raise UserError("the evaluation files hold no pair with text on both sides")
        train, left_out = self._read_train()
        if not self._inputs["eval"]:
            train, evaluation = _draw(train)
        return Pairs(train, evaluation, left_out)

    def _read(self, split: str) -> Iterator[Pair]:
        for each in self._inputs[split]:
            print(f"{split}: {each}", flush=True)
            yield from each.pairs()

    def _read_train(self) -> tuple[list[Pair], dict[str, int]]:
        """The pairs to train on, and how many are left out, by reason."""
        left_out: collections.Counter[str] = collections.Counter(empty=0)
        pairs, seen = [], set()
        for source, target in self._read("train"):
            pair = source.strip(), target.strip()
            sizes = [max(len(side), _SHORT) for side in pair]
            if not all(pair):
                left_out["empty"] += 1
            elif self._clean and pair in seen:
                left_out["repeated"] += 1
            elif self._clean and pair[0] == pair[1]:
                left_out["equal"] += 1
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
        return pairs, left_out


def _draw(pairs: list[Pair]) -> tuple[list[Pair], list[Pair | None]]:
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
    drawn = [pairs[i] for i in np.flatnonzero(is_drawn)]
    return [pairs[i] for i in np.flatnonzero(~is_drawn)], [*drawn]
