"""Checks records of pairs of sentences: every row, the vocabulary and the references."""

import collections
import os
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.translation import manifest, records, rows
from benchmarks.translation import vocabulary as vocabularies
from benchmarks.translation.packing import SIDES
from benchmarks.translation.preparation import run as text_run
from errors import DataError
from ops import console, files
from ops import records as records_files
from ops.preparation import checks
from ops.preparation.checks import Findings, Row, Shard
from ops.shards import tensorflow

_NAME = re.compile(r"(.+-(?:train|dev))-(\d{5,})-of-(\d{5,})")
_ANY_SIZE = 2**31  # of a vocabulary that is not known


def find(folder: str) -> list[Shard]:
    """The shards STEM-train-00000-of-00100 and STEM-dev-* of a folder, sorted."""
    shards = []
    for name in sorted(records_files.list_folder(folder)):
        if match := _NAME.fullmatch(name):
            path = os.path.join(folder, name)
            shards.append(Shard(path, name, match[1], tensorflow().io.gfile.stat(path).length))
    return [shard for shard in shards if not shard.name.startswith("tmp.")]


def validate(folder: str, shards: list[Shard], workers: int, findings: Findings) -> dict[str, Any]:
    """Checks all records; adds the faults, and returns the report without them."""
    missing = _missing(shards, findings)
    content = _manifest(folder, findings)
    vocabulary = _vocabulary(folder, content, findings)
    scan = _Scan(vocabulary.size if vocabulary else _ANY_SIZE)
    progress = console.Progress("checking", 0, "rows", sum(shard.size for shard in shards))
    checks.scan_all(shards, scan.check_of, workers, findings, progress)
    progress.close()
    splits = {}
    for split in sorted({shard.split for shard in shards}):
        split_shards = [shard for shard in shards if shard.split == split]
        facts = scan.total(split_shards)
        sizes = facts.sizes
        if facts.packed and len(sizes) > 1 and min(sizes) == 0:
            findings.add("errors", "mixed sets", f"{split}: packed rows and single pairs are mixed")
        splits[split] = {
            "shards": len(split_shards),
            "missing": missing[split],
            "examples": sum(shard.examples for shard in split_shards),
            "bytes": sum(shard.size for shard in split_shards),
            "pairs": facts.pairs,
            "tokens": facts.tokens,
            "length": max(sizes, default=0),
        }
        if not splits[split]["examples"]:
            findings.add("errors", "training refuses", f"{split}: its files hold no record")
    for kind in ("train", "dev"):
        if not any(split.endswith(f"-{kind}") for split in splits):
            findings.add("errors", "training refuses", f"there are no files *-{kind}-*")
    _check_references(folder, splits, findings)
    if content:
        _compare(content, shards, scan, findings)
    return {
        "folder": folder,
        "manifest": bool(content),
        "splits": splits,
        "vocabulary": vocabulary.size if vocabulary else 0,
    }


class _Facts:
    """What records hold: pairs, tokens of both sides, and the lengths of packed rows."""

    def __init__(self) -> None:
        self.pairs, self.tokens = 0, [0, 0]
        self.packed = False
        self.sizes: collections.Counter[int] = collections.Counter()  # 0 for a single pair

    def add(self, row: dict[str, np.ndarray], packed: bool) -> None:
        """Adds a record."""
        self.pairs += int(row["targets_segmentation"].max()) if packed else 1
        for which, side in enumerate(SIDES):
            self.tokens[which] += int(np.count_nonzero(row[side]))
        self.packed |= packed
        self.sizes[max(len(row[side]) for side in SIDES) if packed else 0] += 1


