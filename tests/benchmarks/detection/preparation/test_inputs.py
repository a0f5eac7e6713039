"""Images without a split, and TFRecords of others, against the same annotations read by hand."""

import functools
import io
import json

import numpy as np
import pytest
from PIL import Image
from pycocotools import coco as pycoco

from benchmarks.detection.preparation import coco
from common.errors import UserError
from common.preparation.folders import Folder
from scripts import prepare
from tests.benchmarks.detection import rows as made
from tests.benchmarks.detection import scenes_fixture
from tests.benchmarks.detection.preparation.test_coco import FLOAT_KEYS, rows

SIZE = 40, 50
NAMES = {1: "common", 5: "rare"}


def write_images(folder, number):
    """Images a_0.png, a_1.png, b_2.png ...: two of each letter; every sixth has a rare object."""
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


@pytest.mark.parametrize("flags", [[], ["--val_fraction=0.3"], ["--seed=1"], ["--group=^(.)_"]])
def test_one_file_is_split(flags, tmp_path):
    (tmp_path / "in").mkdir()
    data = write_images(tmp_path / "in", 60)
    paths = [f"--train_images={tmp_path}/in", f"--train_annotations={tmp_path}/in/all.json"]
    prepare.make("coco", [*paths, *flags, f"--out={tmp_path}/out"])
    val = json.loads((tmp_path / "out" / "instances_val2017.json").read_text())
    ids = {row["id"] for row in val["images"]}
    assert len(ids) == (18 if "0.3" in str(flags) else 6 if not flags else len(ids))
    assert val["annotations"] == [r for r in data["annotations"] if r["image_id"] in ids]
    both = {split: rows(tmp_path / "out", split) for split in ("train", "val")}
    assert set(both["val"]) == ids
    assert set(both["train"]) == {r["image_id"] for r in data["annotations"]} - ids
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


LABEL_MAP = """
item { id: 1
  name: "cup" }
item {
  name: '/m/02', id: 2, display_name: 'big dog'
}
"""


def others(folder, files, masks=False, **changed):
    """TFRecords as people make them: {file name: number of images}; returns (boxes, mask)."""
    boxes, mask = np.array([[0.1, 0.2, 0.5, 0.6], [0.25, 0, 1, 0.5]]), np.zeros((40, 50), bool)
    mask[4:20, 10:30] = True
    pngs = {"masks": [made.png(mask), made.png(~mask)]}
    changed |= pngs if masks else {"height": None, "width": None}  # the images have a size
    for name, number in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        encoded = [made.encode(*SIZE, seed=i) for i in range(number)]
        records = [
            made.example(e, SIZE, boxes, [2, 1], f"photo {i}.png", **changed)
            for i, e in enumerate(encoded)
        ]
        made.write(folder / name, records)
    (folder / "label_map.pbtxt").write_text(LABEL_MAP)
    return boxes, mask


@pytest.mark.parametrize(
    ("files", "masks", "counts"),
    [
        ({"cups.record": 20}, False, [18, 2]),
        ({"train/cups.tfrecord": 6, "valid/cups.tfrecord": 4, "test/x.tfrecord": 1}, True, [6, 4]),
        ({"a_train.record-00000-of-00002": 3, "a_train.record-00001-of-00002": 3}, False, [5, 1]),
    ],
)
def test_records_of_others(files, masks, counts, tmp_path):
    boxes, mask = others(tmp_path / "in", files, masks)
    (reading,) = coco.readings(Folder.open(str(tmp_path / "in")))
    assert (reading.form, "--masks" in reading.arguments) == ("tfrecords", masks)
    prepare.make("coco", [*reading.arguments, f"--out={tmp_path}/out"])
    both = [rows(tmp_path / "out", split) for split in ("train", "val")]
    assert [*map(len, both)] == counts
    for row in [*both[0].values(), *both[1].values()]:
        sides = np.array([row[key] for key in FLOAT_KEYS]).T
        np.testing.assert_allclose(sides, boxes, atol=1e-5)
        assert row["image/object/class/text"] == [b"big dog", b"cup"]
        assert row["image/object/is_crowd"] == [0, 0]
        np.testing.assert_allclose(row["image/object/area"], [0.16 * 2000, 0.375 * 2000], 1e-5)
        if masks:
            pngs = [np.asarray(Image.open(io.BytesIO(p))) for p in row["image/object/mask"]]
            np.testing.assert_array_equal(np.stack(pngs) > 0, [mask, ~mask])
    truth = pycoco.COCO(str(tmp_path / "out" / "instances_val2017.json"))
    assert len(truth.getImgIds()) == counts[1] and len(truth.getAnnIds()) == 2 * counts[1]
    pixels = Image.open(io.BytesIO(next(iter(both[1].values()))["image/encoded"][0]))
    assert pixels.size == SIZE[::-1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"xmax": [431.0, 2.0]}, "t.record, record 0 .* a side of a box is 431, no share"),
        ({"ymin": [0.1]}, r"t.record, record 0 .* 2 labels for \[1, 2, 2, 2\] sides"),
        ({}, "6 of 6 objects have no outline: add them, or leave out --masks"),
        ({"object/class/label": None}, "has no TFRecords with image/object/bbox"),
    ],
)
def test_records_that_cannot_be_read(changed, message, tmp_path):
    others(tmp_path / "in", {"t.record": 3}, **changed)
    flags = [f"--train_images={tmp_path}/in", "--labels=tfrecords", f"--out={tmp_path}/out"]
    flags += ["--masks"] * (not changed)
    with pytest.raises(UserError, match=message):
        prepare.make("coco", flags)
    assert not list(tmp_path.glob("out/*.tfrecord"))


def test_records_of_google_beside_their_annotations(tmp_path):
    scenes_fixture.make(tmp_path)
    (reading,) = coco.readings(Folder.open(str(tmp_path)))
    assert reading.form == "tfrecords" and "4 files of train, 2 of val" in reading.makes
    out = tmp_path.with_name(f"{tmp_path.name}.out")
    prepare.make("coco", [*reading.arguments, f"--out={out}"])
    images = [
        [row["image/encoded"][0] for row in rows(folder, "val").values()]
        for folder in (tmp_path, out)
    ]
    assert sorted(images[0]) == sorted(images[1])
