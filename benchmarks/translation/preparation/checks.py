"""Checks records of pairs of sentences: every row, the vocabulary and the references."""

import argparse
import collections
import os
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.translation import manifest, rows
from benchmarks.translation import vocabulary as vocabularies
from benchmarks.translation.preparation import run
from benchmarks.translation.rows import SIDES
from errors import DataError
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


def validate(args: argparse.Namespace, shards: list[Shard], findings: Findings) -> dict[str, Any]:
    """Checks all records; adds the faults, and returns the report."""
    folder = args.folder
    absent = checks.missing(shards, findings)
    content = _manifest(folder, findings)
    vocabulary = _vocabulary(folder, content, findings)
    scan = _Scan(vocabulary.size if vocabulary else _ANY_SIZE)
    checks.scan_all(shards, scan.check_of, args.workers, findings, "rows")
    facts_of = {split: scan.total([s for s in shards if s.split == split]) for split in absent}
    numbers = {split: sum(s.examples for s in shards if s.split == split) for split in absent}
    for split, facts in facts_of.items():
        sizes = facts.sizes
        if facts.packed and len(sizes) > 1 and min(sizes) == 0:
            findings.add("errors", "mixed sets", f"{split}: packed rows and single pairs are mixed")
        if not numbers[split]:
            findings.add("errors", "training refuses", f"{split}: its files hold no record")
    for kind in ("train", "dev"):
        if not any(split.endswith(f"-{kind}") for split in absent):
            findings.add("errors", "training refuses", f"there are no files *-{kind}-*")
    _check_references(folder, numbers, findings)
    if content:
        listed = {name: row._asdict() for name, row in content.shards.items()}
        checks.compare(shards, listed, findings, scan.facts)
    report = checks.report(folder, shards, absent, findings)
    for split, facts in facts_of.items():
        length = max(facts.sizes, default=0)
        report["splits"][split] |= {"pairs": facts.pairs, "tokens": facts.tokens, "length": length}
    report["manifest"] = bool(content)
    return report | {"vocabulary": vocabulary.size if vocabulary else 0}


class _Facts:
    """What records hold: pairs, tokens of both sides, and the lengths of packed rows."""

    def __init__(self) -> None:
        self.pairs, self.tokens = 0, [0, 0]
        self.packed = False
        self.sizes: collections.Counter[int] = collections.Counter()  # 0 for a single pair

    def add(self, row: rows.Row) -> None:
        """Adds a record."""
        packed = rows.is_packed(row)
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
            if wrong := rows.any_fault(row, self._vocab_size):
                return Row([], [], b"", [("errors", "rows", wrong)], False)
            with self._lock:
                facts.add(row)
            return Row([], [], b"", [], True)

        return check

    def facts(self, shard: Shard) -> dict[str, Any]:
        """What the manifest says of a shard besides its examples, bytes and digest."""
        facts = self._facts[shard.name]
        return {"pairs": facts.pairs, "tokens": tuple(facts.tokens)}

    def total(self, shards: list[Shard]) -> _Facts:
        """The facts of some files together."""
        total = _Facts()
        for facts in (self._facts[shard.name] for shard in shards):
            total.pairs += facts.pairs
            total.tokens = [a + b for a, b in zip(total.tokens, facts.tokens, strict=True)]
            total.packed |= facts.packed
            total.sizes += facts.sizes
        return total


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
        manifest.check_vocabulary(folder, vocabulary, path)
    except DataError as error:
        findings.add("errors", "vocabulary", str(error))
        return None
    return vocabulary


def _check_references(folder: str, examples: dict[str, int], findings: Findings) -> None:
    """Compares the number of raw lines with the number of records to evaluate, by split."""
    for file in (run.SOURCES, run.REFERENCES):
        path = os.path.join(folder, file)
        if not tensorflow().io.gfile.exists(path):
            findings.add("warnings", "references", f"there is no {file}; the score needs the text")
            continue
        with tensorflow().io.gfile.GFile(path, "rb") as lines:
            count = lines.read().count(b"\n")
        numbers = {number for split, number in examples.items() if split.endswith("-dev")}
        if numbers and count not in numbers:
            text = f"{file} has {count:,} lines, and there are {max(numbers):,} records to evaluate"
            findings.add("errors", "references", text)
