"""Opens TFRecords of sentence pairs, packed or one pair each, checks them, and makes batches."""

import collections
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.records import RecordFiles
from benchmarks.translation import schema
from benchmarks.translation.schema import SIDES
from common.data import caches, data_manifest, files
from common.data.decoding import Batch, Reader
from common.data.order import Order
from common.data.shards import Shards, record_name
from common.errors import DataError
from common.tensorflow import tensorflow

_log = logging.getLogger("tpu_suite")

_RARE = 0.01  # the share of packed rows that may be longer than the others
_READ = 1024  # sentences to evaluate that are read at a time


@dataclasses.dataclass(frozen=True)
class Records:
    """One split of sentence pairs in TFRecords."""

    shards: Shards  # records with too long pairs are left out of training
    packed: bool  # whether a record is a row of several pairs
    length: int  # positions of a row, of inputs and, to train, of targets
    pairs: int  # in all records
    tokens: tuple[int, int]  # inputs and targets in all records, EOS included and padding not
    target_length: int  # positions of targets; to evaluate, they may be longer than `length`

    @property
    def fill(self) -> float:
        """The share of the positions of a row that hold a token, the mean of both sides."""
        return sum(self.tokens) / max(2 * self.shards.total * self.length, 1)

    def train_batches(
        self, order: Order, shard: int, num_shards: int, start_step: int
    ) -> Iterator[Batch]:
        """Endless training batches of a host.

        Yields the leaves FEATURES int32[h, length]; dropout int32[h], the seed of the row's dropout
        in this epoch; id int32[h]; and host_seconds float32[h].
        """

        def decode(serialized: Any, seeds: Any) -> dict[str, Any]:
            return {**self.parse(serialized), "dropout": seeds[2]}

        reader = Reader(self.shards, [decode], _accept)
        return reader.train_batches(order, order.share(shard, num_shards), start_step)

    def read_all(self) -> tuple[np.ndarray, np.ndarray]:
        """The (inputs, targets) of all pairs in file order, int32[n, length] padded with zeros."""
        reader = Reader(self.shards, [self.parse], _accept)
        batches = [
            [batch[side][batch["mask"] > 0] for side in SIDES]
            for batch in reader.eval_batches(_READ, 0, 1)
        ]
        inputs, targets = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        return inputs, targets

    def parse(self, serialized: Any) -> dict[str, Any]:
        """A serialized tf.train.Example as a row: int32[length] by the names of FEATURES.

        The features of targets are int32[target_length]. A record of one pair is a row of one
        segment.
        """
        tf = tensorflow()
        parsed = tf.io.parse_single_example(serialized, schema.features())
        row = {}
        for side, length in zip(SIDES, (self.length, self.target_length), strict=True):
            for name in (side, f"{side}_segmentation", f"{side}_position"):
                ids = tf.cast(parsed[name][:length], tf.int32)
                row[name] = tf.ensure_shape(tf.pad(ids, [[0, length - tf.size(ids)]]), [length])
            if not self.packed:
                position = tf.range(length)
                is_token = position < tf.size(parsed[side])
                row[f"{side}_segmentation"] = tf.cast(is_token, tf.int32)
                row[f"{side}_position"] = tf.where(is_token, position, tf.zeros_like(position))
        return row


def _accept(batch: Batch) -> None:
    """Accepts any batch: all records were checked when they were opened, or written."""


def open_records(where: RecordFiles, length: int, vocab_size: int) -> Records:
    """Opens TFRecords of sentence pairs, and logs how full the rows of training are.

    Each file is read through once to count and check its records, unless the folder's manifest
    describes the training rows. Training leaves out single pairs that are longer than `length`, and
    packed rows if they are few. Where packed and single records lie together, evaluation reads the
    single ones. Their targets may be longer than `length`.

    `length` is the positions of a row, of each side; to evaluate, of inputs. `vocab_size` is the
    number of ids of the vocabulary.
    """
    data_dir, patterns, split, cache, trust_manifest = where
    paths = files.find_shards(data_dir, patterns, split, marker="*")
    trust_manifest &= split == "train"
    if trust_manifest and (source := _from_manifest(data_dir, paths, length)):
        return _report(source)
    settings = {"length": length, "vocab_size": vocab_size, "split": split}
    key = {**settings, "facts": 2}  # the form of the results
    results = caches.scan_files(paths, lambda path: _scan_file(path, **settings), cache, key)
    indices = schema.usable(paths, [row["packed"] for row in results], split)
    paths, results = tuple(paths[i] for i in indices), [results[i] for i in indices]
    if not sum(row["count"] for row in results):
        raise DataError(f"no {split} records: the files in {data_dir!r} are empty")
    packed = any(row["packed"] for row in results)
    if packed:
        _check_length(paths, results, length)
    source = Records(
        Shards(
            paths,
            tuple(row["count"] - len(row["left_out"]) for row in results),
            tuple(tuple(row["left_out"]) for row in results),
        ),
        packed,
        length,
        sum(row["pairs"] for row in results),
        (sum(row["tokens"][0] for row in results), sum(row["tokens"][1] for row in results)),
        length if split == "train" else max(length, *(row["longest_targets"] for row in results)),
    )
    return _report(source, results) if split == "train" else source


