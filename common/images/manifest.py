"""What a folder of images holds: its data manifest, and images that it has several times.

The data manifest is manifest.json, which preparations write into a folder of records. It holds the
classes and the number of records of each file, so that a run need not count them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from etils import epath

from common.data import files
from common.data.files import MANIFEST
from common.errors import parse_json

_SHOWN_GROUPS = 3  # groups of equal images that a line names
_KINDS_OF_REPEATS = (
    "under two labels, of which one is wrong",
    "in both splits, so that the score counts what was trained on",
    "several times in one split",
)


@dataclasses.dataclass(frozen=True)
class DataManifest:
    """`class_names[i]` is the name of label i + 1; `shards` is {name: examples}.

    Images with boxes also have `category_ids[i]`, the annotations' id of label i + 1, and
    `boxes[split][k]`, the number of images with k boxes, and `image_ids` of the validation images
    in the order of the records, or ().
    """

    class_names: tuple[str, ...]
    shards: dict[str, int]
    category_ids: tuple[int, ...] = ()
    boxes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    image_ids: tuple[int, ...] = ()

    def counts(self, data_dir: str, paths: Sequence[str]) -> tuple[int, ...] | None:
        """Examples in each file; None if a file is not listed."""
        counts = files.listed_rows(self.shards, data_dir, paths)
        return None if counts is None else tuple(counts)


def load(data_dir: str) -> DataManifest | None:
    """The data manifest of a folder, local or gs://; None if it has none."""
    data = files.read_manifest(data_dir)
    return None if data is None else parse(data, str(epath.Path(data_dir) / MANIFEST))


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
        boxes = {
            name: split.get("boxes", {}).get("per_image", ()) for name, split in splits.items()
        }
        return DataManifest(
            tuple(row["name"] for row in classes),
            {row["name"]: int(row["examples"]) for row in shards},
            tuple(int(row["id"]) for row in classes if "id" in row),
            {name: tuple(map(int, counts)) for name, counts in boxes.items()},
            tuple(map(int, splits.get("val", {}).get("image_ids", ()))),
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise files.foreign_manifest(path, error) from error


def repeated_images(
    digests: np.ndarray,
    labels: np.ndarray,
    splits: np.ndarray,
    name: Callable[[int], str],
) -> list[str]:
    """A line for each kind of images that occur several times, the worst kind first.

    The arrays are [n]; equal images have equal digests. `name(i)` describes the i-th image, for the
    few that a line names.
    """
    _, number, counts = np.unique(digests, return_inverse=True, return_counts=True)
    repeated = np.flatnonzero(counts[number] > 1)
    order = repeated[np.argsort(number[repeated], kind="stable")]
    kinds: dict[str, list[np.ndarray]] = {kind: [] for kind in _KINDS_OF_REPEATS}
    for group in np.split(order, np.flatnonzero(np.diff(number[order])) + 1) if len(order) else ():
        kind = 0 if np.ptp(labels[group]) else 1 if len(set(splits[group])) > 1 else 2
        kinds[_KINDS_OF_REPEATS[kind]].append(group)
    return [
        f"{len(groups):,} {'image is' if len(groups) == 1 else 'images are'} there {kind}: "
        + "; ".join(" = ".join(map(name, group.tolist()[:4])) for group in groups[:_SHOWN_GROUPS])
        + (f"; and {len(groups) - _SHOWN_GROUPS:,} more" if len(groups) > _SHOWN_GROUPS else "")
        for kind, groups in kinds.items()
        if groups
    ]
