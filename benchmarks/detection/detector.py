"""The base of both detectors: data in COCO's format, COCO's score, and weights of a ResNet."""

import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from benchmarks.base import Group, HostBatch, Identity, Spec, Target, distinct
from benchmarks.detection import coco, records, tiles, weights
from benchmarks.detection.scoring import NAMES, Scorer, headline
from benchmarks.detection.settings import Data, Settings
from benchmarks.records import RecordBenchmark, RecordFiles, Source, labels_and_groups
from common.data import data_manifest, files
from common.data.decoding import Reader
from common.errors import ConfigError, DataError, count
from common.images import pixels
from common.tensorflow import tensorflow

_log = logging.getLogger("tpu_suite")
_OBJECTS = 16  # in an image of a fake batch, at most
_FROZEN = "bn_statistics='frozen' keeps the BatchNorm"
Leaves = dict[str, tuple[tuple[int, ...], Any]]  # name -> (shape of an example, dtype)
# The sizes of COCO 2017; training images with boxes.
COCO = {"train": 117_266, "eval": 5_000, "classes": 80}


def restored(values: dict[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a checkpoint, with the number of classes that it stores."""
    return {**values, "num_classes": len(x)} if (x := manifest.get("categories")) else values


class Detector(RecordBenchmark[Source]):
    """A benchmark that finds objects in images.

    `predict` returns image_id int32[b] and D detections of each image: score f32[b, D] (0 is
    padding), class int32[b, D] from 1, and boxes f32[b, D, 4] (y0, x0, y1, x1) in pixels of the
    original.
    """

    settings: Any  # a subclass of `Settings`
    library: Any = None  # the module of the other library's names, see `detection.weights`
    unit = "images"
    nominal_sizes = COCO
    scores_in_background = True  # COCO's score of 5,000 images takes about 4 minutes
    input_advice = {
        "reading": "move the records closer (a bucket of this region, a faster disk), or raise "
        "--config.input_streams",
        "decoding": "use a machine with more CPU cores, or store smaller images",
    }
    reads_masks = False  # whether objects need outlines, to train and to evaluate
    image_key = "image_size"  # the config's key that decides how large the images of a batch are

    def __init__(self, settings: Settings, cache_dir: str):
        super().__init__()
        self.settings, self.cache_dir = settings, cache_dir
        self.targets = (Target("mAP", settings.detection.target),)
        rate, groups = settings.tuning.head_learning_rate, self.groups
        heads = {name: Group(group.decayed, rate * group.rate) for name, group in groups.items()}
        self.groups = {**groups, **{f"head {name}": group for name, group in heads.items()}}

    # Data.

    @property
    def keys(self) -> Data:
        return self.settings.data

    @property
    def image_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of the images in each kind of batches."""
        raise NotImplementedError

    def extra_leaves(self, split: str) -> Leaves:
        """The leaves of batches that only this detector has."""
        raise NotImplementedError

    def batch_spec(self, split: str, batch_size: int) -> tuple[Spec, ...]:
        leaves: Leaves = {"id": ((), np.int32), **self.extra_leaves(split)}
        if split == "train":
            count = self.settings.images.max_boxes
            leaves |= {"boxes": ((count, 4), np.float32), "classes": ((count,), np.int32)}
        else:
            leaves |= {"image_id": ((), np.int32), "mask": ((), np.float32)}
        kinds = [{"image": (shape, np.uint8), **leaves} for shape in self.image_shapes]
        return tuple(
            {k: jax.ShapeDtypeStruct((batch_size, *s), d) for k, (s, d) in kind.items()}
            for kind in kinds
        )

    @functools.cached_property
    def annotations(self) -> coco.Annotations:
        """The categories and the true boxes of the evaluation."""
        keys, key = self.keys, "eval_annotations"
        what = "annotations in COCO's form, which the score reads,"
        path = files.find_one(keys.data_dir, keys.eval_annotations, what, key)
        annotations = coco.Annotations.load(path, self.reads_masks)
        if keys.class_numbers == "ids":
            if 0 < keys.num_classes < (last := annotations.categories[-1][0]):
                raise ConfigError(
                    f"config.num_classes={keys.num_classes} with config.class_numbers='ids', but "
                    f"{path} has a category of id {last}"
                )
        elif keys.num_classes not in (0, count := len(annotations.categories)):
            raise ConfigError(
                f"config.num_classes={keys.num_classes}, but {path} has {count} categories: give "
                "the data of the model, or train a new head on these with --config.num_classes=0"
            )
        return annotations

    @functools.cached_property
    def categories(self) -> tuple[tuple[int, str], ...]:
        """(id, name) of each class in order; "" for one that the data do not have."""
        return self.numbered(self.annotations.categories)

    def numbered(self, known: tuple[tuple[int, str], ...]) -> tuple[tuple[int, str], ...]:
        """(id, name) of each class, from the (id, name) of the data's categories, sorted by id."""
        if self.keys.class_numbers == "order":
            return known
        names = dict(known)
        count = self.keys.num_classes or known[-1][0]
        return tuple((number, names.get(number, "")) for number in range(1, count + 1))

    def open_records(self, where: RecordFiles) -> Any:
        """The images of a split, a `records.Source`; evaluation needs all annotated ones."""
        annotations, max_boxes = self.annotations, self.settings.images.max_boxes
        ids = tuple(category for category, _ in annotations.categories)
        more = self.reads_masks, self.keys.empty_images
        source = records.open_records(where, ids, max_boxes, *more)
        if self.keys.class_numbers == "ids":
            numbers = tuple(number for number, _ in self.categories)
            source = dataclasses.replace(source, category_ids=numbers)
        ids = set(annotations.image_ids.tolist())
        if where.split == "eval" and (odd := ids ^ set(source.image_ids)):
            side = "the annotations" if min(odd) in ids else "the records"
            raise DataError(
                f"the eval records ({source.shards.paths[0]} ...) and the annotations "
                f"({annotations.path}) differ in {len(odd):,} images, such as the id {min(odd)}, "
                f"which only {side} have: they must be of one data set, and complete"
            )
        return source

    def strata(self, source: Any) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The groups of images that belong together; an image has objects of several classes."""
        folder, paths = self.keys.data_dir, source.shards.paths
        content = data_manifest.load(folder)
        if content and not content.groups and content.counts(folder, paths):
            return None, None
        return labels_and_groups(source.shards, f"{self.cache_dir}/groups.json")

    @functools.cached_property
    def parts(self) -> tiles.Parts | None:
        """What the images to evaluate are cut into, by config.eval_tiles; None if they are not."""
        tile = self.settings.detection.eval_tiles
        if not (side := self.settings.images.side if tile == "auto" else tile):
            return None
        parts = tiles.Parts(self.annotations, side)
        cut, made = int(np.sum(parts.counts > 1)), len(parts.windows) - len(parts.counts)
        what = f"{count(cut, 'image')} of {len(parts.counts):,} in {count(made, 'tile')}"
        what = what if cut else "no image to evaluate is larger, so that none is cut"
        _log.info("NOTE config.eval_tiles=%s, tiles of %d pixels: %s", tile, side, what)
        return parts

    @property
    def eval_rows(self) -> int:
        return len(self.parts.windows) if self.parts else super().eval_rows

    def eval_batches(self, batch_size: int, shard: int, num_shards: int) -> Iterator[HostBatch]:
        source, shares = self.source("eval"), (batch_size, shard, num_shards)
        if self.parts is None:
            return self.image_batches(source, *shares)
        uses: Any = self.uses
        return self.parts.batches(source, uses, len(self.image_shapes), *shares)

    def image_batches(
        self, source: Source, batch_size: int, shard: int, num_shards: int
    ) -> Iterator[HostBatch]:
        """`eval_batches` of complete images."""
        raise NotImplementedError

    def decode_all(self, source: Any) -> None:
        def decode(serialized: Any, only_jpeg: bool) -> dict[str, Any]:
            image = records.read_image(serialized)
            decoded = pixels.decode(image.encoded, only_jpeg=only_jpeg)
            size = tensorflow().shape(decoded)[:2]
            return {"size": image.checked(size, size)}

        Reader(source.shards, pixels.jpegs_first(decode), source.check).decode_all()

    def data_warnings(self, split: str) -> list[coco.Finding]:
        return coco.oddities(self.annotations) if split == "eval" else []

    @functools.cached_property
    def classes(self) -> int:
        """The config's number of classes, else the data's, else COCO's 80."""
        if self.keys.num_classes or not self.keys.data_dir:
            return self.keys.num_classes or COCO["classes"]
        return len(self.categories)

    @property
    def metadata(self) -> dict[str, Any]:
        return {"categories": [list(category) for category in self.categories]}

    def identity(self, split: str) -> Identity:
        meaning, content = self.metadata, super().identity(split).content
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

    def fake_batch(self, spec: Spec, draw: np.random.Generator) -> HostBatch | None:
        """Noise with up to 16 objects in an image; their masks fill their boxes."""
        if "boxes" not in spec:
            return None
        rows, most, _ = spec["boxes"].shape
        shape, image = (rows, min(most, _OBJECTS)), spec["image"].shape
        centres, sides = draw.uniform(0.25, 0.75, (*shape, 2)), draw.uniform(0.1, 0.5, (*shape, 2))
        boxes = np.concatenate([centres - sides / 2, centres + sides / 2], -1)
        batch = {
            "image": draw.integers(0, 256, image, np.uint8),
            "classes": draw.integers(1, self.classes + 1, shape),
        }
        if "size" in spec:  # pixels, of images in blocks of 2 x 2
            height, width = 2 * image[1], 2 * image[2]
            boxes *= (height, width) * 2
            batch["size"] = np.tile((height, width), (rows, 1))
            batch["masks"] = np.full(spec["masks"].shape, 255)
        padding = ((0, 0), (0, most - shape[1]))
        return batch | {
            "classes": np.pad(batch["classes"], padding),
            "boxes": np.pad(boxes, (*padding, (0, 0))),
        }

    # Model and score.

    def adopt(self, params: Any, model_state: Any, loaded: Any) -> tuple[Any, Any]:
        own = self.settings, self.library, super().adopt
        return weights.adopt(*own, params, model_state, loaded)

    @property
    def keeps_statistics(self) -> bool:
        """Whether training uses BatchNorm's running statistics and never updates them."""
        return self.settings.tuning.bn_statistics == "frozen"

    def check_random_start(self, norm_examples: int) -> None:
        del norm_examples
        new = self.settings.tuning.new_classes
        if new or self.keeps_statistics:
            kept = "new_classes=True keeps the body" if new else _FROZEN
            raise ConfigError(
                f"config.{kept} of config.init_from, which names no model: give "
                f"--config.init_from={self.published}, or the workdir of a detector or a ResNet; "
                "or, to train from random weights, --config.new_classes=False "
                "--config.bn_statistics=batch --config.freeze="
            )

    @functools.cached_property
    def scorer(self) -> Scorer:
        """The scorer, which also has the detections in COCO's format."""
        return Scorer(self.annotations, self.keys.class_numbers == "ids", self.parts)

    def score(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        return self.scorer.score(rows)

    def group_scores(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, tuple[float, int]]:
        """COCO's AP of the boxes of each category that has objects to find, and their number."""
        ap = self.scorer.quality(self.scorer.columns(rows)).ap
        present, truth = np.flatnonzero(ap >= 0).tolist(), self.annotations
        categories, objects = (
            [truth.categories[k] for k in present],
            truth.category_ids[~truth.crowd],
        )
        counts = (int(np.sum(objects == number)) for number, _ in categories)
        scores = zip(ap[present].tolist(), counts, strict=True)
        return dict(zip(distinct(categories), scores, strict=True))

    @property
    def score_names(self) -> tuple[str, ...]:
        return NAMES

    def headline(self, scores: Mapping[str, float]) -> Mapping[str, float]:
        return headline(scores)
