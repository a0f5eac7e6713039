"""Plans and makes records of images with objects: which file an image is, which boxes it gets.

The keys are those of Google's `create_coco_tf_record.py`; labels are the annotations' category ids.
"""

import dataclasses
import hashlib
import io
import os
import re

import numpy as np
from PIL import Image

from benchmarks.detection import coco
from benchmarks.detection.coco import Annotations, is_end, normal
from common import pools
from common.errors import UserError, count
from common.images import photos
from common.preparation import holdout, schema, writing
from common.preparation.sources import Source, SourceError

_ABSOLUTE = re.compile(r"[/\\]|[A-Za-z]:")
_FEW = 3  # boxes that are no reason to suspect a file


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """One split."""

    name: str  # 'train' or 'val'
    annotations: Annotations  # of its n images with m objects
    source: Source  # the image files
    files: np.ndarray  # int64[n], the index in the source of each image
    # float32[m, 4], the boxes: y0, x0, y1, x1 as shares of the image, cut at its edge.
    shares: np.ndarray
    objects: np.ndarray  # int64[o], whose boxes have an area left, sorted by image
    starts: np.ndarray  # int64[n + 1], where the objects of each image begin in `objects`
    cut: int  # how many of these reached more than a pixel beyond the image
    order: np.ndarray  # int64[k], the images that get a record, in the order of writing
    shards: int  # the number of files
    turn: bool = False  # whether EXIF turns a photo whose size does not tell

    @property
    def with_boxes(self) -> int:
        """The number of images with boxes."""
        return int((np.diff(self.starts) > 0).sum())


def plan_split(
    name: str,
    annotations: Annotations,
    source: Source,
    seed: int,
    shards: tuple[int, int],
    keep_empty: bool,
) -> Split:
    """Plans a split; training shuffles the images, and leaves out those whose objects have no box.

    `seed` decides the order. `shards` are the number of files that is asked for, or 0, and the
    usual number of a large set, or 0. Training has the images without objects if `keep_empty`.
    SourceError if no image has a box, an image is missing, or there are more files than images.
    """
    files = locate(annotations, source)
    limit = annotations.sizes[annotations.rows]
    low, size = annotations.boxes[:, 1::-1], annotations.boxes[:, 3:1:-1]
    high = low + size
    shares = np.concatenate([low.clip(0, limit) / limit, high.clip(0, limit) / limit], 1)
    shares = shares.astype(np.float32)  # a box may be too thin for this type
    has_area = np.logical_and(size > 0, shares[:, 2:] > shares[:, :2]).all(axis=1)
    beyond = np.logical_or(low < -1, high > limit + 1).any(axis=1)
    objects = np.flatnonzero(has_area)
    if not len(objects):
        raise SourceError(f"{annotations.path} has no box with an area inside of its image")
    objects = objects[np.argsort(annotations.rows[objects], kind="stable")]
    starts = np.searchsorted(annotations.rows[objects], np.arange(len(files) + 1))
    order, flag = np.arange(len(files)), "validation_shards"
    if name == "train":
        is_empty = np.bincount(annotations.rows, minlength=len(files)) == 0
        kept = (np.diff(starts) > 0) | (is_empty & keep_empty)
        order, flag = np.flatnonzero(kept), "shards"
        ids = annotations.image_ids[order].tolist()
        order = order[writing.shuffled(seed, name, [*map(str, ids)])]
    number = writing.num_shards(shards[0], flag, source, files[order], shards[1])
    cut = int((has_area & beyond).sum())
    return Split(name, annotations, source, files, shares, objects, starts, cut, order, number)


def turned(split: Split, workers: int) -> tuple[bool | None, int]:
    """Whether a split's boxes are on photos that EXIF has turned; the first photo to tell decides.

    None if no photo tells: then the second value is the number of photos whose size EXIF keeps
    although it turns them.
    """

    def fits(row: int) -> list[bool]:
        try:
            sizes = photos.sizes(split.source.read(int(split.files[row])))
        except photos.BadImage:  # `example` says it
            return []
        return [size == tuple(split.annotations.sizes[row].tolist()) for size in sizes]

    doubtful = 0
    with pools.Threads(workers) as pool:
        for each in pools.ordered(pool, fits, range(len(split.files)), 4 * workers):
            if len(each) == 2 and each[0] != each[1]:
                return each[1], 0
            doubtful += each == [True, True]
    return None, doubtful


