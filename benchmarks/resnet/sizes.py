"""Training images whose size depends on the step: what the benchmark says of its run's stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import input_pipeline
from benchmarks.base import Spec
from benchmarks.hints import Stage
from benchmarks.resnet.tuning import Tunable
from ops.images.input_spec import InputSpec
from ops.images.sizes import Sizes, fault

# CPU time per training image, fitted to the rows of docs/performance.md at 128, 160 and 224 pixels:
# (for each image, for each of its pixels after resizing).
_MICROSECONDS = {"exact": (1500.0, 0.018), "fast": (1430.0, 0.0077)}
_MICROSECONDS_CACHED = 230.0  # for an image of 256 x 256 pixels in memory


class Sized(Tunable):
    """A classifier whose settings have the keys `image_sizes`, `image_size` and `eval_image_size`.

    Attributes:
      sizes: the size of the training images at each step; None where it is always `image_size`.
    """

    def __init__(self, settings: Any, cache_dir: str):
        super().__init__(settings, cache_dir)
        self._planned: Sizes | None = None

    @property
    def sizes(self) -> Sizes | None:
        if self.settings.image_sizes and not self._planned:
            raise RuntimeError("image_sizes are parts of a run: its length must be planned first")
        return self._planned

    def planned(self, total_steps: int) -> None:
        if pairs := self.settings.image_sizes:
            self._planned = Sizes.plan(pairs, total_steps)

    def stages(self) -> tuple[Stage, ...]:
        if not (sizes := self.sizes):
            return ()
        sides = train_sizes(self.settings)
        return tuple(Stage(f"{side} pixels", sizes.steps(side)) for side in sides)

    def input_rates(self) -> tuple[Mapping[str, float], ...]:
        """The figures of docs/performance.md, for JPEGs of 500 x 375 pixels and 110 KB."""
        if self.settings.dataset == "fake":
            return ()
        cache = self.settings.decoded_cache or 256
        cached = {f"decoded_cache={cache}": 1e6 / (_MICROSECONDS_CACHED * (cache / 256) ** 2)}
        costs = _MICROSECONDS.items()
        return tuple(
            {mode: 1e6 / (image + pixel * side**2) for mode, (image, pixel) in costs} | cached
            for side in train_sizes(self.settings)
        )

    @property
    def input_spec(self) -> InputSpec:
        """How an image becomes what the model expects, at the size of evaluation."""
        return self.settings.spec

    def batch_spec(self, split: str, batch_size: int) -> tuple[Spec, ...]:
        cached = self.settings.decoded_cache if split == "train" else 0
        is_weighted = split == "train" and self.settings.class_weights

        def spec(size: int, window: str) -> Spec:
            side = cached or size
            shapes = {"image": ((side, side, 3), np.uint8), "label": ((), np.int32)}
            shapes |= {"id": ((), np.int32)}
            shapes |= {window: ((4,), np.float32)} if cached else {}
            shapes |= {"weight": ((), np.float32)} if is_weighted else {}
            shapes |= {"flip": ((), np.bool_)} if split == "train" else {"mask": ((), np.float32)}
            return {k: jax.ShapeDtypeStruct((batch_size, *s), d) for k, (s, d) in shapes.items()}

        if split == "eval":
            return (spec(self.input_spec.size, ""),)
        if not self.settings.image_sizes:
            return (spec(self.settings.image_size, "window"),)
        sides = train_sizes(self.settings)
        return tuple(spec(side, input_pipeline.window_name(side)) for side in sides)

    def host_bytes(
        self, split: str, batch_size: int, num_shards: int
    ) -> dict[tuple[str, ...], int]:
        """Eight batches; to train, three blocks of records per stream or all decoded images."""
        cache = self.settings.decoded_cache if split == "train" else 0
        key = "decoded_cache" if cache else self.size_key(split)
        largest = max(spec["image"].size for spec in self.batch_spec(split, 1))
        batches = {(f"{split}_batch_size", key): 8 * batch_size * largest // num_shards}
        if split == "eval":
            return batches
        if cache:
            decoded = self.num_examples("train") * largest // num_shards
            return batches | {("decoded_cache",): decoded}
        return batches | {("shuffle_buffer_size",): self.held_bytes(num_shards)}

    def size_key(self, split: str) -> str:
        """The key that decides the size of a split's images."""
        key = "image_sizes" if split == "train" else "eval_image_size"
        return key if getattr(self.settings, key) else "image_size"

    def notes(self, norm_examples: int, evaluating: bool) -> list[str]:
        notes = super().notes(norm_examples, evaluating)
        if sizes := self.sizes:
            pairs = zip(sizes.pixels[1:], sizes.starts[1:], strict=True)
            later = "".join(f", {side} from step {start + 1:,}" for side, start in pairs)
            notes.append(f"training images have {sizes.pixels[0]} pixels{later}")
        return notes


def train_sizes(settings: Any) -> tuple[int, ...]:
    """All sizes of the training images, each once, in the order in which they come."""
    sides = (int(side) for _, side in settings.image_sizes)
    return tuple(dict.fromkeys(sides)) or (settings.image_size,)


def size_remedies(settings: Any) -> dict[str, str]:
    """A remedy for each key with a size that cannot work."""
    if wrong := fault(settings.image_sizes):
        return {"image_sizes": wrong}
    remedies, largest = {}, max(train_sizes(settings))
    if settings.space_to_depth:
        keys = {key: [getattr(settings, key)] for key in ("image_size", "eval_image_size")}
        keys["image_sizes"] = [side for _, side in settings.image_sizes]
        odd = [key for key, sides in keys.items() if any(side % 2 for side in sides)]
        remedies = dict.fromkeys(odd, "must be even for space_to_depth")
    if settings.decoded_cache and settings.dataset == "fake":
        remedies["decoded_cache"] = "dataset='fake' has nothing to decode"
    elif 0 < settings.decoded_cache < largest:
        remedies["decoded_cache"] = f"use 0, or {largest}, the images' largest size, or more"
    return remedies
