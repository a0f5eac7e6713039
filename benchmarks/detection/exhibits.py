"""Shows how good the detections of each class are, and the images with the worst mistakes.

A mistake is an object that pycocotools matches with no detection of its class at an IoU of 0.5 or
more, or a detection that it matches with no object. COCO's score ranks all detections; mistakes
concern those that a user would look at, with a score of `MIN_SCORE` or more.
"""

import dataclasses
import io
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.detection import coco, records
from benchmarks.detection.coco import Annotations
from benchmarks.detection.scoring import Quality
from benchmarks.exhibits import CLASSES, csv_file, percent, thumbnail
from benchmarks.uses import Exhibit, Picture
from common import palette
from common.data import shards
from common.errors import one_line

MIN_SCORE = 0.5
_PICTURES = 9  # the worst images, and the first ones
_SIDE = 480  # pixels of a picture
_NAMED = 5  # mistakes below a picture
_COLUMNS, _INCHES = 3, 4.8  # pairs of images beside each other; the width of an image
_BARE = {"frame_on": False, "xticks": (), "yticks": ()}
_TEXT = {"va": "bottom", "clip_on": True, "parse_math": False}  # $ is a letter
_log = logging.getLogger("tpu_suite")


def show(
    annotations: Annotations, source: Any, detections: Mapping[str, np.ndarray], quality: Quality
) -> list[Exhibit]:
    """The classes, the worst and the first images; detections.json in COCO's form.

    `source` has the `shards` and `image_ids` of the images to evaluate; `detections` are those of
    all scores, in the columns of `scoring.quality`, which has judged their `quality`.
    """
    strong = detections["score"] >= MIN_SCORE
    strong = {key: values[strong] for key, values in detections.items()}
    mistakes, counts = judge(annotations, quality)
    artist = Artist(annotations, source, strong)
    first = _or_fault("Detections", lambda: _first(artist))
    columns = [np.asarray(column).tolist() for column in detections.values()]
    rows = [dict(zip(detections, values, strict=True)) for values in zip(*columns, strict=True)]
    files = {"detections.json": json.dumps(rows).encode(), **first.files}
    return [
        _classes(annotations, quality, counts),
        _or_fault("Worst images", lambda: _worst(artist, mistakes)),
        dataclasses.replace(first, files=files),
    ]


def _or_fault(title: str, make: Callable[[], Exhibit]) -> Exhibit:
    """An exhibit with pictures, or a note if drawing fails, so that the other exhibits stay."""
    try:
        return make()
    except Exception as error:
        _log.warning("%s cannot be drawn (%s)", title, one_line(error))
        return Exhibit(title=title, text=f"The pictures cannot be drawn: {one_line(error)}.")


class Mistake(NamedTuple):
    """An object that was missed, or a false detection."""

    image_id: int
    category: int  # its id
    score: float  # the false detection's score; 0 for a missed object
    cost: float  # a false detection's score; for a missed object, 1 - the score of its match


def judge(annotations: Annotations, quality: Quality) -> tuple[list[Mistake], np.ndarray]:
    """The mistakes, the most costly first, and int64[K, 3]: found, missed, false of each category.

    A detection with a score below `MIN_SCORE` is no mistake; if it matches an object, the missed
    object costs less.
    """
    row_of = {number: row for row, (number, _) in enumerate(annotations.categories)}
    mistakes, counts = [], np.zeros((len(row_of), 3), np.int64)
    for match in quality.matches:
        where = match.image_id, match.category_id
        is_found = match.object_scores >= MIN_SCORE
        false = match.scores[(match.scores >= MIN_SCORE) & ~match.is_matched].tolist()
        counts[row_of[match.category_id]] += is_found.sum(), (~is_found).sum(), len(false)
        missed = match.object_scores[~is_found].tolist()
        mistakes += [Mistake(*where, 0, 1 - score) for score in missed]
        mistakes += [Mistake(*where, score, score) for score in false]
    mistakes.sort(key=lambda mistake: -mistake.cost)
    return mistakes, counts