class _Scan:
    """Checks the records of many files at the same time."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self._facts: dict[str, _Facts] = {}
        self._lock = threading.Lock()

    def check_of(self, shard: Shard) -> Callable[[bytes, str], Row]:
        """See `checks.scan_all`."""
        facts = self._facts[shard.name] = _Facts()

        def check(record: bytes, fault: str) -> Row:
            feature, broken = checks.features(record, fault)
            if broken:
                return broken
            row = rows.of_example(feature)
            packed = len(row["targets_segmentation"]) > 0
            wrong = rows.fault(row, packed, self._vocab_size)
            wrong = wrong or (rows.segment_fault(row) if packed else "")
            if wrong:
                return Row([], [], b"", [("errors", "rows", wrong)], False)
            with self._lock:
                facts.add(row, packed)
            return Row([], [], b"", [], True)

        return check

    def total(self, shards: list[Shard]) -> _Facts:
        """The facts of some files together."""
        total = _Facts()
        for facts in (self._facts[shard.name] for shard in shards):
            total.pairs += facts.pairs
            total.tokens = [a + b for a, b in zip(total.tokens, facts.tokens, strict=True)]
            total.packed |= facts.packed
            total.sizes += facts.sizes
        return total


def _missing(shards: list[Shard], findings: Findings) -> dict[str, list[str]]:
    """The names of missing shards by split; adds faults of the names."""
    missing: dict[str, list[str]] = {}
    for split in sorted({shard.split for shard in shards}):
        names = {shard.name for shard in shards if shard.split == split}
        totals = sorted({int(name.rsplit("-", 1)[1]) for name in names})
        if len(totals) > 1:
            sets = ", ".join(f"-of-{n:05d}" for n in totals)
            findings.add("errors", "mixed sets", f"{split} shards of several sets: {sets}")
        missing[split] = []
        for n in totals:
            ends = [name for name in names if name.endswith(f"-of-{n:05d}")]
            numbers = {int(name.rsplit("-", 3)[1]) for name in ends}
            absent = files.missing_numbers(numbers, n)
            missing[split] += [f"{split}-{k:05d}-of-{n:05d}" for k in absent]
        for name in missing[split]:
            findings.add("errors", "missing shard", name)
    return missing


def _manifest(folder: str, findings: Findings) -> manifest.DataManifest | None:
    try:
        return manifest.load(folder)
    except DataError as error:
        findings.add("errors", "manifest", str(error))
        return None


def _vocabulary(
    folder: str, content: manifest.DataManifest | None, findings: Findings
) -> vocabularies.Vocabulary | None:
    """The vocabulary of a folder, None if there is not one; adds its faults."""
    names = [name for name in records_files.list_folder(folder) if name.startswith("vocab.")]
    if content:
        names = [content.vocabulary_file]
    if len(names) != 1:
        listed = ", ".join(sorted(names)) or "none"
        findings.add("warnings", "vocabulary", f"one file vocab.* is needed, there is {listed}")
        return None
    path = os.path.join(folder, names[0])
    try:
        vocabulary = vocabularies.load(path)
        records.check_vocabulary(folder, vocabulary, path)
    except DataError as error:
        findings.add("errors", "vocabulary", str(error))
        return None
    return vocabulary


def _check_references(folder: str, splits: dict[str, Any], findings: Findings) -> None:
    """Compares the number of raw lines with the number of records to evaluate."""
    for file in (text_run.SOURCES, text_run.REFERENCES):
        path = os.path.join(folder, file)
        if not tensorflow().io.gfile.exists(path):
            findings.add("warnings", "references", f"there is no {file}; the score needs the text")
            continue
        with tensorflow().io.gfile.GFile(path, "rb") as lines:
            count = lines.read().count(b"\n")
        numbers = {row["examples"] for name, row in splits.items() if name.endswith("-dev")}
        if numbers and count not in numbers:
            text = f"{file} has {count:,} lines, and there are {max(numbers):,} records to evaluate"
            findings.add("errors", "references", text)


def _compare(
    content: manifest.DataManifest, shards: list[Shard], scan: _Scan, findings: Findings
) -> None:
    """Compares the shards with the manifest."""
    by_name = {shard.name: shard for shard in shards}
    for name in sorted(content.shards.keys() - by_name.keys()):
        findings.add("errors", "manifest", f"{name} is in the manifest, but missing")
    for name in sorted(by_name.keys() - content.shards.keys()):
        findings.add("errors", "manifest", f"{name} is not in the manifest")
    for name in sorted(by_name.keys() & content.shards.keys()):
        shard, row, facts = by_name[name], content.shards[name], scan.total([by_name[name]])
        actual = {"examples": shard.examples, "bytes": shard.size, "sha256": shard.sha256}
        actual |= {"pairs": facts.pairs, "tokens": tuple(facts.tokens)}
        for key, value in actual.items():
            if getattr(row, key) != value:
                text = f"{name}: {key} is {value}, in the manifest {getattr(row, key)}"
                findings.add("errors", "manifest", text)
