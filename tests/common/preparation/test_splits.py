"""Which words say that something is for training, validation or a test, in all kinds of data."""

import io
import re

import numpy as np
import pytest
from PIL import Image

from benchmarks.detection.preparation import label_folders, tfrecords
from benchmarks.ncf.preparation import recognise as logs
from benchmarks.translation.preparation import recognise as texts
from common.data import records
from common.preparation import schema
from common.preparation.folders import have_splits, split_of, whole_split
from tests.helpers.preparation import choose, place


@pytest.mark.parametrize(
    ("name", "split", "whole"),
    [
        ("Training", "train", "train"),
        ("Testing", "test", "test"),
        ("trainset", "train", "train"),
        ("val2017", "validation", "validation"),
        ("eval", "validation", "validation"),
        ("seg_train", "train", ""),
        ("newstest2014.de", "test", ""),
        ("asyncio-dev.po", "validation", ""),
        ("latest", "", ""),
        ("trains", "", ""),
        ("Protest", "", ""),
        ("PublicTest", "test", ""),
        ("HeldOut", "validation", "validation"),
        ("held_out", "validation", "validation"),
        ("my-hold-out.csv", "validation", ""),
    ],
)
def test_words_count_and_parts_of_words_do_not(name, split, whole):
    assert (split_of(name), whole_split(name)) == (split, whole)


def test_the_innermost_part_of_a_path_counts_or_the_outermost():
    assert split_of("dev_kit/train/cat/1.jpg") == "train"
    assert split_of("train/test_tube/1.jpg") == "test"
    assert split_of("train/test_tube/1.jpg", outermost=True) == "train"
    assert split_of("cat/1.jpg") == split_of("cat/1.jpg", outermost=True) == ""


def test_one_kind_of_names_says_nothing():
    assert not have_splits(["library/asyncio-dev.po", "library/test.po", "about.po"])
    assert not have_splits(["train.en", "more.en"])
    assert have_splits(["train.en", "more.en", "dev.en"])


# --- The same words in all kinds: 4 examples are for training, 2 for the split of a word.

WORDS = re.findall(
    r"\w+",
    "val valid validation validate valset validset dev devel devset newsdev eval evaluation "
    "evalset heldout holdout held_out test testing testset testdata tst newstest pred prediction "
    "Val DEV val2017",
)


def picture(seed):
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


PICTURES = [picture(seed) for seed in range(6)]


def pictures(*folders):
    """Six pictures, a0.png to a5.png: four in the first folder, two in the last one."""
    return {f"{folders[i > 3 and -1]}/a{i}.png": PICTURES[i] for i in range(6)}


def coco(first, last):
    keys = ("id", "image_id")
    rows = range(first + 1, last + 1)
    return {
        "images": [{"id": i, "file_name": f"a{i - 1}.png", "height": 8, "width": 8} for i in rows],
        "annotations": [
            {**dict.fromkeys(keys, i), "category_id": 1, "bbox": [1, 1, 4, 4], "area": 16}
            for i in rows
        ],
        "categories": [{"id": 1, "name": "cat"}],
    }


def voc(name):
    box = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>5</xmax><ymax>5</ymax></bndbox>"
    cat = f"<object><name>cat</name>{box}</object>"
    return f"<annotation><filename>{name}</filename>{cat}</annotation>"


def labelme(name):
    shape = {"label": "cat", "points": [[1, 1], [5, 5]], "shape_type": "rectangle"}
    return {"shapes": [shape], "imagePath": name, "imageHeight": 8, "imageWidth": 8}


def via(first, last):
    shape = {"name": "rect", "x": 1, "y": 1, "width": 4, "height": 4}
    region = {"shape_attributes": shape, "region_attributes": {"label": "cat"}}
    rows = ({"filename": f"a{i}.png", "size": 1, "regions": [region]} for i in range(first, last))
    return {row["filename"]: row for row in rows}


def cvat(word):
    box = '<box label="cat" xtl="1" ytl="1" xbr="5" ybr="5" occluded="0"/>'
    subsets = ["train"] * 4 + [word] * 2
    rows = (
        f'<image id="{i}" name="p/a{i}.png" subset="{subset}" width="8" height="8">{box}</image>'
        for i, subset in enumerate(subsets)
    )
    return f"<annotations>{''.join(rows)}</annotations>"


def open_images(first, last):
    head = "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax\n"
    return head + "".join(f"a{i},x,cat,1,0.1,0.5,0.1,0.5\n" for i in range(first, last))


def table(word, columns, row):
    """A table with a column of splits, in which the word is only a part of a cell."""
    cells = [f"a{i}.png,{row(i)},{'my_train' if i < 4 else f'my_{word}'}" for i in range(6)]
    return "\n".join([f"file,{columns},partition", *cells])


