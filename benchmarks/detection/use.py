"""What a trained detector can be used for: its detections are drawn and written in COCO's form."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.base import HostBatch
from benchmarks.detection import picture
from benchmarks.uses import Exhibit, Imported, Picture, Uses
from errors import one_line

_DRAWN = 9  # images
_MIN_SCORE = 0.5  # weaker detections would hide the image
_log = logging.getLogger("tpu_suite")


class DetectorUses(Uses):
    """The uses of a detector."""

    hint = "python main.py --mode=eval writes its detections and draws some of them"

    def __init__(self, benchmark: Any):
        """`benchmark` is a `detector.Detector`, which imports this module."""
        self._benchmark = benchmark

    def read_foreign(self, path: str) -> Imported | None:
        """The detector's own checkpoints of other libraries, and the files that a ResNet takes."""
        from benchmarks.detection import weights

        return weights.read(self._benchmark, path)

    def exhibits(self, rows: Iterator[dict[str, np.ndarray]]) -> list[Exhibit]:
        """The first images with their detections; detections.json in COCO's form."""
        columns = self._benchmark.scorer.columns(rows)
        strong = {key: values[columns["score"] >= _MIN_SCORE] for key, values in columns.items()}
        pictures: list[Picture] = []
        files = {"detections.json": to_json(columns)}
        text = (
            "The first images to evaluate, whatever their result: what the model found, and beside "
            f"it the true boxes. Detections with a score below {_MIN_SCORE} are not drawn; "
            "detections.json has all of them."
        )
        try:
            true = self._benchmark.annotations
            examples = [picture.example(*shown, strong, true) for shown in self._first()]
            pictures = [Picture(picture.draw([each]), (), wide=True) for each in examples]
            files["detections.png"] = picture.draw(examples)
        except Exception as error:  # of drawing; the detections are worth more than their picture
            text = f"The detections cannot be drawn: {one_line(error)}."
            _log.warning("no detections.png: it cannot be drawn (%s)", one_line(error))
        return [Exhibit(title="Detections", text=text, pictures=pictures, files=files)]

    def first_batches(self, batch_size: int) -> list[HostBatch]:
        """The first batch to evaluate of each shape."""
        return [next(self._benchmark.eval_batches(batch_size, 0, 1))]

    def shown(self, batch: Mapping[str, np.ndarray], i: int) -> tuple[np.ndarray, np.ndarray]:
        """An image of a batch, uint8[h, w, 3] without padding, and (height, width) at first."""
        return batch["image"][i], batch["size"][i]

    def _first(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """(id, image uint8[h, w, 3], size of the original) of images to draw, of all shapes."""
        kinds = [
            [
                (int(batch["image_id"][i]), *self.shown(batch, i))
                for i in np.flatnonzero(batch["mask"] > 0).tolist()
            ]
            for batch in self.first_batches(_DRAWN)
        ]
        turns = itertools.chain.from_iterable(itertools.zip_longest(*kinds))
        return [shown for shown in turns if shown][:_DRAWN]


def to_json(detections: Mapping[str, Any]) -> bytes:
    """Columns of detections, as `scoring.score` takes them, in COCO's form of results."""
    columns = [np.asarray(detections[key]).tolist() for key in detections]
    rows = [dict(zip(detections, values, strict=True)) for values in zip(*columns, strict=True)]
    return json.dumps(rows).encode()
