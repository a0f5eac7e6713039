"""The data manifest: manifest.json, which preparations write into a folder of records.

It holds the classes, and the name, size and number of records of each file, so that a run need not
count them. A folder that has a preparation's plan and no data manifest is unfinished.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from etils import epath

from common.data import storage
from common.errors import DataError, one_line, parse_json
from common.tensorflow import tensorflow

Row = TypeVar("Row")
FILE_NAME = "manifest.json"
# What a preparation keeps in the folder: what for, and the command that was typed.
STATE, PLAN, COMMAND = "prepare_state", "plan.json", "command.json"
DIGEST = "splits_sha256"  # the key of a manifest that has the `splits_digest` of its "splits"


def read_bytes(data_dir: str) -> bytes | None:
    """The content of a folder's data manifest, local or gs://; None if it has none.

    DataError if it is unreadable, if its counts are others than those that were written, or if a
    preparation has begun the folder and not ended.
    """
    path, data = epath.Path(data_dir) / FILE_NAME, None
    try:
        # epath takes a pipe for a file, too.
        if path.exists() if "://" in data_dir else os.path.isfile(path):
            data = path.read_bytes()
    except Exception as error:  # gs:// raises TensorFlow's own classes
        raise DataError(f"cannot read {path}: {one_line(error)}") from error
    if data is None:
        check_finished(data_dir)
    elif problem := _miscounted(data):
        raise form_error(str(path), problem)
    return data


def splits_digest(splits: Any) -> str:
    """The SHA-256 of a manifest's "splits", in hexadecimal, for any form of the text."""
    return hashlib.sha256(json.dumps(splits, sort_keys=True).encode()).hexdigest()


def _miscounted(manifest: bytes) -> Exception | None:
    """What is wrong with the counts of a manifest; other forms of manifests are not looked at."""
    try:
        content = parse_json(manifest)
        if content.get(DIGEST, digest := splits_digest(content["splits"])) != digest:
            return ValueError(f'"splits" was changed, its SHA-256 is not "{DIGEST}"')
        for name, split in content["splits"].items():
            for key in ("examples", "bytes"):  # ratings have no examples
                counts = [int(row[key]) for row in split["shards"] if key in row]
                if counts and (stated := split.get(key, sum(counts))) != sum(counts):
                    return ValueError(f"{name} has {stated} {key}, its files {sum(counts)}")
    except OverflowError as error:  # 1e999
        return error
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    return None


def check_finished(data_dir: str) -> None:
    """Raises DataError if a folder has a preparation's plan and no manifest."""
    tf, folder = tensorflow(), epath.Path(data_dir)
    plan, manifest = str(folder / STATE / PLAN), str(folder / FILE_NAME)
    try:
        is_unfinished = tf.io.gfile.exists(plan) and not tf.io.gfile.exists(manifest)
    except tf.errors.OpError as error:
        raise DataError(f"cannot read {plan}: {one_line(error)}") from error
    if is_unfinished:
        raise DataError(f"{data_dir} holds unfinished records: {_again(data_dir)} finishes them")


def _again(data_dir: str) -> str:
    """The command that began the records of a folder, which also repairs them."""
    with contextlib.suppress(ValueError, tensorflow().errors.OpError):  # damaged, or a folder
        command = parse_json(storage.read(os.path.join(data_dir, STATE, COMMAND)) or b"")
        if isinstance(command, str) and command.splitlines() == [command]:
            return f"`{command}`"
    return "the command that began them"


def check_sizes(data_dir: str, paths: Sequence[str]) -> None:
    """Raises DataError if a file has another size than its folder's data manifest lists."""
    try:
        content = parse_json(read_bytes(data_dir) or b"{}")
        rows = [row for split in content["splits"].values() for row in split["shards"]]
        listed = {os.path.join(data_dir, row["name"]): int(row["bytes"]) for row in rows}
    except (AttributeError, KeyError, TypeError, ValueError):  # another form, or none
        return
    paths = [path for path in paths if path in listed]
    for path, size in zip(paths, storage.sizes(paths), strict=True):
        if size != listed[path]:
            raise DataError(
                f"{path} has {size:,} bytes, {FILE_NAME} lists {listed[path]:,}: it is damaged or "
                f"another file; copy it again, or {_again(data_dir)} writes it again"
            )


def form_error(path: str, error: Exception) -> DataError:
    """The error for a manifest of another form; `error` says what is wrong with it."""
    folder, fix = os.path.dirname(path), "move it away, and the run counts the records itself"
    if tensorflow().io.gfile.exists(os.path.join(folder, STATE, PLAN)):
        fix = f"{_again(folder)} writes it again"
    return DataError(
        f"{path} was not written by this repository's scripts as it is now ({error!r}): {fix}"
    )


