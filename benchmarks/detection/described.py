"""Opens records as the data manifest in their folder describes them, without a scan."""

from __future__ import annotations

import numpy as np

from benchmarks.detection.records import Source
from ops.images import manifest
from ops.shards import Shards


def read(
    data_dir: str, paths: tuple[str, ...], category_ids: tuple[int, ...], split: str
) -> tuple[Source, np.ndarray, int] | None:
    """As `scanning.read`; None without a manifest of these data, or if training images lack a box.

    Arguments are those of `opening.open_records`.
    """
    content = manifest.load(data_dir) if data_dir else None
    if not content or content.category_ids != category_ids:
        return None
    counts, images = content.counts(data_dir, paths), content.boxes.get("train")
    if not counts:
        return None
    if split == "eval":
        is_complete = len(content.image_ids) == sum(counts)
    else:
        is_complete = bool(images) and not images[0] and sum(counts) == sum(images)
    if not is_complete:
        return None
    ids = content.image_ids if split == "eval" else ()
    return Source(Shards(paths, counts), category_ids, ids), np.array(images), 0
