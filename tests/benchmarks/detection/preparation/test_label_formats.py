"""Encodings, EXIF, names, splits and key points, the same for all forms of labels."""

import json

import numpy as np
import pytest

from benchmarks.detection.preparation import (
    annotations,
    coco,
    examples,
    label_folders,
    label_formats,
    yolo,
)
from common import cli
from common.errors import UserError
from common.preparation.sources import list_input
from common.text import normal_name
from scripts import prepare
from tests.benchmarks.detection.preparation.test_coco_own import brightness
from tests.benchmarks.detection.preparation.test_coco_own import photos as bright_photos
from tests.benchmarks.detection.preparation.test_label_folders import (
    CAT,
    CAT_LINE,
    CVAT,
    DOG_LINE,
    HEIGHT,
    JPEG,
    OPEN_HEAD,
    WIDTH,
    labelme,
    picture,
    xml,
)
from tests.benchmarks.detection.preparation.test_tables_of_boxes import RECT, TF_HEAD, via
from tests.helpers.preparation import place

RUSSIAN, CHINESE, JAPANESE = ["кот", "пёс"], ["狗", "羊"], ["犬", "猫"]
BOX = [[80, 30], [120, 70]]


def unescaped(content):
    return json.dumps(content, ensure_ascii=False)


def named(form, names):
    """(file with the names, the files) of a folder with an object of each name."""
    rows = [(name, 0, 80, 30, 120, 70) for name in names]
    shapes = [(name, BOX, "rectangle", None) for name in names]
    lines = {"a.txt": "".join(f"{i} .5 .5 .2 .4\n" for i in range(len(names)))}
    table = "".join(f"a.jpg,{WIDTH},{HEIGHT},{name},80,30,120,70\n" for name in names)
    regions = via(*(("a.jpg", RECT, name) for name in names))
    boxes = "".join(
        f'<box label="{name}" xtl="80" ytl="30" xbr="120" ybr="70"></box>' for name in names
    )
    image = f'<image name="a.jpg" width="{WIDTH}" height="{HEIGHT}">{boxes}</image>'
    return {
        "yolo": {"classes.txt": "\n".join(names), **lines},
        "obj.names": {"obj.names": "\r\n".join(names), **lines},
        "data.yaml": {"data.yaml": f"names: [{', '.join(names)}]\n", **lines},
        "voc": {"a.xml": xml("a.jpg", *rows)},
        "cvat": {"annotations.xml": f"<annotations>{image}</annotations>"},
        "labelme": {
            "a.json": json.dumps(json.loads(labelme("a.jpg", *shapes)), ensure_ascii=False)
        },
        "via": {"v.json": unescaped(regions)},
        "csv": {"t.csv": TF_HEAD + table},
        "openimages": {
            "class-descriptions.csv": "".join(f"/m/{i},{name}\n" for i, name in enumerate(names)),
            "train.csv": OPEN_HEAD
            + "".join(f"a,x,/m/{i},1,0.4,0.6,0.3,0.7,0,0\n" for i in range(len(names))),
        },
    }[form]


FORMS = {form: form for form in label_formats.FORMATS} | {"obj.names": "yolo", "data.yaml": "yolo"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "encoding, names",
    [
        ("utf-8", RUSSIAN),
        ("utf-8-sig", CHINESE),
        ("cp1251", RUSSIAN),
        ("gbk", CHINESE),
        ("shift_jis", JAPANESE),
        ("cp1252", ["blé", "maïs"]),
    ],
)
def test_names_are_right_or_refused(tmp_path, form, encoding, names):
    """Never with U+FFFD, and never merged."""
    files = named(form, names)
    file = next(iter(files))
    data = place(tmp_path, {"a.jpg": JPEG, **files, file: files[file].encode(encoding)})
    if encoding.startswith("utf"):
        (content,) = label_folders.read(data, FORMS[form]).splits.values()
        assert {row["name"] for row in content["categories"]} == {*names}
        assert len(content["annotations"]) == 2
        return
    with pytest.raises(UserError) as error:
        label_folders.read(data, FORMS[form])
    assert file in str(error.value) and "iconv" in str(error.value)


