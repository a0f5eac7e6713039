"""Streams pairs of sentences from parallel text, or from records that are packed (again).

Text is files of lines, members of archives and the forms of `corpora`, local or gs://. Records are
tensor2tensor's, or MLPerf's reference's.
"""

import argparse
import collections
import functools
import hashlib
import itertools
import os
import posixpath
import re
import tarfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.translation import agreement, rows
from benchmarks.translation.preparation import corpora
from benchmarks.translation.preparation.corpora import Corpus, Count, Lines, Text
from benchmarks.translation.vocabulary import Vocabulary, Words, load_vocabulary
from common.data import files, records
from common.data.shards import record_name, tensorflow
from common.errors import DataError, UserError, one_line
from common.preparation.sources import SourceError, read_at

_ARCHIVE = r"(.+?\.(?:tgz|tar|tar\.gz|tar\.bz2|tar\.xz))"
_EVAL = 2000, 100, 50  # pairs taken for evaluation: the most, the least, and one in so many
_SHORT = 10  # characters: sides that have fewer count as so long in a ratio
_RECORD_PATTERNS = {"train": "*-train-*", "eval": "*-dev-*,*-dev"}

Side = str | list[int]  # of a pair: its text, or its ids with EOS


def _find_texts(argument: str) -> list[Text]:
    """The files of a comma-separated argument: FILE, FILE.gz, or ARCHIVE.tgz/MEMBER.

    Raises:
        SourceError: a file is missing.
    """
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


def pairs_in(archive: str, source: str, target: str) -> list[Lines]:
    """The pairs of files in an archive whose names differ in the language only.

    NAME.en with NAME.de (each perhaps .gz), and NAME-src.en.sgm with NAME-ref.de.sgm.

    Raises:
        SourceError: the archive is damaged or has no pair.
    """
    if not tensorflow().io.gfile.exists(archive):
        raise SourceError(f"there is no {archive}")
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


def _stamp(texts: list[Text]) -> str:
    """A digest of the files' names, sizes, times and ends; it changes with the input."""
    digest, gfile = hashlib.sha256(), tensorflow().io.gfile
    for path in dict.fromkeys(text.path for text in texts):
        stat = gfile.stat(path)
        ends = read_at(path, 0, 1 << 16), read_at(path, max(0, stat.length - (1 << 16)), 1 << 16)
        digest.update(repr((path, stat.length, stat.mtime_nsec, *ends)).encode())
    digest.update(repr([text.member for text in texts]).encode())
    return digest.hexdigest()


def _load(path: str) -> Vocabulary:
    """A vocabulary for plain text, from a file; DataError if it is none."""
    vocabulary = load_vocabulary(path)
    if isinstance(vocabulary, Words):
        raise DataError(
            f"{path} is a vocabulary of tokenized text, which the benchmark gnmt reads as it is; "
            "to prepare plain text, give subwords of tensor2tensor or a sentencepiece model"
        )
    return vocabulary