def _classes(annotations: Annotations, quality: Quality, counts: np.ndarray) -> Exhibit:
    """Average precision and the numbers of mistakes of each category that has an object."""
    scored = np.flatnonzero(quality.ap >= 0)
    ap, ap50, counts = quality.ap[scored], quality.precision[0].mean(axis=0)[scored], counts[scored]
    names = [annotations.categories[row][1] for row in scored]
    objects = counts[:, :2].sum(axis=1)
    rows, table = [], []
    for k in np.argsort(ap, kind="stable").tolist():
        numbers = counts[k].tolist()
        table.append([names[k], objects[k], f"{ap[k]:.6f}", f"{ap50[k]:.6f}", *numbers])
        shares = percent(float(ap[k])), percent(float(ap50[k]))
        rows.append([names[k], f"{objects[k]:,}", *shares, *(f"{n:,}" for n in numbers)])
    rows = rows[:CLASSES]
    if len(scored):
        shares = percent(ap.mean()), percent(ap50.mean())
        totals = [f"{n:,}" for n in counts.sum(axis=0).tolist()]
        rows.append(["mean over classes", f"{objects.sum():,}", *shares, *totals])
    head = ["class", "objects", "AP", "AP50", "found", "missed", "false"]
    several = len(scored) > CLASSES
    many = f"The {CLASSES} worst of {len(scored):,} classes" if several else "All classes"
    return Exhibit(
        title="Classes",
        text=f"{many}, the lowest average precision of boxes first. AP is COCO's, the mean over "
        f"IoU thresholds from 0.5 to 0.95; AP50 is that at 0.5. The numbers of objects found and "
        f"missed and of false detections are those at a score of {MIN_SCORE} or more.",
        columns=head,
        rows=rows,
        has_mean=True,
        files={"per_class.csv": csv_file(head, table)},
    )


class Photo(NamedTuple):
    """An image to draw detections on."""

    image_id: int
    pixels: np.ndarray  # uint8[h, w, 3], in any size
    size: np.ndarray  # (height, width) of the original image in pixels