@pytest.mark.parametrize("form", ["voc", "cvat", "labelme", "csv", "via", "yolo"])
def test_names_that_look_alike_are_one_category(tmp_path, capsys, monkeypatch, form):
    monkeypatch.setattr(examples, "check_boxes", lambda *_: None)  # one of two images has none
    names = ["caf\u00e9", "cafe\u0301", "Caf\u00e9"]
    place(tmp_path, {"a.jpg": JPEG, "b.jpg": JPEG, **named(form, names)})
    flags = [f"--labels={form}", f"--train_images={tmp_path}", "--validation_fraction=0.5"]
    args = coco.parse(cli.Parser(), [*flags, f"--out={tmp_path}.out"])
    sources = {f"{split}_images": list_input(str(tmp_path), 1) for split in ("train", "val")}
    splits, _, _ = annotations.read_annotations(args, sources)
    kept = [normal_name(name) for _, name in splits["train"].categories]
    assert sorted(kept) == sorted([names[0], names[2]])
    printed = capsys.readouterr().out
    assert "look alike" in printed and "'cafe\\u0301'" in printed


SIZED = {  # a box of 20x20 pixels at 4, 5; None stands for a label without a size
    "yolo": lambda h, w: ("x.txt", f"0 {14 / w} {15 / h} {20 / w} {20 / h}\n"),
    "openimages": lambda h, w: (
        "x.csv",
        f"{OPEN_HEAD}x,x,1,1,{4 / w},{24 / w},{5 / h},{25 / h},0,0\n",
    ),
    "via": lambda h, w: (
        "x.json",
        json.dumps(via(("x.jpg", {**RECT, "x": 4, "y": 5, "width": 20, "height": 20}, "1"))),
    ),
    "voc": lambda h, w: ("x.xml", xml("x.jpg", ("1", 0, 4, 5, 24, 25), size=(w, h))),
    "labelme": lambda h, w: (
        "x.json",
        json.dumps(
            json.loads(labelme("x.jpg", ("1", [[4, 5], [24, 25]], "rectangle", None)))
            | {"imageHeight": h, "imageWidth": w}
        ),
    ),
    "csv": lambda h, w: ("x.csv", f"{TF_HEAD}x.jpg,{w},{h},1,4,5,24,25\n"),
}


@pytest.mark.parametrize("form", SIZED)
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("flag", ["", "turn", "ignore"])
def test_exif_by_sizes_or_by_the_flag(tmp_path, capsys, form, turned, flag):
    """The object lies in the photo as EXIF turns it, or in the stored one; two photos of a kind."""
    bright_photos(tmp_path, [(6, False)] * 2, turned)
    has_size = form in ("voc", "labelme", "csv")
    for i in range(2):
        file, text = SIZED[form](48, 64)
        path = tmp_path / "photos" / file.replace("x", str(i), 1)
        path.write_text(text.replace("x.jpg", f"{i}.jpg").replace("\nx,", f"\n{i},"))
    command = ["coco", f"--labels={form}", f"--train_images={tmp_path}/photos"]
    command += [f"--exif={flag}"] * bool(flag)
    prepare.make(command[0], [*command[1:], f"--out={tmp_path}/out"])
    printed = capsys.readouterr().out
    assert ("no size tells" in printed) == (not has_size and not flag)
    assert ("as they are stored" in printed) == (has_size and not turned and not flag)
    right = brightness(tmp_path / "out") > 245
    assert right.all() == (has_size or turned == (flag != "ignore")), right


def rows_of(rows):
    return ["".join(f"0 {' '.join(f'{x:.6g}' for x in row)}\n" for row in rows).encode()]


def poses(points, size, seen=(0, 1, 2)):
    """Boxes anywhere with key points inside of them."""
    random = np.random.default_rng(points)
    for _ in range(40):
        side = random.uniform(0.05, 0.4, 2)
        middle = random.uniform(side / 2, 1 - side / 2)
        keys = middle + side * random.uniform(-0.5, 0.5, (points, 2))
        more = random.choice(seen, (points, size - 2))
        yield [*middle, *side, *np.concatenate([keys, more], 1).ravel()]


def outlines(points, radius=(0.02, 0.2), noise=0.2):
    """Shapes around a middle anywhere."""
    random = np.random.default_rng(points)
    for _ in range(40):
        angles = np.arange(points) * 2 * np.pi / points + random.uniform(0, 6)
        lengths = random.uniform(*radius) * random.uniform(1 - noise, 1 + noise, points)
        shape = np.stack([np.cos(angles), np.sin(angles)], 1) * lengths[:, None]
        yield (shape + random.uniform(0.3, 0.7, 2)).ravel()


