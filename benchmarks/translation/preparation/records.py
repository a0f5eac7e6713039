"""Records of pairs as an input, to be packed (again): tensor2tensor's, MLPerf's reference's."""

import argparse
import hashlib
import os
from collections.abc import Iterator

import numpy as np

from benchmarks.translation import agreement, manifest, rows
from benchmarks.translation.preparation import shards, sources
from benchmarks.translation.vocabulary import Vocabulary
from errors import DataError
from ops import files
from ops import records as records_files
from ops.preparation.sources import SourceError
from ops.shards import record_name, tensorflow

_PATTERNS = {"train": "*-train-*", "eval": "*-dev-*,*-dev"}


class Input:
    """A folder of records, each a pair of ids or a packed row of them; see `sources.Input`."""

    is_ids = True

    def __init__(self, args: argparse.Namespace):
        """Raises SourceError if the folder lacks a vocabulary, or one complete set of a split."""
        self._folder = args.records
        try:
            self._paths = {
                split: files.find(args.records, patterns, f"{split} records")
                for split, patterns in _PATTERNS.items()
            }
            for paths in self._paths.values():
                files.check_complete(paths)
        except DataError as error:
            raise SourceError(str(error)) from error
        for split, paths in self._paths.items():
            if len(sets := files.stems(paths)) > 1:
                names = " and ".join(f"{os.path.basename(stem)}-*" for stem in sets[:2])
                raise SourceError(
                    f"{args.records} holds {len(sets)} sets of {split} records, {names}, and every "
                    "pair would be taken from each: keep one set in the folder"
                )
        self.vocabulary = args.vocabulary or self._own_vocabulary()
        self._size = 0

    def _own_vocabulary(self) -> str:
        names = [name for name in records_files.list_folder(self._folder) if "vocab" in name]
        if len(names) != 1:
            raise SourceError(
                f"{self._folder} holds {len(names)} files named vocab*: give --vocabulary=FILE"
            )
        return os.path.join(self._folder, names[0])

    def stamps(self, split: str) -> dict[str, str]:
        gfile = tensorflow().io.gfile
        digest = hashlib.sha256()
        for path in self._paths[split]:
            stat = gfile.stat(path)
            digest.update(repr((path, stat.length, stat.mtime_nsec)).encode())
        vocabulary = [sources.Text(self.vocabulary)]
        return {"records": digest.hexdigest(), "vocabulary": sources.stamp(vocabulary)}

    def size(self) -> int:
        return sum(files.sizes(self._paths["train"]))

    def use(self, vocabulary: Vocabulary) -> None:
        """Raises DataError if the manifest or the ids say that the records have another one."""
        manifest.check_vocabulary(self._folder, vocabulary, self.vocabulary)
        for split, paths in self._paths.items():
            fault, is_certain = agreement.fault(vocabulary, paths, split == "eval")
            if is_certain:
                raise DataError(fault)
            if fault:
                print(f"warning: {fault}", flush=True)
        self._vocabulary = vocabulary

    def read(
        self, split: str, reading: sources.Reading, count: sources.Count
    ) -> Iterator[tuple[str, str, bytes, bytes]]:
        """Yields (source, target, ids, ids); the texts only of split "eval".

        Raises:
            DataError: a record is damaged, of another schema, or of another vocabulary.
        """
        for path in self._paths[split]:
            for number, record in enumerate(records_files.read_shard(path)):
                count(len(record) + 16)
                for pair in _pairs(record, record_name(path, number), self._vocabulary.size):
                    reading.pairs += 1
                    texts = ("", "")
                    if split == "eval":
                        texts = tuple(self._vocabulary.decode(ids.tolist()) for ids in pair)
                    left, right = map(shards.as_bytes, pair)
                    yield texts[0], texts[1], left, right


def _pairs(record: bytes, name: str, vocab_size: int) -> Iterator[list[np.ndarray]]:
    """The pairs of ids in a record."""
    row = rows.of_record(record, name)
    if fault := rows.any_fault(row, vocab_size):
        raise DataError(f"{name}: {fault}")
    yield from rows.pairs(row)
