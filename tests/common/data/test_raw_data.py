"""A folder of photos, text or ratings in place of records is answered with its command."""

import json
import shlex

import pytest
from PIL import Image

from common.data import files
from common.errors import DataError
from scripts import prepare

COCO = json.dumps({"images": [], "annotations": [], "categories": []})


def photo(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (9, 8)).save(path, "JPEG")


def answer(folder):
    """(the preparation, its arguments as it reads them) that a missing set of records names."""
    with pytest.raises(DataError) as refused:
        files.find_shards(str(folder), "train-*,train/train-*", "train")
    message = str(refused.value)
    assert message.startswith(f"no train records in {str(folder)!r}: it holds ")
    assert len(message.splitlines()) == 1
    words = shlex.split(message.partition("python -m scripts.prepare ")[2].partition(";")[0])
    return message, prepare.parse(words[0], words[1:])


@pytest.mark.parametrize("name", ["photos", "my photos", "train-images"])
def test_folders_of_classes(name, tmp_path):
    folder = tmp_path / name
    for i in range(12):
        photo(folder / f"class {i}" / "a.JPG")
    (folder / "class_names.json").write_text('{"0": "cat"}')
    message, args = answer(folder)
    assert "12 folders of photos" in message
    assert (args.layout, args.train, args.out) == ("folder", str(folder), f"data/{name}")
    assert args.validation is None


def test_classes_in_folders_of_splits(tmp_path):
    for split in ("train", "val"):
        photo(tmp_path / "set" / split / "cats" / "a.png")
    _, args = answer(tmp_path / "set")
    assert (args.train, args.validation) == tuple(f"{tmp_path}/set/{s}" for s in ("train", "val"))


@pytest.mark.parametrize(
    ("photos", "lists", "train", "val"),
    [
        (["images/a.jpg"], ["train.json", "val.json"], "", ""),
        (["a.jpg"], ["annotations/instances_train.json", "annotations/instances_val.json"], "", ""),
        (
            ["train2017/a.jpg", "val2017/b.jpg"],
            *([f"instances_{split}2017.json" for split in ("train", "val")], *("train2017",)),
            "val2017",
        ),
        (
            ["train/a.jpg", "valid/b.jpg"],
            *([f"{split}/_annotations.coco.json" for split in ("train", "valid")], *("train",)),
            "valid",
        ),
    ],
)
def test_photos_with_annotations(photos, lists, train, val, tmp_path):
    folder = tmp_path / "set"
    for path in photos:
        photo(folder / path)
    for path in lists:
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(COCO)
    _, args = answer(folder)
    found = [args.train_images, args.train_annotations, args.val_images, args.val_annotations]
    paths = [train, lists[0], val, lists[1]]
    assert found == [f"{folder}/{path}".rstrip("/") for path in paths]


@pytest.mark.parametrize(
    ("others", "evaluated"),
    [
        (["test.de", "test.en", "val.en", "val.de"], ["val.en", "val.de"]),
        ([], ["OTHER_SOURCE", "OTHER_TARGET"]),
    ],
)
def test_text_in_two_languages(others, evaluated, tmp_path):
    for name in ("train.de.gz", "train.en.gz", "README.md", "all.de", *others):
        (tmp_path / name).write_text("x")
    _, args = answer(tmp_path)
    found = [args.train_source, args.train_target, args.eval_source, args.eval_target]
    assert found == [f"{tmp_path}/{name}" for name in ("train.en.gz", "train.de.gz", *evaluated)]


def test_ratings_need_no_preparation(tmp_path):
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n")
    with pytest.raises(DataError, match=r"holds ratings.csv, which --config=configs/ncf.py"):
        files.find(str(tmp_path), "vocab.*", "vocabulary")


def test_other_folders_have_no_such_answer(tmp_path):
    (tmp_path / "text.en").write_text("Hello")
    with pytest.raises(DataError, match=r"no file there matches 'train-\*'"):
        files.find(str(tmp_path), "train-*", "train records")
    photo(tmp_path / "a.jpg")
    with pytest.raises(DataError, match="no folder for each class"):
        files.find(str(tmp_path), "train-*", "train records")