def exif_note(choice: bool, doubtful: int) -> str:
    """What the user must know where EXIF turns photos if `choice`, but `doubtful` do not tell."""
    if doubtful:
        what, flag = ("turned", "ignore") if choice else ("not turned", "turn")
        problem = f"EXIF turns {count(doubtful, 'photo')}, and no size tells whether the boxes are"
        fix = f"if that is wrong, add --exif={flag}; predict.py turns photos"
        return f"{problem} on turned photos: they are {what} here; {fix}"
    problem = "the boxes, and so the records, are on the photos as they are stored"
    fix = "remove their EXIF orientation to predict on such pixels"
    return "" if choice else f"{problem}, not as EXIF turns them; predict.py turns photos: {fix}"


def check_boxes(annotations: Annotations, trusted: bool = False) -> None:
    """Raises SourceError if there are no boxes, or, unless `trusted`, if they seem to be no COCO's.

    Corners, read as x, y, width and height, have w > x and h > y and stay in the image as they are.
    Such values are nearly all of those with w > x, and a third of all, also where a file has both
    kinds; of COCO's own boxes they are few.
    """
    x, y, w, h = annotations.boxes.T
    if not len(x):
        raise SourceError(f"{annotations.path} has no boxes at all: its 'annotations' is empty")
    height, width = annotations.sizes[annotations.rows].T + 1  # a pixel for rounding
    beyond = (x + w > width) | (y + h > height)
    corners = (w > x) & (h > y) & (w <= width) & (h <= height)
    seems = corners.mean() >= 1 / 3 and corners.sum() >= 0.9 * (w > x).sum()
    like = ""
    if beyond.sum() >= _FEW and beyond.mean() >= 0.1 and seems:
        like = f"corners [x0, y0, x1, y1]: {beyond.mean():.0%} of them reach beyond their images"
    elif len(x) >= _FEW and np.abs(annotations.boxes).max() <= 1:
        like = "shares of the image: no side is longer than 1"
    if like and not trusted:
        raise SourceError(
            f"{annotations.path}: the boxes look like {like}; COCO has [x, y, width, height] in "
            "pixels: convert them (or add --trust_boxes if they are right)"
        )


def check_categories(train: Annotations, val: Annotations) -> None:
    """Raises SourceError unless both files list the same categories."""
    differences = sorted({*train.categories} ^ {*val.categories})
    if differences:
        number, name = differences[0]
        files = [a.path for a in (train, val) if differences[0] in a.categories]
        raise SourceError(
            f"{train.path} and {val.path} list different categories, for one {number} '{name}' "
            f"only in {files[0]}: give both the same list 'categories'"
        )


def locate(annotations: Annotations, source: Source) -> np.ndarray:
    """int64[n], the index in the source of each image.

    A file_name may have more or fewer folders in front than the name in the source, and capital
    letters in other places. Of a path on another machine the last part is enough, if it is the only
    file of that name. SourceError if an image is missing, or is not one file of its own.
    """
    names = [file.name for file in source.files]
    by_path = {name: i for i, name in enumerate(names)}
    by_base: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        by_base.setdefault(os.path.basename(name).lower(), []).append(i)
    files, missing, taken = [], [], {}
    for image_id, name in zip(annotations.image_ids.tolist(), annotations.file_names, strict=True):
        path = normal(name)
        like = by_base.get(os.path.basename(path).lower(), [])
        fits = [by_path[path]] if path in by_path else [i for i in like if is_end(path, names[i])]
        fits = fits or [i for i in like if is_end(path.lower(), names[i].lower())]
        if not fits and _ABSOLUTE.match(name):
            fits = like
        if len(fits) > 1:
            both = " and ".join(names[i] for i in fits[:2])
            raise SourceError(
                f"{source.path}: image {image_id} ({name}) may be {both}: "
                "write the folder into its file_name"
            )
        if not fits:
            missing.append(name)
        elif taken.setdefault(fits[0], image_id) != image_id:
            raise SourceError(
                f"{annotations.path}: images {taken[fits[0]]} and {image_id} are both "
                f"{names[fits[0]]} in {source.path}"
            )
        files += fits
    if missing:
        total, first = len(annotations.file_names), ", ".join(missing[:3])
        problem = f"{len(missing):,} of the {total:,} images of {annotations.path} are not in"
        fix = "get the missing files, or take them out of the annotations"
        if len(missing) > total / 2:
            fix = "it seems to be the annotation file of another set of images"
        raise SourceError(f"{problem} {source.path} ({first}{', ...' * (len(missing) > 3)}): {fix}")
    return np.array(files, np.int64)


