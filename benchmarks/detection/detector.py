"""What the detectors share: data in COCO's form, COCO's score, a ResNet to begin with."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.base import HostBatch
from benchmarks.detection import coco, records
from benchmarks.hints import Identity
from benchmarks.sharded import Sharded
from errors import ConfigError, DataError
from ops import files

if TYPE_CHECKING:
    from benchmarks.uses import Uses

COCO = {"train": 117_266, "eval": 5_000, "classes": 80}  # of 2017; training images with boxes

# The models besides a detector's own that config.init_from may name: see `benchmarks.settling`.
FOLLOWS = ("resnet",)


def check_followed(config: Any, values: Mapping[str, Any]) -> list[str]:
    """`backbone.check`, for `benchmarks.settling.settle`."""
    from benchmarks.detection import backbone

    return backbone.check(config, values)


class Detector(Sharded):
    """A benchmark that finds objects in images.

    Beside the keys of `Sharded`, its settings have `data_dir`, the patterns of its files, the
    numbers of images and classes, `max_boxes`, and `resnet_stages` and `num_filters` of the
    parameters in "backbone". `predict` returns image_id int32[b], and of the detections score
    f32[b, D] (0 is padding), class int32[b, D] from 1 and boxes f32[b, D, 4] (y0, x0, y1, x1) in
    pixels of the original. If `batch_spec` has two shapes, the first is for images that are at
    least as wide as high, the second for the others, and batches to evaluate come with the leaves
    size and original float32[h, 2]: height and width of the image without padding and when it was
    not yet resized.
    """

    unit = "images"
    scores_in_background = True  # COCO's score of 5,000 images takes about 4 minutes
    advice = {
        "reading": "move the records closer (a bucket of this region, a faster disk), or raise "
        "--config.input_streams",
        "decoding": "use a machine with more CPU cores, or store smaller images",
    }
    reads_masks = False  # whether objects need outlines, to train and to evaluate
    image_key = "image_size"  # the config's key that decides how large the images of a batch are

    def __init__(self, settings: Any, cache_dir: str):
        self.settings, self._cache_dir = settings, cache_dir
        self._last: tuple[list[Any], dict[str, np.ndarray]] = [], {}

    @property
    def adopted(self) -> str:
        """The models whose workdirs `adopt` takes, in words."""
        settings = self.settings
        return (
            "--config=configs/resnet50.py (or the ResNet that config.resnet_stages="
            f"{settings.resnet_stages} and config.num_filters={settings.num_filters} describe)"
        )

    # Data.

    @functools.cached_property
    def annotations(self) -> coco.Annotations:
        """The true boxes of the evaluation, and with them the categories."""
        settings, key = self.settings, "eval_annotations"
        path = files.find_one(settings.data_dir, settings.eval_annotations, "annotations", key)
        annotations = coco.Annotations.load(path, self.reads_masks)
        if settings.num_classes not in (0, count := len(annotations.categories)):
            raise ConfigError(
                f"config.num_classes={settings.num_classes}, but {path} has {count} "
                "categories: leave it at 0, which takes the number of the data"
            )
        return annotations

    @functools.cached_property
    def _train(self) -> records.Source:
        return self._open("train", self.settings.train_files)

    @functools.cached_property
    def _eval(self) -> records.Source:
        source = self._open("eval", self.settings.eval_files)
        annotations, ids = self.annotations, set(self.annotations.image_ids.tolist())
        if odd := ids ^ set(source.image_ids):
            records_path, odd_one = source.shards.paths[0], min(odd)
            side = "the annotations" if odd_one in ids else "the records"
            raise DataError(
                f"the eval records ({records_path} ...) and the annotations ({annotations.path}) "
                f"differ in {len(odd):,} images, such as the id {odd_one}, which only {side} have: "
                "they must be of one data set, and complete"
            )
        return source

    def _open(self, split: str, patterns: str) -> records.Source:
        settings = self.settings
        source = records.open_records(
            settings.data_dir,
            patterns,
            tuple(category for category, _ in self.annotations.categories),
            settings.max_boxes,
            f"{self._cache_dir}/{split}.json",
            split,
            masks=self.reads_masks,
            by_orientation=len(self.batch_spec(split, 1)) > 1,
        )
        self.check_declared(split, source.shards)
        return source

    @functools.cached_property
    def _classes(self) -> int:
        """The config's number of classes, else the data's, else COCO's 80."""
        settings = self.settings
        if settings.num_classes or not settings.data_dir:
            return settings.num_classes or COCO["classes"]
        return len(self.annotations.categories)

    def source(self, split: str) -> records.Source:
        return self._train if split == "train" else self._eval

    def nominal_examples(self, split: str) -> int:
        return self.declared_examples(split) or COCO[split]

    @property
    def metadata(self) -> dict[str, Any]:
        return {"categories": [list(category) for category in self.annotations.categories]}

    def identity(self, split: str) -> Identity:
        meaning, (_, content) = self.metadata, super().identity(split)
        if split == "eval":
            content = {**content, "annotations": f"SHA-256 {self.annotations.digest[:16]}"}
        return Identity(meaning, content)

    def host_bytes(
        self, split: str, batch_size: int, num_shards: int
    ) -> dict[tuple[str, ...], int]:
        """Eight batches; to train, three blocks of records per stream as well."""
        specs = self.batch_spec(split, batch_size)
        largest = max(sum(x.size * x.dtype.itemsize for x in spec.values()) for spec in specs)
        batches = {(f"{split}_batch_size", self.image_key): 8 * largest // num_shards}
        if split == "eval":
            return batches
        return batches | {("shuffle_buffer_size",): self.held_bytes(num_shards)}

    def first_batches(self, batch_size: int) -> list[HostBatch]:
        """The first batch to evaluate of each shape."""
        return [next(self.eval_batches(batch_size, 0, 1))]

    # Model and score.

    def adopt(self, params: Any, model_state: Any, loaded: Any) -> tuple[Any, Any]:
        """Takes the arrays of another such detector, or those of a ResNet for the backbone.

        Raises:
          CheckpointError: an array of the backbone is missing or of another shape.
        """
        from benchmarks.detection import backbone

        loaded = backbone.placed(loaded)
        params, model_state = super().adopt(params, model_state, loaded)
        backbone.check_complete(loaded, params, model_state, self.adopted)
        return params, model_state

    def score(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        """COCO's average precisions and recalls of the boxes."""
        return coco.score(self.annotations, self.columns(rows))

    def headline(self, scores: Mapping[str, float]) -> Mapping[str, float]:
        """The average precisions, without those of sizes that no object has."""
        return {name: scores[name] for name in coco.PRECISIONS if scores[name] >= 0}

    def columns(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The detections of all images as `coco.score` takes them.

        Those of the last rows are kept, because --mode=eval scores and then shows the same ones.
        """
        every = list(rows)
        known, columns = self._last
        if [id(score()) for score in known] != [id(row["score"]) for row in every]:
            columns = self._columns(every)
            self._last = [weakref.ref(row["score"]) for row in every], columns
        return columns

    def _columns(self, rows: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        ids = np.asarray([category for category, _ in self.annotations.categories])
        parts = []
        for row in rows:
            image, place = np.nonzero(row["score"] > 0)
            y0, x0, y1, x1 = np.moveaxis(row["boxes"][image, place].astype(np.float64), -1, 0)
            parts.append(
                {
                    "image_id": row["image_id"][image],
                    "category_id": ids[row["class"][image, place] - 1],
                    "score": row["score"][image, place],
                    "bbox": np.stack([x0, y0, x1 - x0, y1 - y0], axis=1),
                }
            )
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}

    def shown(self, batch: Mapping[str, np.ndarray], i: int) -> tuple[np.ndarray, np.ndarray]:
        """An image of a batch to evaluate, uint8[h, w, 3], and the (height, width) of the original.

        The image is without padding.
        """
        return batch["image"][i], batch["size"][i]

    @property
    def uses(self) -> Uses:
        from benchmarks.detection.use import DetectorUses

        return DetectorUses(self)
