"""Reads manifest.json, in which `preparation.text` describes its records of sentence pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from etils import epath

from benchmarks.translation.vocabulary import Vocabulary
from errors import DataError, parse_json
from ops import files

KIND = "translation"


class Shard(NamedTuple):
    """One file of records."""

    examples: int
    bytes: int
    sha256: str
    pairs: int
    tokens: tuple[int, int]  # of inputs and of targets


@dataclasses.dataclass(frozen=True)
class DataManifest:
    """What the manifest says; `shards` are by name, `length` is that of packed rows."""

    length: int
    vocabulary_file: str
    vocabulary_digest: str
    vocab_size: int
    shards: dict[str, Shard]

    def described(self, data_dir: str, paths: Sequence[str]) -> list[Shard] | None:
        """The facts of each file; None if a file is not listed or has another size."""
        return files.listed_rows(self.shards, data_dir, paths, lambda row: row.bytes)


def load(data_dir: str) -> DataManifest | None:
    """The data manifest of a folder, local or gs://; None if it has none for translation.

    Raises:
      DataError: the manifest cannot be read or is of another form.
    """
    data = files.read_manifest(data_dir)
    if data is None:
        return None
    try:
        content = parse_json(data)
        if content.get("kind") != KIND:
            return None
        vocabulary, splits = content["vocabulary"], content["splits"]
        rows = [row for split in splits.values() for row in split["shards"]]
        return DataManifest(
            int(content["length"]),
            str(vocabulary["file"]),
            str(vocabulary["sha256"]),
            int(vocabulary["size"]),
            {row["name"]: _shard(row) for row in rows},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise files.foreign_manifest(str(epath.Path(data_dir) / files.MANIFEST), error) from error


def check_vocabulary(data_dir: str, vocabulary: Vocabulary, path: str) -> None:
    """Raises DataError if the folder's manifest says that its records have another vocabulary.

    path: of the vocabulary, for the message. Folders without a manifest pass.
    """
    content = load(data_dir)
    if content and content.vocabulary_digest != vocabulary.digest:
        raise DataError(
            f"{path} is not the vocabulary of the records in {data_dir} (SHA-256 "
            f"{vocabulary.digest[:12]}, in manifest.json {content.vocabulary_digest[:12]}): use "
            f"{data_dir.rstrip('/')}/{content.vocabulary_file}, or prepare the records again"
        )


def _shard(row: dict) -> Shard:
    inputs, targets = map(int, row["tokens"])
    numbers = {key: int(row[key]) for key in ("examples", "bytes", "pairs")}
    return Shard(**numbers, sha256=str(row["sha256"]), tokens=(inputs, targets))