def example(split: Split, masks: bool, quality: int, pattern: str, k: int) -> writing.Example:
    """Reads and converts the k-th image of a split, with the group that `pattern` finds, if any.

    UserError if a validation image cannot be used, because the score will ask for it.
    """
    row, data = int(split.order[k]), split.annotations
    image_id, name = int(data.image_ids[row]), data.file_names[row]
    path, size = f"{split.name}/{name}", tuple(data.sizes[row].tolist())
    objects = split.objects[split.starts[row] : split.starts[row + 1]]
    try:
        jpeg = _jpeg(split.source.read(int(split.files[row])), size, quality, split.turn)
        outlines = [data.outlines[i] for i in objects] if masks else []
        pngs = [io.BytesIO() for _ in outlines]
        for png, outline in zip(pngs, outlines, strict=True):  # 1 inside
            Image.fromarray(coco.outline_mask(outline, *size)).save(png, "PNG")
    except (photos.BadImage, ValueError) as error:  # or an outline cannot be drawn
        if split.name == "val":
            raise UserError(
                f"{path}: {error}; repair it, or remove image {image_id} from {data.path}"
            ) from error
        return b"", (), {"left_out": [path, str(error)]}
    names, labels = dict(data.categories), data.category_ids[objects].tolist()
    digest = hashlib.sha256(jpeg.encoded).hexdigest()
    group = holdout.group(name, pattern) if pattern else ""
    feature = {
        **schema.image(jpeg.encoded, size, name, b"jpeg", group or ""),
        "image/source_id": schema.strings([str(image_id).encode()]),
        "image/key/sha256": schema.strings([digest.encode()]),
        "image/object/class/label": schema.ints(labels),
        "image/object/class/text": schema.strings([names[label].encode() for label in labels]),
        "image/object/is_crowd": schema.ints(data.crowd[objects].astype(int).tolist()),
        "image/object/area": schema.floats(data.areas[objects].tolist()),
    }
    for i, side in enumerate(("ymin", "xmin", "ymax", "xmax")):
        feature[f"image/object/bbox/{side}"] = schema.floats(split.shares[objects, i].tolist())
    if masks:
        feature["image/object/mask"] = schema.strings([png.getvalue() for png in pngs])
    notes: dict[str, list] = {"digests": [digest[:16], 0, path]}
    notes |= {"changed": [path, jpeg.change]} if jpeg.change else {}
    return schema.serialize(feature), labels, notes


def _jpeg(data: bytes, size: tuple[int, int], quality: int, turn: bool) -> photos.Jpeg:
    """The image as an RGB JPEG of that size; EXIF turns it if `turn`, or if only one way fits."""
    jpeg = photos.to_jpeg(data, rotate=turn, quality=quality, grey=False)
    if (jpeg.width, jpeg.height) == size != (jpeg.height, jpeg.width):
        jpeg = photos.to_jpeg(data, rotate=not turn, quality=quality, grey=False)
    if (jpeg.height, jpeg.width) != size:
        problem = f"the image is {jpeg.height}x{jpeg.width}, in the annotations {size[0]}x{size[1]}"
        raise photos.BadImage(f"{problem} pixels high and wide")
    return jpeg