def tfrecord(i):
    feature = {
        **schema.image(PICTURES[i], (8, 8), f"a{i}.png", b"png"),
        "image/object/class/label": schema.ints([1]),
        **{f"image/object/bbox/{side}": schema.floats([0.1]) for side in ("xmin", "ymin")},
        **{f"image/object/bbox/{side}": schema.floats([0.9]) for side in ("xmax", "ymax")},
    }
    return records.frame(schema.serialize(feature))


def sentences(split):
    return "".join(f"A sentence of {split}, number {i}.\n" for i in range(9))


def yolo(*folders):
    line = "0 0.5 0.5 0.5 0.5\n"
    labels = {f"{folders[i > 3 and -1]}/a{i}.txt": line for i in range(6)}
    return {**labels, "data.yaml": "names: [cat]"}


def log(first):
    return "user,item\n" + "".join(f"u{i},i{i + first}\n" for i in range(9))


KINDS = {
    "class folders": lambda word: {
        f"{split}/{name}/a{i}.png": PICTURES[i]
        for split in ("train", word)
        for name in ("cat", "dog")
        for i in range(2)
    },
    "table of classes": lambda word: {
        **pictures("p"),
        "classes.csv": table(word, "label", lambda i: ("cat", "dog")[i % 2]),
    },
    "coco": lambda word: {
        **pictures("train", word),
        "train.json": coco(0, 4),
        f"{word}.json": coco(4, 6),
    },
    "yolo folders": lambda word: {
        **pictures("images/train", f"images/{word}"),
        **yolo("labels/train", f"labels/{word}"),
    },
    "yolo lists": lambda word: {
        **pictures("images"),
        **yolo("labels"),
        "train.txt": "".join(f"images/a{i}.png\n" for i in range(4)),
        f"{word}.txt": "images/a4.png\nimages/a5.png\n",
    },
    "voc folders": lambda word: {
        **pictures("train", word),
        **{f"{'train' if i < 4 else word}/a{i}.xml": voc(f"a{i}.png") for i in range(6)},
    },
    "voc lists": lambda word: {
        **pictures("JPEGImages"),
        **{f"Annotations/a{i}.xml": voc(f"a{i}.png") for i in range(6)},
        "ImageSets/Main/train.txt": "a0\na1\na2\na3\n",
        f"ImageSets/Main/{word}.txt": "a4\na5\n",
    },
    "cvat": lambda word: {**pictures("p"), "annotations.xml": cvat(word)},
    "labelme": lambda word: {
        **pictures("train", word),
        **{f"{'train' if i < 4 else word}/a{i}.json": labelme(f"a{i}.png") for i in range(6)},
    },
    "via": lambda word: {
        **pictures("p"),
        "via_train.json": via(0, 4),
        f"via_{word}.json": via(4, 6),
    },
    "openimages": lambda word: {
        **pictures("p"),
        "train-annotations-bbox.csv": open_images(0, 4),
        f"{word}-annotations-bbox.csv": open_images(4, 6),
    },
    "table of boxes": lambda word: {
        **pictures("p"),
        "boxes.csv": table(word, "label,xmin,ymin,xmax,ymax", lambda i: "cat,1,1,5,5"),
    },
    "tfrecords": lambda word: {
        "train.tfrecord": b"".join(map(tfrecord, range(4))),
        f"{word}.tfrecord": b"".join(map(tfrecord, range(4, 6))),
    },
    "lines of text": lambda word: {
        f"{split}.{tag}": sentences(split) for split in ("train", word) for tag in ("en", "de")
    },
    "pairs of sentences": lambda word: {
        f"corpus.{split}.tsv": "en\tde\n" + sentences(split).replace(",", ".\tEin Satz,")
        for split in ("train", word)
    },
    "logs": lambda word: {"train.csv": log(0), f"{word}.csv": log(9), "a.csv": log(18)},
}


def has_two_splits(kind, folder):
    """Whether the preparation of a folder has both splits."""
    if kind == "logs":  # the rows for a test are the latest
        (dataset,) = logs.dataset_formats(folder)
        return [path.rpartition("/")[2] for path in dataset.arguments][:2] == ["a.csv", "train.csv"]
    if kind in ("lines of text", "pairs of sentences"):
        (dataset,) = texts.dataset_formats(folder)
        return any(flag.startswith("--eval") for flag in dataset.arguments)
    dataset = choose(folder)
    if kind == "tfrecords":
        splits = tfrecords.read(folder, False)[0].splits
    elif dataset.arguments[0].startswith("--labels="):
        splits = label_folders.read(folder, dataset.name).splits
    else:
        flags = " ".join(dataset.arguments)
        return "--val" in flags or "split by" in dataset.output
    return [len(content["images"]) for content in splits.values()] == [4, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_words_say_the_split_in_all_kinds(kind, tmp_path):
    unknown = []
    for i, word in enumerate(WORDS):
        if not has_two_splits(kind, place(tmp_path / str(i), KINDS[kind](word))):
            unknown.append(word)
    assert unknown == []