def _other_length(path: str, packed_length: int, length: int) -> DataError:
    """The error for rows that were packed for another length."""
    return DataError(
        f"{path}: its rows were packed for {packed_length} positions, not {length}: set "
        f"--config.row_length={packed_length}, or pack the pairs again with --length={length} "
        "(python -m scripts.prepare text)"
    )


def _from_manifest(data_dir: str, paths: Sequence[str], length: int) -> Records | None:
    """The packed rows for training as the manifest describes them, if it does."""
    content = schema.load_text_manifest(data_dir) if data_dir else None
    shards = content and data_manifest.listed_rows(content.shards, data_dir, paths)
    if not content or not shards:
        return None
    if content.length != length:
        raise _other_length(paths[0], content.length, length)
    return Records(
        Shards(tuple(paths), tuple(row.examples for row in shards)),
        True,
        length,
        sum(row.pairs for row in shards),
        (sum(row.tokens[0] for row in shards), sum(row.tokens[1] for row in shards)),
        length,
    )


def _check_length(paths: Sequence[str], results: Sequence[dict[str, Any]], length: int) -> None:
    """DataError if packed rows were packed for another length.

    Google's rows have no padding at their ends, and a few of them are longer than all others: they
    hold one pair that was longer than a row.
    """
    sizes: collections.Counter[int] = collections.Counter()
    for row in results:
        sizes.update({int(size): count for size, count in row["sizes"].items()})
    longer, packed_length = 0, 0
    for size in sorted(sizes, reverse=True):
        longer, packed_length = longer + sizes[size], size
        if longer > _RARE * sizes.total():
            break
    if packed_length > length or (len(sizes) == 1 and packed_length < length):
        raise _other_length(paths[0], packed_length, length)


def _report(source: Records, results: Sequence[dict[str, Any]] = ()) -> Records:
    """Logs how full the rows are and how many are left out; returns `source`."""
    pairs, share = source.pairs, f"{source.fill:.1%} of their positions"
    if left_out := sum(len(row["left_out"]) for row in results):
        total, unit = sum(row["count"] for row in results), "rows" if source.packed else "pairs"
        _log.warning(
            "%d of %d train %s have more than %d tokens on a side and are left out",
            left_out,
            total,
            unit,
            source.length,
        )
    if source.packed:
        _log.info("%d train rows hold %d pairs and use %s", source.shards.total, pairs, share)
    else:
        _log.warning(
            "the train records hold one pair each and use %s: training wastes the rest; rows of "
            "several pairs are made from the text by: python -m scripts.prepare text",
            share,
        )
    return source


def _scan_file(path: str, length: int, vocab_size: int, split: str) -> dict[str, Any]:
    """The facts of one file as JSON; DataError names the first record that cannot be used."""
    facts: dict[str, Any] = {"packed": None, "pairs": 0, "tokens": [0, 0], "longest_targets": 0}
    facts |= {"sizes": {}, "left_out": []}  # sizes: how many packed rows have which length

    def check(chunk: Any, first: int) -> None:
        for i, row in enumerate(schema.parse(chunk), first):
            record, packed = record_name(path, i), schema.is_packed(row)
            if wrong := schema.error(row, vocab_size):
                raise DataError(f"{record}: {wrong}")
            if facts["packed"] not in (None, packed):
                raise DataError(f"{record}: packed rows and single pairs are mixed in this file")
            facts["packed"] = packed
            size = len(row["inputs"])
            if split == "eval" and not packed and size > length:
                raise DataError(
                    f"{record}: inputs has {size} tokens, and the evaluation allows {length}: set "
                    f"the last of --config.eval_lengths to {size} or more"
                )
            _add(facts, row, i, length if split == "train" else None)

    facts["count"] = caches.count_records(path, check, schema.SCHEMA)
    return facts


def _add(facts: dict[str, Any], row: schema.Row, i: int, length: int | None) -> None:
    """Adds record i to the facts of its file; it is left out if it is longer than `length`."""
    size = max(len(row[side]) for side in SIDES)
    if facts["packed"]:
        facts["sizes"][str(size)] = facts["sizes"].get(str(size), 0) + 1
    if length is not None and size > length:
        facts["left_out"].append(i)
        return
    facts["longest_targets"] = max(facts["longest_targets"], len(row["targets"]))
    facts["pairs"] += int(row["targets_segmentation"].max()) if facts["packed"] else 1
    for which, side in enumerate(SIDES):
        facts["tokens"][which] += int(np.count_nonzero(row[side]))
