"""`prepare coco` on own images, and the one line for each mistake in input and flags."""

import io
import json
import logging

import numpy as np
import pytest
from PIL import Image, ImageOps

from benchmarks.detection import records
from benchmarks.records import RecordFiles
from common.errors import UserError
from scripts import prepare
from tests.benchmarks.detection.preparation.test_coco import (
    FLOAT_KEYS,
    SHARDS,
    TRAIN,
    VAL,
    annotations,
    boxes_of,
    image_file,
    rows,
    train_id,
    write_coco,
)
from tests.helpers.preparation import leaves, place


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """(folder, arguments) of a small COCO."""
    folder = tmp_path_factory.mktemp("coco")
    return folder, [*write_coco(folder), "--masks", *SHARDS]


def own(folder, change=lambda train, val: None, **flags):
    """Prepares own images after `change` of both annotations; returns the output folder."""
    train, val = annotations(*TRAIN), annotations(*VAL)
    for split, (first, count, _) in (("train", TRAIN), ("val", VAL)):
        images = {i: image_file(i)[:2] for i in range(first, first + count)}
        place(
            folder / split, {"deep/" * (i % 2) + name: data for i, (name, data) in images.items()}
        )
    change(train, val)
    place(folder, {"my train.json": train, "my val.json": val})
    values = {"train-images": folder / "train", "val-images": folder / "val"}
    values |= {"train-annotations": folder / "my train.json", "out": folder / "out"}
    values |= {"val-annotations": folder / "my val.json"} | flags
    flags = [f"--{name}={value}" if value else f"--{name}" for name, value in values.items()]
    print(prepare.make("coco", flags))
    return folder / "out"


def test_own_images_need_no_official_names(tmp_path, capsys):
    files = {"_annotations.coco.json": "not an image", "more.webp": "an image that is not listed"}
    place(tmp_path / "train", files)

    def change(train, _):
        train["images"][0]["file_name"] = "C\\elsewhere\\0000.jpg".replace("C\\", "")
        train["annotations"][0]["bbox"] = [-5, -5, 10, 10]  # cut
        del train["annotations"][0]["iscrowd"], train["annotations"][0]["area"]
        zero = {"image_id": train_id(2), "category_id": 3, "iscrowd": 0}
        train["annotations"] += [
            {"id": 90, "bbox": [5, 5, 0, 9], **zero},
            {"id": 91, "bbox": [500, 5, 9, 9], **zero},
            {"id": 92, "bbox": [5, 5, -3, 9], **zero},
        ]
        (lone,) = (r for r in train["annotations"] if r["image_id"] == train_id(12))
        lone["bbox"] = [5, 5, 0, 9]

    out = own(tmp_path, change)
    names = sorted(path.name for path in out.glob("*.tfrecord"))
    assert names == ["train-00000-of-00001.tfrecord", "val-00000-of-00001.tfrecord"]
    row = rows(out, "train")[train_id(0)]
    assert [row[key] for key in FLOAT_KEYS] == [[0], [0], *([np.float32(5 / n)] for n in (30, 40))]
    assert row["image/object/area"] == [100]
    assert len(rows(out, "train")[train_id(2)]["image/object/class/label"]) == 3
    splits = json.loads((out / "manifest.json").read_text())["splits"]
    assert splits["val"]["image_ids"] == list(rows(out, "val"))
    train = splits["train"]
    # Of 16 images 4 have no object, and of one the objects have no box.
    assert train["boxes"] == {"dropped": 4, "cut": 1, "per_image": [4, 3, 4, 4]}
    assert (train["images"], train["with_boxes"], train["examples"]) == (16, 11, 15)
    labels = [row["image/object/class/label"] for row in rows(out, "train").values()]
    assert labels.count([]) == 4 and len(labels) == 15
    printed = capsys.readouterr().out
    assert "train: 4 images without objects" in printed
    assert "train: 1 image without boxes: no record" in printed
    assert "15 train (4 without objects) and 6 val images" in printed
    assert "train: 4 boxes have no area inside of their image" in printed
    assert "train: 1 box was cut at the edge of its image" in printed
    assert (
        f"{tmp_path}/train holds 1 image that the annotations do not list, for one more" in printed
    )


def changed_masks(train, _):
    """Of an image only a crowd is left, and another one cannot be read."""
    (lone,) = (r for r in train["annotations"] if r["image_id"] == train_id(12))
    lone["iscrowd"] = 1
    train["images"][0]["width"] = 41


