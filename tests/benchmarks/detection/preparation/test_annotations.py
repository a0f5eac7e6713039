"""Images without a split, against the same annotations read by hand."""

import functools
import json

import pytest
from pycocotools import coco as pycoco

from common.errors import UserError
from scripts import prepare
from tests.benchmarks.detection import rows as made
from tests.benchmarks.detection.preparation.test_coco import rows

SIZE = 40, 50
LABEL = "image/object/class/label"
NAMES = {1: "common", 5: "rare"}


def write_images(folder, number):
    """Images a_0.png, a_1.png, b_2.png ...: two of each letter; every sixth has a rare object."""
    folder.mkdir(exist_ok=True)
    data = {"images": [], "annotations": []}
    data["categories"] = [{"id": number, "name": name} for number, name in NAMES.items()]
    for i in range(number):
        name = f"{chr(97 + i // 2)}_{i}.PNG"
        (folder / name).write_bytes(made.encode(*SIZE, seed=i))
        row = {"id": 900 - i, "file_name": name, "height": SIZE[0], "width": SIZE[1]}
        data["images"].append(row)
        for category in [1, 5][: 1 + (i % 6 == 0)] * (i % 10 != 9):
            box = {"bbox": [i % 7, 3, 20, 10 + category], "category_id": category}
            data["annotations"].append({"id": len(data["annotations"]), "image_id": 900 - i, **box})
    (folder / "all.json").write_text(json.dumps(data))
    return data


@pytest.mark.parametrize(
    "flags", [[], ["--validation_fraction=0.3"], ["--seed=1"], ["--group=^(.)_"]]
)
def test_one_file_is_split(flags, tmp_path):
    data = write_images(tmp_path / "in", 60)
    paths = [f"--train_images={tmp_path}/in", f"--train_annotations={tmp_path}/in/all.json"]
    prepare.make("coco", [*paths, *flags, f"--out={tmp_path}/out"])
    val = json.loads((tmp_path / "out" / "instances_val2017.json").read_text())
    ids = {row["id"] for row in val["images"]}
    assert len(ids) == (18 if "0.3" in str(flags) else 6 if not flags else len(ids))
    assert val["annotations"] == [r for r in data["annotations"] if r["image_id"] in ids]
    both = {split: rows(tmp_path / "out", split) for split in ("train", "val")}
    assert set(both["val"]) == ids
    assert set(both["train"]) == {r["id"] for r in data["images"]} - ids  # also the empty ones
    rare = [
        sum(5 in r["image/object/class/label"] for r in part.values()) for part in both.values()
    ]
    assert sum(rare) == 10 and rare[1] >= 1
    letters = [{r["image/filename"][0][:1] for r in part.values()} for part in both.values()]
    assert not (flags == ["--group=^(.)_"] and letters[0] & letters[1])
    assert pycoco.COCO(str(tmp_path / "out" / "instances_val2017.json")).getCatIds() == [1, 5]


@pytest.mark.parametrize("number", [1, 2])
def test_the_least_that_can_be_split_is_two_images(number, tmp_path, capsys):
    data = write_images(tmp_path, number)
    for i, row in enumerate(data["annotations"]):
        row["category_id"] = [5, 5, 1][i]  # each category is in one image
    (tmp_path / "all.json").write_text(json.dumps(data))
    paths = [f"--train_images={tmp_path}", f"--train_annotations={tmp_path}/all.json"]
    make = functools.partial(prepare.make, "coco", [*paths, f"--out={tmp_path}.out"])
    if number == 2:
        assert make().startswith("1 train and 1 val images")
        assert "all.json has too few images of each category" in capsys.readouterr().out
        return
    with pytest.raises(UserError, match="all.json has a single image"):
        make()
    assert not list(tmp_path.parent.glob(f"{tmp_path.name}.out/*.tfrecord"))


@pytest.mark.parametrize(
    "names, kinds, key",
    [
        (("caf\u00e9", "cafe\u0301 "), [1], "1 'caf\\xe9' and 5 'cafe\\u0301 ' look alike"),
        (("pawn", "pawn"), [1], "look alike"),
        (("Pawn", "pawn"), [1, 5], "Pawn and pawn differ"),
        (("cat", "dog"), [1, 5], ""),
    ],
)
def test_categories_that_look_alike_are_one(tmp_path, capsys, names, kinds, key):
    """Of ids that differ only the first one stays, in the records and in the file of the score."""
    data = write_images(tmp_path / "in", 12)
    for row, name in zip(data["categories"], names, strict=True):
        row["name"] = name
    (tmp_path / "in" / "all.json").write_text(json.dumps(data))
    paths = [f"--train_images={tmp_path}/in", f"--train_annotations={tmp_path}/in/all.json"]
    prepare.make("coco", [*paths, f"--out={tmp_path}/out"])
    printed = capsys.readouterr().out
    assert key in printed and ("all.json: the categories" in printed) == ("differ" in key)
    assert ("look alike" in printed) == ("alike" in key)
    val = pycoco.COCO(str(tmp_path / "out" / "instances_val2017.json"))
    assert val.getCatIds() == kinds
    both = {split: rows(tmp_path / "out", split) for split in ("train", "val")}
    labels = {i for part in both.values() for row in part.values() for i in row[LABEL]}
    assert labels == {*kinds}
    assert sum(len(row[LABEL]) for part in both.values() for row in part.values()) == 13


def test_labels_of_another_form_are_named(tmp_path, capsys):
    folder = tmp_path / "in"
    write_images(folder, 12)
    (folder / "all.json").unlink()
    for path in folder.glob("*.PNG"):
        path.with_suffix(".txt").write_text("0 0.5 0.5 0.2 0.2\n")
    (folder / "more.csv").write_text("image,xmin,ymin,xmax,ymax,label\na_0.PNG,1,2,9,9,x\n")
    prepare.make("coco", ["--labels=yolo", f"--train_images={folder}", f"--out={tmp_path}/out"])
    printed = capsys.readouterr().out
    assert "not read: 1 label file" in printed and "more.csv (--labels=csv)" in printed