@dataclasses.dataclass(frozen=True)
class Artist:
    """Draws each image twice, with the detections and with the true boxes."""

    annotations: Annotations
    source: Any  # the images, with `shards` and `image_ids`
    detections: Mapping[str, np.ndarray]  # with outlines, the true ones are drawn, too

    def photos(self, image_ids: Sequence[int]) -> list[Photo]:
        """Reads images and shrinks them."""
        truth = self.annotations
        size_of = dict(zip(truth.image_ids.tolist(), truth.sizes, strict=True))
        example_of = {image_id: i for i, image_id in enumerate(self.source.image_ids)}
        examples = [example_of[image_id] for image_id in image_ids]
        photos, found = [], shards.read_some(self.source.shards, examples)
        for image_id, record in zip(image_ids, found, strict=True):
            pixels = thumbnail(records.read_image(record).encoded, _SIDE)
            photos.append(Photo(image_id, np.asarray(pixels), size_of[image_id]))
        return photos

    def draw(self, photos: Sequence[Photo], form: str = "jpeg") -> bytes:
        """A JPEG or "png" with a pair of images for each photo."""
        from matplotlib.figure import Figure  # takes a second to import

        columns = min(_COLUMNS, len(photos))
        rows = -(-len(photos) // columns)
        highest = _INCHES * min(3, max(photo.size[0] / photo.size[1] for photo in photos))
        size = 2 * columns * _INCHES, rows * (highest + 0.4)
        figure, file = Figure(figsize=size, layout="constrained"), io.BytesIO()
        axes = figure.subplots(rows, 2 * columns, squeeze=False, subplot_kw=_BARE)
        for photo, left, right in zip(photos, axes.flat[::2], axes.flat[1::2], strict=False):
            is_here = self.detections["image_id"] == photo.image_id
            detections = {key: values[is_here] for key, values in self.detections.items()}
            self._draw_objects(left, photo, detections)
            self._draw_objects(right, photo, self._true(photo))
        figure.savefig(file, format=form, dpi=100)
        return file.getvalue()

    def _true(self, photo: Photo) -> dict[str, Any]:
        """The true objects of a photo, in the same columns as detections."""
        truth = self.annotations
        rows = np.flatnonzero(truth.image_ids[truth.rows] == photo.image_id)
        objects: dict[str, Any] = {"bbox": truth.boxes[rows]}
        objects["category_id"] = truth.category_ids[rows]
        if "segmentation" in self.detections:
            objects["segmentation"] = [truth.outlines[row] for row in rows]
        return objects

    def _draw_objects(self, axis: Any, photo: Photo, objects: Mapping[str, Any]) -> None:
        """Draws a photo with outlines and boxes, in one colour for each category."""
        from matplotlib.patches import Rectangle

        height, width = map(int, photo.size)
        axis.set_title(f"image {photo.image_id}: {'found' if 'score' in objects else 'true'}")
        axis.imshow(photo.pixels, extent=(0, width, height, 0))
        names = dict(self.annotations.categories)
        categories = [int(category) for category in objects["category_id"]]
        overlay = np.zeros((height, width, 4), np.uint8)  # one, as there may be 1,000 objects
        for outline, category in zip(objects.get("segmentation", ()), categories, strict=False):
            mask = coco.outline_mask(outline, height, width).astype(bool)
            overlay[mask] = [*bytes.fromhex(palette.CLASSES[category % 6][1:]), 140]
        axis.imshow(overlay, extent=(0, width, height, 0))
        # Names of small objects are small, or they would hide others.
        room = 72 * _INCHES / width * float(np.median([w for *_, w, _ in objects["bbox"]] or 0))
        style = {**_TEXT, "fontsize": min(max(room / 8, 4), 9)}
        for i, (category, (x, y, w, h)) in enumerate(zip(categories, objects["bbox"], strict=True)):
            colour, text = palette.CLASSES[category % 6], names[category]
            text += f" {objects['score'][i]:.0%}" if "score" in objects else ""
            axis.add_patch(Rectangle((x, y), w, h, fill=False, color=colour, linewidth=1.5))
            ink = "white" if colour in palette.DARK else "black"
            axis.text(x, y, text, color=ink, bbox={"fc": colour, "ec": "none", "pad": 0.8}, **style)


def _worst(artist: Artist, mistakes: Sequence[Mistake]) -> Exhibit:
    """The images whose mistakes cost most."""
    truth, of_image = artist.annotations, defaultdict(list)
    for mistake in mistakes:
        of_image[mistake.image_id].append(mistake)
    cost_of = {image_id: sum(m.cost for m in some) for image_id, some in of_image.items()}
    image_ids = sorted(cost_of, key=lambda image_id: -cost_of[image_id])[:_PICTURES]
    file_of = dict(zip(truth.image_ids.tolist(), truth.file_names, strict=True))
    names, pictures = dict(truth.categories), []
    for photo in artist.photos(image_ids):
        some = of_image[photo.image_id]
        caption = [f"{file_of[photo.image_id]}, cost {cost_of[photo.image_id]:.2f}"]
        for mistake in some[:_NAMED]:
            name, score = names[mistake.category], mistake.score
            caption.append(f"{name} {score:.2f} is false" if score else f"{name} missed")
        if len(some) > _NAMED:
            caption.append(f"and {len(some) - _NAMED:,} more")
        pictures.append(Picture(artist.draw([photo]), caption, wide=True))
    text = "There is no mistake."
    if mistakes:
        text = (
            f"{len(mistakes):,} mistakes in {len(of_image):,} images. These images cost most: a "
            "false detection costs its score, a missed object 1 less the score of the detection "
            "below the limit that matches it."
        )
    return Exhibit(title="Worst images", text=text, pictures=pictures)


def _first(artist: Artist) -> Exhibit:
    """The first images, whatever their result."""
    photos = artist.photos(artist.annotations.image_ids[:_PICTURES].tolist())
    return Exhibit(
        title="Detections",
        text="The first images to evaluate, whatever their result: what the model found, and "
        f"beside it the true boxes. Detections with a score below {MIN_SCORE} are not drawn; "
        "detections.json has all of them.",
        pictures=[Picture(artist.draw([photo]), (), wide=True) for photo in photos],
        files={"detections.png": artist.draw(photos, "png")},
    )