@pytest.mark.parametrize("empty", [False, True])
def test_a_manifest_spares_the_scan_of_masks(tmp_path, monkeypatch, caplog, empty):
    """It says what the records say: which are examples, upright, and how many boxes they have."""
    caplog.set_level(logging.INFO, "tpu_suite")

    def change(train, _):
        changed_masks(train, _)
        if not empty:
            train["images"] = [train["images"][i] for i in range(16) if boxes_of(i)]

    out = own(tmp_path, change, masks="")
    found = []
    for trusted in (False, True):
        for split, names in (("train", "train-*"), ("eval", "val-*")):
            files = RecordFiles(str(out), names, split, f"{tmp_path}/{split}.json", trusted)
            source = records.open_records(files, (3, 7, 12), 1, True, empty)
            places = [source.shards.where(i) for i in range(source.shards.total)]
            found.append((source, source.image_ids, source.upright, places))
        monkeypatch.setattr(records, "_scan_file", None)
    assert [row[1:] for row in found[:2]] == [row[1:] for row in found[2:]]
    train, val = found[0][0], found[1][0]
    assert train.shards.total == len(train.upright) == 10 + 4 * empty
    assert (sum(train.upright), len(val.upright)) == (1, 6)  # EXIF turns one
    half = len(caplog.messages) // 2
    assert caplog.messages[:half] == caplog.messages[half:] and half == 2 + empty


def test_a_bad_training_image_is_left_out_and_a_bad_validation_image_is_not(tmp_path, capsys):
    def wrong(train, _):
        train["images"][0]["width"] = 41
        (tmp_path / "a" / "train" / "deep" / "0005.jpg").write_bytes(b"no image")

    out = own(tmp_path / "a", wrong)
    content = json.loads((out / "manifest.json").read_text())
    size = "the image is 30x40, in the annotations 30x41 pixels high and wide"
    assert content["left_out"] == [
        {"file": "train/0000.jpg", "reason": size},
        {"file": "train/0005.jpg", "reason": "not an image that can be read"},
    ]
    assert content["splits"]["train"]["examples"] == 14 == len(rows(out, "train"))
    assert "left out: train/0000.jpg: the image is" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"val/0020.jpg: the image .*remove image 0 from .*my val"):
        own(tmp_path / "b", lambda _, val: val["images"][0].update(height=7))


def corners(train, _):
    widths = {row["id"]: row["width"] for row in train["images"]}
    for row in train["annotations"]:
        width, (_, y, _, h) = widths[row["image_id"]], row["bbox"]
        row["bbox"] = [0.4 * width, y, 0.9 * width, y + h]


def swap(train, val):
    for data, other in ((train, annotations(*VAL)), (val, annotations(*TRAIN))):
        data.update(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap, "6 of the 6 images of .*my train.json are not in .*another set of images"),
        (corners, r"boxes look like corners .*: 100% of them reach"),
        (lambda train, _: train["annotations"].clear(), "has no boxes at all"),
        (lambda _, val: val["annotations"].clear(), "my val.json has no boxes at all"),
        (lambda _, val: val["categories"].append({"id": 1, "name": "x"}), "for one 1 'x' only in"),
        (lambda train, _: train.pop("annotations"), "has no list 'annotations'"),
    ],
)
def test_each_mistake_takes_one_line(change, message, tmp_path):
    with pytest.raises(UserError, match=message) as refusal:
        own(tmp_path, change)
    assert "\n" not in str(refusal.value)
    assert not list(tmp_path.glob("out/*.tfrecord"))


def test_boxes_that_are_right_can_be_trusted(tmp_path, capsys):
    """Each image has one large object, whose box reaches a little beyond the image."""

    def large(*both):
        for data in both:
            data["annotations"] = [
                {"id": i, "image_id": row["id"], "category_id": 3}
                | {"bbox": [2, 2, row["width"], row["height"]]}
                for i, row in enumerate(data["images"])
            ]

    with pytest.raises(UserError, match="add --trust_boxes if they are right"):
        own(tmp_path / "a", large)
    assert len(rows(own(tmp_path / "b", large, **{"trust-boxes": ""}), "train")) == 16
    printed = capsys.readouterr().out
    assert "warning: train: 16 boxes were cut at the edge of their image, 100% of all" in printed