@pytest.mark.parametrize(
    "rows, expected",
    [
        *((poses(points, 3), "key points") for points in (1, 2, 4, 17, 21)),
        *((poses(points, 2), "key points") for points in (1, 3, 5, 17)),
        (poses(4, 3, seen=(0.2, 0.93)), "key points"),
        *((outlines(points), "") for points in (3, 5, 8, 24)),
        *((outlines(points, (0.1, 0.1), 0), "") for points in (3, 5, 8, 24)),
        (outlines(4), "corners"),
        ([*outlines(4), *outlines(5)], ""),
        ([[*row, *row[:2]] for row in poses(5, 2)], ""),  # the advice for outlines
        ([[0.5, 0.5, 0.2, 0.2]] * 9, ""),
        ([[0.4, 0.4, 0.6, 0.4, 0.6, 0.6, 0.4, 0.6]] * 24, "corners"),
    ],
)
def test_what_the_numbers_of_yolo_mean(rows, expected):
    assert yolo.shapes_of(rows_of(rows)) == expected


def test_key_points_and_corners_are_told(tmp_path):
    pose = "0 0.5 0.5 0.2 0.4 0.45 0.4 1 0.55 0.6 2 0 0 0 0.5 0.6 1\n"
    turned = "0 0.4 0.5 0.5 0.3 0.6 0.5 0.5 0.7\n"
    for text, key in ((pose, "key points"), (turned, "four corners")):
        data = place(tmp_path, {"a.jpg": JPEG, "a.txt": text, "classes.txt": "cat\n"})
        assert not label_folders.detect(data)[0].masks
        splits, notes, _ = label_folders.read(data, "yolo")
        (content,) = splits.values()
        assert content["annotations"][0]["bbox"] == pytest.approx(CAT[1])
        assert any(key in note for note in notes)


@pytest.mark.parametrize(
    "files",
    [
        {"Training/a.jpg": JPEG, "Training/a.txt": CAT_LINE}
        | {"Testing/b.jpg": JPEG, "Testing/b.txt": DOG_LINE},
        {"images/trainset/a.jpg": JPEG, "labels/trainset/a.txt": CAT_LINE}
        | {"images/dev/b.jpg": JPEG, "labels/dev/b.txt": DOG_LINE},
        {"a.jpg": JPEG, "a.txt": CAT_LINE, "b.jpg": JPEG, "b.txt": DOG_LINE}
        | {"train2017.txt": "a.jpg\n", "eval.txt": "b.jpg\n"},
        {"x/a.jpg": JPEG, "x/a.txt": CAT_LINE, "y/b.jpg": JPEG, "y/b.txt": DOG_LINE}
        | {"data.yaml": "train: x\nvalid: y\nnames: [cat, dog]\n"},
        {"train_1.jpg": JPEG, "train_1.txt": CAT_LINE, "val_1.jpg": JPEG, "val_1.txt": DOG_LINE}
        | {"dev.txt": "val_1.jpg\n", "trainval.txt": "train_1.jpg\n"},
    ],
)
def test_splits_have_many_names(tmp_path, files):
    data = place(tmp_path, {"classes.txt": "cat\ndog\n", **files})
    splits = label_folders.read(data, "yolo").splits
    assert {name: len(content["images"]) for name, content in splits.items()} == {
        "train": 1,
        "val": 1,
    }
    assert {row["category_id"] for row in splits["val"]["annotations"]} == {2}


def test_images_in_folders_without_labels_are_named(tmp_path):
    files = {"a/a.jpg": JPEG, "a/a.txt": CAT_LINE, "more/b.jpg": picture(), "classes.txt": "cat\n"}
    notes = label_folders.read(place(tmp_path, files), "yolo").notes
    assert any("left out: 1 image" in note and "more/b.jpg" in note for note in notes)


def test_cvat_is_read_with_and_without_a_declaration(tmp_path):
    files = {"images/Train/a.jpg": JPEG, "images/Validation/a.jpg": JPEG}
    for text in (CVAT, CVAT.partition("\n")[2]):
        data = place(tmp_path, {**files, "annotations.xml": text})
        assert set(label_folders.read(data, "cvat").splits) == {"train", "val"}
