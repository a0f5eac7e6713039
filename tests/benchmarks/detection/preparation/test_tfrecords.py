"""TFRecords of TensorFlow's Object Detection API, as people make them, become COCO's form."""

import io

import numpy as np
import pytest
from PIL import Image
from pycocotools import coco as pycoco

from benchmarks.detection.preparation import recognise
from common.errors import UserError
from common.preparation.folders import Folder
from scripts import prepare
from tests.benchmarks.detection import rows as made
from tests.benchmarks.detection.preparation.test_coco import FLOAT_KEYS, rows

SIZE = 40, 50
BOXES = np.array([[0.1, 0.2, 0.5, 0.6], [0.25, 0, 1, 0.5]])
INSIDE = np.zeros(SIZE, bool)
INSIDE[4:20, 10:30] = True
LABEL_MAP = """
item { id: 1
  name: "cup" }
item {
  name: '/m/02', id: 2, display_name: 'big dog'
}
"""


def write(folder, files, **changed):
    """Records {file name: number of images}; the names of two classes are in a label map."""
    for name, number in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        encoded = [made.encode(*SIZE, seed=i) for i in range(number)]
        examples = [
            made.example(image, SIZE, BOXES, [2, 1], f"photo {i}.png", **changed)
            for i, image in enumerate(encoded)
        ]
        made.write(folder / name, examples)
    (folder / "label_map.pbtxt").write_text(LABEL_MAP)


@pytest.mark.parametrize(
    ("files", "masks", "counts"),
    [
        ({"cups.record": 20}, False, [18, 2]),
        ({"train/cups.tfrecord": 6, "valid/cups.tfrecord": 4, "test/x.tfrecord": 1}, True, [6, 4]),
        ({"a_train.record-00000-of-00002": 3, "a_train.record-00001-of-00002": 3}, False, [5, 1]),
    ],
)
def test_records_are_recognised_and_prepared(files, masks, counts, tmp_path):
    pngs = {"masks": [made.png(INSIDE), made.png(~INSIDE)]}
    write(tmp_path / "in", files, **(pngs if masks else {"height": None, "width": None}))
    (dataset,) = recognise.dataset_formats(Folder.open(str(tmp_path / "in")))
    assert (dataset.name, "--masks" in dataset.arguments) == ("tfrecords", masks)
    prepare.make("coco", [*dataset.arguments, f"--out={tmp_path}/out"])
    both = [rows(tmp_path / "out", split) for split in ("train", "val")]
    assert [*map(len, both)] == counts
    for row in [*both[0].values(), *both[1].values()]:
        sides = np.array([row[key] for key in FLOAT_KEYS]).T
        np.testing.assert_allclose(sides, BOXES, atol=1e-5)
        assert row["image/object/class/text"] == [b"big dog", b"cup"]
        np.testing.assert_allclose(row["image/object/area"], [0.16 * 2000, 0.375 * 2000], 1e-5)
        if masks:
            pixels = [np.asarray(Image.open(io.BytesIO(p))) for p in row["image/object/mask"]]
            np.testing.assert_array_equal(np.stack(pixels) > 0, [INSIDE, ~INSIDE])
    truth = pycoco.COCO(str(tmp_path / "out" / "instances_val2017.json"))
    assert len(truth.getImgIds()) == counts[1] and len(truth.getAnnIds()) == 2 * counts[1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"xmax": [431.0, 2.0]}, "t.record, record 0 .* a side of a box is 431, no share"),
        ({"object/class/label": None}, "has no TFRecords with image/object/bbox"),
    ],
)
def test_records_that_cannot_be_read_are_one_line(changed, message, tmp_path):
    write(tmp_path / "in", {"t.record": 3}, **changed)
    flags = [f"--train_images={tmp_path}/in", "--labels=tfrecords", f"--out={tmp_path}/out"]
    with pytest.raises(UserError, match=message):
        prepare.make("coco", flags)
    assert not list(tmp_path.glob("out/*.tfrecord"))


def test_a_label_map_in_another_encoding_is_refused(tmp_path):
    write(tmp_path / "in", {"t.record": 3})
    (tmp_path / "in" / "label_map.pbtxt").write_text(LABEL_MAP.replace("cup", "кот"), "cp1251")
    flags = [f"--train_images={tmp_path}/in", "--labels=tfrecords", f"--out={tmp_path}/out"]
    with pytest.raises(UserError, match=r"label_map.pbtxt, line 3 is not UTF-8 .* iconv"):
        prepare.make("coco", flags)