@pytest.mark.parametrize("fault", ["cut", "no zip", "encrypted", "method", "flipped"])
def test_a_damaged_archive_takes_one_line(fault, archives, tmp_path):
    folder, flags = archives
    path = tmp_path / "train2017.zip"
    data = bytearray((folder / "train2017.zip").read_bytes())
    if fault == "cut":
        data = data[:-60]
    elif fault == "no zip":
        data = b"<html>404</html>" * 99
    elif fault == "flipped":
        at = data.index(image_file(0)[1])
        data[at + 40] ^= 1
    elif fault in ("encrypted", "method"):
        at = data.rindex(b"PK\1\2", 0, data.index(b"train2017/0005.jpg", data.index(b"PK\1\2")))
        data[at + (8 if fault == "encrypted" else 10)] = 1 if fault == "encrypted" else 12
    path.write_bytes(data)
    command = [f"--train_images={path}", *flags[1:], f"--out={tmp_path}/out"]
    with pytest.raises(UserError) as refusal:
        prepare.make("coco", command)
    words = {"encrypted": "encrypted", "method": "0005.jpg", "flipped": "at train2017/0000"}
    assert "train2017.zip" in str(refusal.value)
    assert words.get(fault, "no zip archive") in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--train_images=/no/such.zip"], "there is no /no/such.zip"),
        (["--annotations=OPEN/instances_train2017.json"], "is not a zip or folder; for own images"),
        (["--annotations=OPEN/train2017"], "holds no instances_train2017.json; for own images"),
    ],
)
def test_a_mistake_on_the_command_line_takes_one_line(change, message, archives, tmp_path, capsys):
    folder, flags = archives
    change = [flag.replace("OPEN", f"{folder}/open") for flag in change]
    code, line = leaves("coco", [*flags, f"--out={tmp_path}/out", *change], capsys)
    assert code == 2 and message in line


def photos(folder, kinds, turned):
    """Photos 48 high and 64 wide (square if 0) with these orientations, and their annotations.

    A bright object lies in the upright picture, or else in the stored one, at x 4..24, y 5..25.
    """
    (folder / "photos").mkdir(exist_ok=True)
    data = {"images": [], "categories": [{"id": 1, "name": "x"}], "annotations": []}
    for orientation, square in kinds:
        number = len(list((folder / "photos").iterdir()))
        pixels = np.full((64 if square else 48, 64, 3), 40, np.uint8)
        pixels[5:25, 4:24] = 250
        image, exif = Image.fromarray(pixels), Image.Exif()
        exif[0x0112] = orientation
        if turned:  # what EXIF turns to `pixels`: the inverse of 6 is 8, of the others they are own
            image.getexif()[0x0112] = {6: 8, 8: 6}.get(orientation, orientation)
            image = ImageOps.exif_transpose(image)
        image.save(folder / "photos" / f"{number}.jpg", quality=95, exif=exif)
        row = {"id": number, "file_name": f"{number}.jpg", "height": len(pixels), "width": 64}
        data["images"].append(row)
        box = {"bbox": [4, 5, 20, 20], "category_id": 1}
        data["annotations"].append({"id": number, "image_id": number, **box})
    return data


def brightness(out):
    """The mean of the pixels inside the box of each record; 250 is the object."""
    means = []
    for row in [*rows(out, "train").values(), *rows(out, "val").values()]:
        pixels = np.asarray(Image.open(io.BytesIO(row["image/encoded"][0])).convert("L"))
        sides = np.array([row[key][0] for key in FLOAT_KEYS]) * np.tile(pixels.shape, 2)
        y0, x0, y1, x1 = sides.round().astype(int)
        means.append(pixels[y0:y1, x0:x1].mean())
    return np.array(means)


TELLS = [(3, False), (1, False), (6, False), (8, True), (2, False), (5, True)]
SILENT = [(3, False), (1, False), (8, True), (2, True), (5, True)]


@pytest.mark.parametrize(
    ("kinds", "val", "turned", "flags", "warns"),
    [
        (TELLS, TELLS, True, {}, False),
        (TELLS, TELLS, False, {}, False),
        (SILENT, SILENT, True, {}, True),
        (SILENT, SILENT, False, {"exif": "ignore"}, False),
        (SILENT, SILENT, True, {"exif": "turn"}, False),
        (SILENT, TELLS, False, {}, True),  # as the other file
        (TELLS, TELLS, False, {"exif": "turn"}, False),
        ([(1, False)], [(1, True)], True, {}, False),
    ],
)
def test_one_photo_tells_whether_all_are_turned(kinds, val, turned, flags, warns, tmp_path, capsys):
    """A size shows it for quarter turns of photos that are not square, and for no others."""
    for split, mine in (("train", kinds), ("val", val)):
        (tmp_path / f"{split}.json").write_text(json.dumps(photos(tmp_path, mine, turned)))
    names = {"train_images": "photos", "train_annotations": "train.json"}
    names |= {"val_annotations": "val.json", "out": "out"}
    command = [f"--{flag}={tmp_path}/{name}" for flag, name in names.items()]
    prepare.make("coco", [*command, *(f"--{flag}={value}" for flag, value in flags.items())])
    printed = capsys.readouterr().out
    assert ("warning: train: EXIF turns" in printed) == warns
    assert ("add --exif=" in printed) == warns and printed.count("EXIF turns 4 photos") <= 2
    means = brightness(tmp_path / "out")
    assert len(means) == len(kinds) + len(val)
    right = means > 245
    if flags == {"exif": "turn"} and not turned:  # a size that tells still decides of its photo
        assert right.sum() == sum(row in ((1, False), (6, False)) for row in (*kinds, *val))
    else:
        assert right.all(), means