class TextInput:
    """Files of text as an input.

    Attributes:
        vocabulary: the one to use; None if it is to be built.
        size: bytes that reading the training pairs takes; archives count for each member.
        settings: what changes the records, beside those that each input has.
        left_out: the training pairs that the last `read` has left out, by reason.
    """

    def __init__(self, args: argparse.Namespace):
        wanted = args.source_language, args.target_language
        self._inputs: dict[str, list[Corpus | Lines]] = {}
        for split in ("train", "eval"):
            sides = [_find_texts(getattr(args, f"{split}_{s}")) for s in ("source", "target")]
            self._inputs[split] = [*map(Lines, *sides)]
        train = self._inputs["train"]
        for archive in filter(None, args.train_archives.split(",")):
            print(f"listing {archive}", flush=True)
            train += pairs_in(archive, wanted[0] or "en", wanted[1] or "de")
        columns = [*filter(None, args.columns.split(","))]
        for split, inputs in self._inputs.items():
            paths = filter(None, getattr(args, split).split(","))
            inputs += [Corpus.open(path, columns, wanted) for path in paths]
        for each in train:
            print(f"train: {each}", flush=True)
        self._own = [Text(args.vocabulary)] if args.vocabulary else []
        self.vocabulary = _load(args.vocabulary) if args.vocabulary else None
        texts = (each if isinstance(each, Lines) else [each] for each in train)
        self.size = sum(files.sizes([text.path for text in itertools.chain(*texts)]))
        self._clean, self._max_ratio = args.clean, args.max_ratio
        self.settings: dict[str, Any] = {}
        if args.clean or args.max_ratio:
            self.settings = {"clean": args.clean, "max_ratio": args.max_ratio}
        if not self._inputs["eval"]:
            self.settings["eval"] = "drawn"
        self.left_out: collections.Counter[str] = collections.Counter()

    def stamps(self) -> dict[str, str]:
        """A digest of each input of the training rows, by its flag."""
        train = self._inputs["train"]
        lines = [each for each in train if isinstance(each, Lines)]
        stamps = {
            "train_source": _stamp([each.source for each in lines]),
            "train_target": _stamp([each.target for each in lines]),
            "vocabulary": _stamp(self._own),
        }
        if tables := [each for each in train if isinstance(each, Corpus)]:
            keys = repr([each.keys for each in tables])
            stamps["train"] = _stamp([Text(each.path) for each in tables]) + keys
        return stamps

    def read(
        self, split: str, count: Count = lambda size: None
    ) -> Iterator[tuple[str, str] | None]:
        """Yields the pairs of a split; of the evaluation None for one with an empty side.

        Those to train on are without space at their ends, as in tensor2tensor. Without text to
        evaluate on it is a part of them.

        Raises:
            SourceError: the numbers of lines differ, or a line is not UTF-8.
        """
        if self._inputs["eval"]:
            yield from self._read_all(split, count) if split == "eval" else self._cleaned(count)
            return
        least, drawn = self._drawn
        if split == "eval":
            yield from drawn
            return
        for pair in self._cleaned(count):
            if _hash(pair[0]) >= least:
                yield pair

    def _read_all(
        self, split: str, count: Count = lambda size: None
    ) -> Iterator[tuple[str, str] | None]:
        for each in self._inputs[split]:
            for raw in each.pairs(count):
                source, target = map(str.strip, raw)
                if not (source and target):
                    yield None
                else:
                    yield (source, target) if split == "train" else raw

    def _cleaned(self, count: Count = lambda size: None) -> Iterator[tuple[str, str]]:
        """The pairs to train on, and counts those that are left out."""
        self.left_out = collections.Counter(empty=0)
        first = iter(self._first) if self._clean else itertools.repeat(True)
        for pair in self._read_all("train", count):
            reason = ""
            if not pair:
                reason = "empty"
            elif not next(first, True):
                reason = "repeated"
            elif self._clean and pair[0] == pair[1]:
                reason = "equal"
            elif self._max_ratio:
                sizes = [max(len(side), _SHORT) for side in pair]
                reason = "ratio" if max(sizes) > self._max_ratio * min(sizes) else ""
            if reason:
                self.left_out[reason] += 1
            elif pair:
                yield pair

    @functools.cached_property
    def _first(self) -> np.ndarray:
        """Whether each pair with text on both sides is there for the first time: bool[n]."""
        pairs = filter(None, self._read_all("train"))
        keys = np.fromiter((_hash("\n".join(pair)) for pair in pairs), np.uint64)
        first = np.zeros(len(keys), bool)
        first[np.unique(keys, return_index=True)[1]] = True
        return first

    @functools.cached_property
    def _drawn(self) -> tuple[int, list[tuple[str, str]]]:
        """The least hash of sources to train on, and the pairs with smaller ones to evaluate on.

        So pairs with equal sources are on one side.
        """
        print("eval: no text for it was given: taking some of the training pairs", flush=True)
        keys = np.fromiter((_hash(pair[0]) for pair in self._cleaned()), np.uint64)
        if not len(keys):
            reasons = ", ".join(f"{name}: {n:,}" for name, n in self.left_out.items() if n)
            raise SourceError(
                f"of the training files all pairs are left out ({reasons or 'empty sides'}): give "
                "other files, or neither --clean nor --max_ratio"
            )
        most, least, share = _EVAL
        size = min(most, max(least, len(keys) // share), len(keys) // 5)
        bound = int(np.partition(keys, size)[size]) if size else 0
        drawn = [pair for pair in self._cleaned() if _hash(pair[0]) < bound]
        if not drawn:
            raise UserError(
                f"{len(keys):,} training pairs are too few to take some for the evaluation: give "
                "text for it, as --eval or --eval_source"
            )
        return bound, drawn


def _hash(text: str) -> int:
    """A number of 64 bits, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class RecordInput:
    """A folder of records, each a pair of ids or a packed row of them; see `TextInput`."""

    settings: Mapping[str, Any] = {}
    left_out: Mapping[str, int] = {}

    def __init__(self, args: argparse.Namespace):
        folder, self._paths = args.records, {}
        for split, patterns in _RECORD_PATTERNS.items():
            try:
                paths = self._paths[split] = files.find(folder, patterns, f"{split} records")
                files.check_complete(paths)
            except DataError as error:
                raise SourceError(str(error)) from error
            if len(sets := files.stems(paths)) > 1:
                names = " and ".join(f"{os.path.basename(stem)}-*" for stem in sets[:2])
                raise SourceError(
                    f"{folder} holds {len(sets)} sets of {split} records, {names}, and every pair "
                    "would be taken from each: keep one set in the folder"
                )
        self._own = args.vocabulary
        if not self._own:
            names = [name for name in records.list_folder(folder) if "vocab" in name]
            if len(names) != 1:
                raise SourceError(
                    f"{folder} holds {len(names)} files named vocab*: give --vocabulary=FILE"
                )
            self._own = os.path.join(folder, names[0])
        self.vocabulary = _load(self._own)
        rows.check_vocabulary(folder, self.vocabulary, self._own)
        for split, paths in self._paths.items():
            fault, is_certain = agreement.fault(self.vocabulary, paths, split == "eval")
            if is_certain:
                raise DataError(fault)
            if fault:
                print(f"warning: {fault}", flush=True)
        self.size = sum(files.sizes(self._paths["train"]))

    def stamps(self) -> dict[str, str]:
        digest = hashlib.sha256()
        for path in self._paths["train"]:
            stat = tensorflow().io.gfile.stat(path)
            digest.update(repr((path, stat.length, stat.mtime_nsec)).encode())
        return {"records": digest.hexdigest(), "vocabulary": _stamp([Text(self._own)])}

    def read(self, split: str, count: Count = lambda size: None) -> Iterator[list[list[int]]]:
        """Yields the ids of both sides, with EOS, of each pair.

        Raises:
            DataError: a record is damaged, of another schema, or of another vocabulary.
        """
        for path in self._paths[split]:
            try:
                for number, record in enumerate(records.read_shard(path)):
                    count(len(record) + 16)
                    name = record_name(path, number)
                    row = rows.of_record(record, name)
                    if fault := rows.any_fault(row, self.vocabulary.size):
                        raise DataError(f"{name}: {fault}")
                    for pair in rows.pairs(row):
                        yield [ids.tolist() for ids in pair]
            except tensorflow().errors.DataLossError as error:
                raise DataError(f"{path} is damaged: {one_line(error)}") from error