def listed_rows(shards: Mapping[str, Row], data_dir: str, paths: Sequence[str]) -> list[Row] | None:
    """The row of each file in `shards`; None if a file is not listed. See `check_sizes`."""
    rows = [shards[name] for name in _names(data_dir, paths) if name in shards]
    return rows if len(rows) == len(paths) else None


def _names(data_dir: str, paths: Sequence[str]) -> list[str]:
    folder = data_dir.rstrip("/") + "/"
    return [path.removeprefix(folder) for path in paths]


@dataclasses.dataclass(frozen=True)
class DataManifest:
    """`class_names[i]` is the name of label i + 1; `shards` is {name: examples}.

    `by_class` has the examples of each class, by the set of the names of a split's files, unless
    an example may have several classes.

    Images with boxes also have `category_ids[i]`, the annotations' id of label i + 1, and
    `boxes[split][k]`, the number of images with k boxes, and `image_ids` of the validation images
    in the order of the records, or (). Those with masks also have `upright[split]`, whether each
    is higher than wide, and of the training images `single_boxes[k]`, the number of those with k
    boxes that are no crowds, and `only_crowds`, the numbers of the records with crowds alone.
    """

    class_names: tuple[str, ...]
    shards: dict[str, int]
    category_ids: tuple[int, ...] = ()
    boxes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    image_ids: tuple[int, ...] = ()
    labels: str = "one"  # of a photo; or "several", which may be none
    by_class: Mapping[frozenset[str], tuple[int, ...]] = dataclasses.field(default_factory=dict)
    upright: Mapping[str, tuple[bool, ...]] = dataclasses.field(default_factory=dict)
    single_boxes: tuple[int, ...] = ()
    only_crowds: tuple[int, ...] = ()
    groups: bool = True  # False: no record has the name of a group

    def counts(self, data_dir: str, paths: Sequence[str]) -> tuple[int, ...] | None:
        """Examples in each file; None if a file is not listed."""
        counts = listed_rows(self.shards, data_dir, paths)
        return None if counts is None else tuple(counts)

    def class_counts(self, data_dir: str, paths: Sequence[str]) -> tuple[int, ...] | None:
        """Examples of each class in the files of a split; None if they are not listed as one."""
        return self.by_class.get(frozenset(_names(data_dir, paths)))


def load(data_dir: str) -> DataManifest | None:
    """The data manifest of a folder, local or gs://; None if it has none."""
    data = read_bytes(data_dir)
    return None if data is None else parse(data, str(epath.Path(data_dir) / FILE_NAME))


def parse(data: bytes, path: str) -> DataManifest:
    """The data manifest in the bytes of the file `path`; DataError if it has another form."""
    try:
        content = parse_json(data)
        classes = sorted(content["classes"], key=lambda row: row["label"])
        labels = [row["label"] for row in classes]
        if labels != [*range(1, len(labels) + 1)] or len(labels) != content["num_label_classes"]:
            raise ValueError("its labels do not count from 1")
        splits = content["splits"]
        shards = [row for split in splits.values() for row in split["shards"]]
        boxes = {name: split.get("boxes", {}) for name, split in splits.items()}
        by_class = {
            frozenset(row["name"] for row in split["shards"]): counts
            for name, split in splits.items()
            if sum(counts := tuple(int(row.get(name, 0)) for row in classes))
            == sum(int(row["examples"]) for row in split["shards"])
        }
        return DataManifest(
            class_names=tuple(row["name"] for row in classes),
            shards={row["name"]: int(row["examples"]) for row in shards},
            labels=str(content.get("labels", "one")),
            by_class=by_class,
            category_ids=tuple(int(row["id"]) for row in classes if "id" in row),
            boxes={key: tuple(map(int, rows.get("per_image", ()))) for key, rows in boxes.items()},
            image_ids=tuple(map(int, splits.get("val", {}).get("image_ids", ()))),
            upright={key: _bits(split) for key, split in splits.items() if "upright" in split},
            single_boxes=tuple(map(int, boxes.get("train", {}).get("single_per_image", ()))),
            only_crowds=tuple(map(int, boxes.get("train", {}).get("only_crowds", ()))),
            groups=bool(content.get("settings", {"group": True}).get("group")),
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise form_error(path, error) from error


def _bits(split: Mapping[str, Any]) -> tuple[bool, ...]:
    """A bit for each record of a split, from the hexadecimal digits "upright"."""
    bits = "".join(f"{int(digit, 16):04b}" for digit in split["upright"])
    count = sum(int(row["examples"]) for row in split["shards"])
    if not 0 <= len(bits) - count < 8:
        raise ValueError(f"{len(bits)} bits 'upright' for {count} records")
    return tuple(bit == "1" for bit in bits[:count])
