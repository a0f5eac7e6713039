"""Makes a tiny data set in COCO's form, as records: bright shapes of 4 kinds on noise."""

import json

import numpy as np

from benchmarks.detection import coco
from tests.benchmarks.detection import rows

CATEGORIES = {3: "red", 7: "green", 12: "blue", 90: "grey"}  # the ids have gaps, as COCO's
EVAL_IMAGES = 23
WIDE = (48, 64)  # height and width of the wide images that are outlined


def make(folder, with_boxes=90, without=6, outlined=False):
    """Writes train-* and val-* records and the annotations of the images to evaluate.

    Of the training images, `with_boxes` have 1 to 4 boxes, some of them crowds, and `without` none.
    One image to evaluate has none either. With `outlined`, objects are ellipses with masks instead
    of rectangles, every third image is upright, and one more training image has only a crowd.
    """
    draw = np.random.default_rng(5)
    scene = _outlined if outlined else _scene
    empty = {int(i) for i in np.linspace(1, with_boxes + without - 2, without)}
    train = [scene(draw, 1000 + i, i in empty) for i in range(with_boxes + without)]
    evaluated = [scene(draw, 10 * i + 1, i == 4) for i in range(EVAL_IMAGES)]
    if outlined:
        train.append((999, np.full((*WIDE, 3), 90, np.uint8), [(3, 8, 8, 30, 30, True)]))
    for split, scenes, count in (("train", train, 4), ("val", evaluated, 2)):
        for shard in range(count):
            path = folder / f"{split}-{shard:05d}-of-{count:05d}.tfrecord"
            rows.write(path, [_record(each, outlined) for each in scenes[shard::count]])
    content = json.dumps(_annotations(evaluated, outlined))
    (folder / "instances_val2017.json").write_text(content)


def ellipse(size, x, y, w, h):
    """bool[size]: the pixels of an ellipse that fills a box."""
    rows_, columns = np.arange(size[0])[:, None] + 0.5, np.arange(size[1]) + 0.5
    return ((rows_ - y - h / 2) / (h / 2)) ** 2 + ((columns - x - w / 2) / (w / 2)) ** 2 <= 1


def _scene(draw, image_id, empty):
    """(image id, pixels, [(category, x, y, width, height, crowd)])."""
    height, width = (int(draw.integers(40, 70)) for _ in range(2))
    pixels = draw.normal(90, 25, (height, width, 3))
    objects = []
    for _ in range(0 if empty else draw.integers(1, 5)):
        category = int(draw.choice(list(CATEGORIES)))
        w, h = (int(draw.integers(10, 24)) for _ in range(2))
        x, y = int(draw.integers(0, width - w)), int(draw.integers(0, height - h))
        pixels[y : y + h, x : x + w, _channels(category)] += 120
        objects.append((category, x, y, w, h, bool(draw.random() < 0.1)))
    return image_id, pixels.clip(0, 255).astype(np.uint8), objects


def _outlined(draw, image_id, empty):
    """As `_scene`; at most the second object is a crowd, so that one remains without crowds."""
    size = WIDE[::-1] if image_id % 3 == 0 else WIDE
    pixels = draw.normal(90, 25, (*size, 3))
    objects = []
    for k in range(0 if empty else int(draw.integers(1, 4))):
        category = int(draw.choice(list(CATEGORIES)))
        w, h = (int(draw.integers(16, 30)) for _ in range(2))
        x, y = int(draw.integers(0, size[1] - w)), int(draw.integers(0, size[0] - h))
        pixels[ellipse(size, x, y, w, h), _channels(category)] += 120
        objects.append((category, x, y, w, h, k == 1 and bool(draw.random() < 0.3)))
    return image_id, pixels.clip(0, 255).astype(np.uint8), objects


def _channels(category):
    channel = list(CATEGORIES).index(category)
    return channel if channel < 3 else slice(None)


def _record(scene, outlined):
    image_id, pixels, objects = scene
    height, width, _ = pixels.shape
    boxes = [
        (y / height, x / width, (y + h) / height, (x + w) / width) for _, x, y, w, h, _ in objects
    ]
    more = {}
    if outlined:
        more["crowds"] = [int(crowd) for *_, crowd in objects]
        more["masks"] = [rows.png(ellipse((height, width), *box)) for _, *box, _ in objects]
    return rows.example(
        rows.encode_pixels(pixels),
        (height, width),
        boxes,
        [category for category, *_ in objects],
        str(image_id),
        **more,
    )


def _annotations(scenes, outlined):
    images = [
        {"id": i, "file_name": f"{i}.jpg", "height": len(p), "width": p.shape[1]}
        for i, p, _ in scenes
    ]
    objects = [(i, p.shape[:2], *each) for i, p, mine in scenes for each in mine]
    annotations = []
    for n, (i, size, category, x, y, w, h, crowd) in enumerate(objects, 1):
        row = {"id": n, "image_id": i, "category_id": category, "bbox": [x, y, w, h]}
        row |= {"area": w * h, "iscrowd": int(crowd)}
        if outlined:
            inside = ellipse(size, x, y, w, h)
            row |= {"area": int(inside.sum()), "segmentation": coco.mask_outline(inside)}
        annotations.append(row)
    categories = [{"id": number, "name": name} for number, name in CATEGORIES.items()]
    return {"images": images, "annotations": annotations, "categories": categories}
