"""Labels of other tools in COCO's form: folders as the tools export them, boxes by hand."""

import io
import json
import sys

import numpy as np
import pytest
from PIL import Image

from benchmarks.detection.preparation import label_folders
from common.errors import UserError
from tests.helpers.preparation import place

WIDTH, HEIGHT = 200, 100


def picture(orientation=1, kind="JPEG"):
    """An image of WIDTH x HEIGHT pixels; EXIF may turn it."""
    out, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (WIDTH, HEIGHT)).save(out, kind, exif=exif)
    return out.getvalue()


JPEG = picture()


def objects(content):
    """[(category, box, crowd, polygons)] by image."""
    names = {row["id"]: row["name"] for row in content["categories"]}
    rows = {row["id"]: (row["file_name"], []) for row in content["images"]}
    for row in content["annotations"]:
        box = [round(value, 6) for value in row["bbox"]]
        polygons = [[round(value, 6) for value in p] for p in row.get("segmentation", [])]
        rows[row["image_id"]][1].append((names[row["category_id"]], box, row["iscrowd"], polygons))
    return dict(rows.values())


def plain(label, *box):
    return (label, [*box], 0, [])


CAT, DOG = plain("cat", 80, 30, 40, 40), plain("dog", 0, 0, 100, 50)
CAT_LINE, DOG_LINE = "0 0.5 0.5 0.2 0.4\n", "1 0.25 0.25 0.5 0.5\n"
TRIANGLE_LINE = "1 0.1 0.1 0.2 0.1 0.2 0.3\n"
TRIANGLE = ("dog", [20, 10, 20, 20], 0, [[20, 10, 40, 10, 40, 30]])
NAMES = "names: ['cat', 'dog']\n"
YAML = "train: ../train/images\nval: ../valid/images\ntest: ../test/images\n\nnc: 2\n"
YAML += NAMES
IN_FOLDERS = {"images/train/a.jpg": JPEG, "images/val/b.jpg": JPEG}
IN_FOLDERS |= {"labels/train/a.txt": CAT_LINE, "labels/val/b.txt": DOG_LINE}
TWO = {"train": {"images/train/a.jpg": [CAT]}, "val": {"images/val/b.jpg": [DOG]}}


def xml(file, *rows, size=(WIDTH, HEIGHT)):
    """An annotation as LabelImg writes it: rows are name, difficult, xmin, ymin, xmax, ymax."""
    text = "".join(
        f"<object><name>{name}</name><pose>Unspecified</pose><truncated>0</truncated>"
        f"<difficult>{difficult}</difficult><bndbox><xmin>{x0}</xmin><ymin>{y0}</ymin>"
        f"<xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox></object>"
        for name, difficult, x0, y0, x1, y1 in rows
    )
    return (
        f"<annotation>\n<folder>x</folder>\n<filename>{file}</filename>\n"
        f"<path>C:\\Users\\me\\{file}</path>\n<size><width>{size[0]}</width>"
        f"<height>{size[1]}</height><depth>3</depth></size>\n{text}</annotation>\n"
    )


CAT_XML, DOG_XML = ("cat", 0, 80, 30, 120, 70), ("dog", 0, 0, 0, 100, 50)
CVAT = f"""<?xml version="1.0" encoding="utf-8"?>
<annotations>
  <version>1.1</version>
  <meta><task><id>1</id><mode>annotation</mode></task></meta>
  <image id="0" name="a.jpg" subset="Train" width="{WIDTH}" height="{HEIGHT}">
    <box label="cat" source="manual" occluded="0" xtl="80.00" ytl="30.00" xbr="120.00" ybr="70.00"
     z_order="0"><attribute name="colour">red</attribute></box>
    <polygon label="dog" occluded="0" points="20.00,10.00;40.00,10.00;40.00,30.00" z_order="0">
    </polygon>
    <ellipse label="dog" cx="1" cy="2" rx="3" ry="4"/>
    <box label="cat" rotation="45" xtl="1" ytl="1" xbr="9" ybr="9"/>
    <tag label="indoor"/>
  </image>
  <image id="1" name="a.jpg" subset="Validation" width="{WIDTH}" height="{HEIGHT}">
    <box label="dog" occluded="0" xtl="0.00" ytl="0.00" xbr="100.00" ybr="50.00"></box>
  </image>
</annotations>
"""


def labelme(path, *shapes):
    """A file as LabelMe writes it: shapes are label, points, type, group."""
    rows = [
        {"label": label, "points": points, "group_id": group, "shape_type": kind, "flags": {}}
        for label, points, kind, group in shapes
    ]
    content = {"version": "5.4.1", "flags": {}, "shapes": rows, "imagePath": path}
    return json.dumps(
        content | {"imageData": None, "imageHeight": HEIGHT, "imageWidth": WIDTH}, indent=2
    )


OPEN_HEAD = "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsGroupOf\n"
OPEN_CAT, OPEN_DOG = "/m/01yrx,1,0.4,0.6,0.3,0.7,0,0\n", "/m/0bt9lr,1,0,0.5,0,0.5,0,1\n"

FOLDERS = {
    "yolo: images/train": ("yolo", IN_FOLDERS | {"data.yaml": "names:\n  0: cat\n  1: dog\n"}, TWO),
    "yolo: train/images": (
        "yolo",
        {"data.yaml": YAML, "README.roboflow.txt": "pets\n1 2 3 4 5"}
        | {"train/images/a_jpg.rf.1a.JPG": JPEG, "train/labels/a_jpg.rf.1a.txt": CAT_LINE}
        | {"valid/images/b.png": JPEG, "valid/labels/b.TXT": "\ufeff1 .25 .25 .5 .5\r\n\r\n"}
        | {"test/images/c.jpg": JPEG, "test/labels/c.txt": CAT_LINE},
        {"train": {"train/images/a_jpg.rf.1a.JPG": [CAT]}, "val": {"valid/images/b.png": [DOG]}},
    ),
    "yolo: lists of another machine": (
        "yolo",
        {"data.yaml": "path: D:\\sets\\pets\ntrain: train.txt\nval: [val.txt]\nnames: [cat, dog]\n"}
        | {"train.txt": "./images/a.jpg\n", "val.txt": "D:\\sets\\pets\\images\\b.jpg\n"}
        | {"images/a.jpg": JPEG, "images/b.jpg": JPEG, "images/c.jpg": JPEG}
        | {"labels/a.txt": CAT_LINE, "labels/b.txt": TRIANGLE_LINE},
        {"train": {"images/a.jpg": [CAT]}, "val": {"images/b.jpg": [TRIANGLE]}},
    ),
    "yolo: darknet": (
        "yolo",
        {"obj.data": "classes = 2\ntrain = data/train.txt\nnames = data/obj.names\nbackup = b/\n"}
        | {"obj.names": "cat\r\ndog\r\n", "train.txt": "data/obj_train_data/a.jpg\n"}
        | {"obj_train_data/a.jpg": JPEG, "obj_train_data/a.txt": CAT_LINE + TRIANGLE_LINE},
        {"train": {"obj_train_data/a.jpg": [CAT, TRIANGLE]}},
    ),
    "yolo: beside, test for val": (
        "yolo",
        {"train/_darknet.labels": "cat\ndog\n", "train/a.jpg": JPEG, "train/a.txt": CAT_LINE}
        | {"train/empty.jpg": JPEG, "train/empty.txt": "", "train/none.jpg": JPEG}
        | {"test/b.jpg": JPEG, "test/b.txt": DOG_LINE},
        {
            "train": {"train/a.jpg": [CAT], "train/empty.jpg": [], "train/none.jpg": []},
            "val": {"test/b.jpg": [DOG]},
        },
    ),
    "yolo: key points": (
        "yolo",
        {"d.yaml": "kpt_shape: [1, 3]\nnames: [cat]\n", "a.jpg": JPEG}
        | {"a.txt": "0 0.5 0.5 0.2 0.4 0.3 0.3 2.0\n"},
        {"train": {"a.jpg": [CAT]}},
    ),
    "voc": (
        "voc",
        {"V/JPEGImages/1.jpg": JPEG, "V/Annotations/1.xml": xml("1.jpg", CAT_XML, DOG_XML)}
        | {"V/JPEGImages/2.jpg": JPEG, "V/Annotations/2.xml": xml("2.jpg", ("dog", 1, 1, 2, 3, 5))}
        | {"V/JPEGImages/3.jpg": JPEG, "V/Annotations/3.xml": xml("3.jpg", CAT_XML)}
        | {"V/SegmentationClass/1.png": picture(kind="PNG")}
        | {"V/ImageSets/Main/trainval.txt": "1\n2\n", "V/ImageSets/Main/val.txt": "2\n"}
        | {"V/ImageSets/Main/train.txt": "1\n", "V/ImageSets/Main/test.txt": "3\n"}
        | {"V/ImageSets/Main/cat_train.txt": "1  1\n"},
        {
            "train": {"V/JPEGImages/1.jpg": [CAT, DOG]},
            "val": {"V/JPEGImages/2.jpg": [("dog", [1, 2, 2, 3], 1, [])]},
        },
    ),
    "voc: beside, without a size, a name that is none": (
        "voc",
        {"train/a.JPG": JPEG, "train/a.XML": xml("a.JPG", CAT_XML, size=(0, 0))}
        | {"valid/b.jpg": JPEG, "valid/b.xml": xml("old name.jpg", DOG_XML)}
        | {"test/c.jpg": JPEG},
        {"train": {"train/a.JPG": [CAT]}, "val": {"valid/b.jpg": [DOG]}},
    ),
    "cvat": (
        "cvat",
        {"annotations.xml": CVAT, "images/Train/a.jpg": JPEG, "images/Validation/a.jpg": JPEG},
        {
            "train": {"images/Train/a.jpg": [CAT, TRIANGLE]},
            "val": {"images/Validation/a.jpg": [DOG]},
        },
    ),
    "labelme": (
        "labelme",
        {"a.jpg": JPEG, "photos/b.jpg": JPEG}
        | {
            "a.json": labelme(
                "a.jpg",
                ("cat", [[120, 70], [80, 30]], "rectangle", None),
                ("cat", [[5, 5], [9, 9]], "circle", None),
                ("__ignore__", [[5, 5], [9, 9]], "rectangle", None),
                ("dog", [[20, 10], [40, 10], [40, 30]], "polygon", 7),
                ("dog", [[50, 50], [60, 50], [60, 40]], "polygon", 7),
            ),
            "json/b_1.json": labelme(
                "..\\photos\\b.jpg", ("dog", [[20, 10], [40, 10], [40, 30]], "polygon", None)
            ),
        },
        {
            "train": {
                "a.jpg": [
                    CAT,
                    ("dog", [20, 10, 40, 40], 0, [*TRIANGLE[3], [50, 50, 60, 50, 60, 40]]),
                ],
                "photos/b.jpg": [TRIANGLE],
            }
        },
    ),
    "open images": (
        "openimages",
        {"class-descriptions-boxable.csv": "/m/01yrx,cat\n/m/0bt9lr,dog\n/m/0,bird\n"}
        | {"oidv6-train-annotations-bbox.csv": f"{OPEN_HEAD}0a,xclick,{OPEN_CAT}0b,x,{OPEN_CAT}"}
        | {"validation-annotations-bbox.csv": f"{OPEN_HEAD}0c,xclick,{OPEN_DOG}"}
        | {"train/0a.jpg": JPEG, "validation/0c.jpg": JPEG},
        {
            "train": {"train/0a.jpg": [CAT]},
            "val": {"validation/0c.jpg": [("dog", [0, 0, 100, 50], 1, [])]},
        },
    ),
    "yolo: data.yaml names the splits": (
        "yolo",
        {
            "pets/data.yaml": "path: D:\\pets\ntrain: [images/a]\nval: images/b\n"
            f"test: held_out.txt\n{NAMES}",
            "pets/held_out.txt": "./images/c/c.jpg\n",
            "train.txt": "images/c/c.jpg\n",
        }
        | {f"pets/images/{name}/{name}.jpg": JPEG for name in "abc"}
        | {f"pets/labels/{name}/{name}.txt": CAT_LINE for name in "abc"},
        {"train": {"pets/images/a/a.jpg": [CAT]}, "val": {"pets/images/b/b.jpg": [CAT]}},
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_each_form_becomes_cocos(tmp_path, case):
    form, files, expected = FOLDERS[case]
    data = place(tmp_path, files)
    assert [row.format for row in label_folders.detect(data)] == [form]
    splits = label_folders.read(data, form).splits
    assert {name: objects(content) for name, content in splits.items()} == expected
    for content in splits.values():
        assert [row["name"] for row in content["categories"]] in (["cat", "dog"], ["cat"])
        assert all((r["width"], r["height"]) == (WIDTH, HEIGHT) for r in content["images"])
        for row in content["annotations"]:
            triangles = [np.reshape(p, (3, 2)) for p in row.get("segmentation", [])]
            areas = [abs(np.linalg.det(t[1:] - t[0])) / 2 for t in triangles]
            assert row["area"] == pytest.approx(sum(areas) or np.prod(row["bbox"][2:]))


MANY = CAT_LINE * 24
ODD = {
    "labels without an image": (
        IN_FOLDERS | {"labels/train/z.txt": CAT_LINE, "images/val/z.jpg": JPEG},
        ("left out: 1 of 3 labels", "labels/train/z.txt"),
        {**TWO, "val": {**TWO["val"], "images/val/z.jpg": []}},
    ),
    "images without labels": (
        IN_FOLDERS | {"images/val/z.jpg": JPEG},
        ("val: 1 of 2 images without labels",),
        {**TWO, "val": {**TWO["val"], "images/val/z.jpg": []}},
    ),
    "a class beyond the names": (
        {"a.jpg": JPEG, "data.yaml": "names: [cat]\n"}
        | {"a.txt": f"{MANY}\n7 0.5 0.5 0.1 0.1\n0 nan .5 .1 .1"},
        ("2 of 26 objects", "a.txt:26", "class 7", "1 of data.yaml"),
        {"train": {"a.jpg": [CAT] * 24}},
    ),
    "a data.yaml of another layout": (
        IN_FOLDERS
        | {"data.yaml": f"train: /content/train/images\nval: C:\\valid\\images\n{NAMES}"},
        ("2 images or folders", "/content/train/images of data.yaml"),
        TWO,
    ),
    "one folder for both splits": (
        IN_FOLDERS | {"data.yaml": f"train: images/train\nval: images/train\n{NAMES}"},
        ("1 image of both train and val: a new split",),
        {"train": TWO["train"] | TWO["val"]},
    ),
    "an image in both lists": (
        {"images/a.jpg": JPEG, "images/b.jpg": JPEG, "images/c.jpg": JPEG, "labels/a.txt": CAT_LINE}
        | {"labels/b.txt": DOG_LINE, "train.txt": "images/a.jpg\nimages/b.jpg", "val.txt": "b.jpg"},
        ("1 image of both train and val: train goes", "left out: 1 image (0 of test)"),
        {"train": {"images/a.jpg": [CAT]}, "val": {"images/b.jpg": [DOG]}},
    ),
    "test beside val": (
        IN_FOLDERS | {"images/test/c.jpg": JPEG, "labels/test/c.txt": CAT_LINE},
        ("left out: 1 image (1 of test)",),
        TWO,
    ),
    "two labels for an image": (
        {"images/a.jpg": JPEG, "images/a.txt": CAT_LINE, "labels/a.txt": CAT_LINE},
        ("left out: 1 of 2 labels", "labels/a.txt"),
        {"train": {"images/a.jpg": [CAT]}},
    ),
    "no names": (
        IN_FOLDERS,
        ("classes.txt",),
        {"train": {"images/train/a.jpg": [("0", *CAT[1:])]}}
        | {"val": {"images/val/b.jpg": [("1", *DOG[1:])]}},
    ),
    "an image that is none": (
        IN_FOLDERS | {"images/train/z.jpg": b"\xff\xd8\xff", "labels/train/z.txt": CAT_LINE},
        ("left out: 1 image, for", "images/train/z.jpg"),
        TWO,
    ),
    "boxes and polygons": (
        {"a.jpg": JPEG, "a.txt": CAT_LINE + TRIANGLE_LINE},
        ("1 of 2 objects", "no polygon"),
        {"train": {"a.jpg": [CAT, TRIANGLE]}},
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_what_is_odd_is_a_note(tmp_path, case):
    files, keys, expected = ODD[case]
    if case != "no names" and not {"data.yaml", "classes.txt"} & {*files}:
        files = {**files, "classes.txt": "cat\ndog\n"}
    splits, notes, _ = label_folders.read(place(tmp_path, files), "yolo")
    assert {name: objects(content) for name, content in splits.items()} == expected
    assert all(any(key in note for note in notes) for key in keys), notes


def cvat_image(name, shapes=""):
    return f'<image id="0" name="{name}" width="{WIDTH}" height="{HEIGHT}">{shapes}</image>'


ONE_BOX = '<box label="cat" xtl="80" ytl="30" xbr="120" ybr="70"/>'
CIRCLE = labelme("d.jpg", ("cat", [[5, 5], [9, 9]], "circle", None))
SQUARE = labelme("a.jpg", ("cat", [[120, 70], [80, 30]], "rectangle", None))
LABELS = {  # of a with an object, of b that say that it has none, of d that cannot be read
    "yolo": {"a.txt": CAT_LINE * 19, "b.txt": "", "d.txt": "0 nan 1 1 1"},
    "voc": {"a.xml": xml("a.jpg", *[CAT_XML] * 19), "b.xml": xml("b.jpg")}
    | {"d.xml": xml("d.jpg", ("cat", 0, "?", 1, 2, 3))},
    "cvat": {
        "x.xml": f"<annotations>{cvat_image('a.jpg', ONE_BOX)}{cvat_image('b.jpg')}"
        f"{cvat_image('d.jpg', '<ellipse/>')}</annotations>"
    },
    "labelme": {"a.json": SQUARE, "b.json": labelme("b.jpg"), "d.json": CIRCLE},
    "csv": {
        "x.csv": "filename,xmin,ymin,xmax,ymax,class\n"
        + "a.jpg,80,30,120,70,cat\n" * 19
        + "b.jpg,,,,,\nd.jpg,80,?,120,70,cat\n"
    },
}


@pytest.mark.parametrize("form", LABELS)
def test_which_images_without_objects_are_trained_on(tmp_path, form):
    """Those of which labels say it, and of YOLO's those without labels, as ultralytics does."""
    data = place(tmp_path, {f"{name}.jpg": JPEG for name in "abcd"} | LABELS[form])
    splits, notes, _ = label_folders.read(data, form)
    rows = {row["file_name"]: row.get("labelled", True) for row in splits["train"]["images"]}
    unknown = {"d.jpg"} if form == "yolo" else {"c.jpg", "d.jpg"}
    assert {name for name, labelled in rows.items() if not labelled} == unknown and len(rows) == 4
    number = "1 image" if form == "yolo" else "2 images"
    assert any(note.startswith(f"{number} without labels that can be read") for note in notes)


@pytest.mark.parametrize(
    "form, kinds", [("cvat", ("ellipse", "turned box")), ("labelme", ("circle", "__ignore__"))]
)
def test_skipped_shapes_are_counted(tmp_path, form, kinds):
    notes = label_folders.read(place(tmp_path, FOLDERS[form][1]), form).notes
    assert all(any(f"1 shape '{kind}'" in note for note in notes) for kind in kinds), notes
    assert not any("'tag'" in note for note in notes)


REFUSED = {
    "pixels": (
        "yolo",
        {"a.jpg": JPEG, "a.txt": "0 80 30 40 40\n"},
        ("a.txt:1", "0 80 30", "share"),
    ),
    "no image": (
        "yolo",
        {"b.jpg": JPEG, "labels/a.txt": CAT_LINE},
        ("labels/a.txt", "without an image"),
    ),
    "all empty": ("yolo", {"a.jpg": JPEG, "a.txt": ""}, ("no", "1 labels", "object")),
    "yaml": ("yolo", {"a.jpg": JPEG, "data.yaml": "names: [cat"}, ("data.yaml", "not YAML")),
    "damaged voc": (
        "voc",
        {"a.jpg": JPEG, "a.xml": xml("a.jpg", CAT_XML)[:-40]},
        ("a.xml", "damaged"),
    ),
    "inverted": (
        "voc",
        {"a.jpg": JPEG, "a.xml": xml("a.jpg", ("cat", 0, 9, 9, 1, 1))},
        ("object 1",),
    ),
    "damaged cvat": ("cvat", {"a.jpg": JPEG, "x.xml": CVAT[:-20]}, ("x.xml", "damaged")),
    "video": (
        "cvat",
        {"a.jpg": JPEG, "x.xml": '<annotations><track id="0" label="cat"></track></annotations>'},
        ("x.xml", "CVAT for images 1.1"),
    ),
    "damaged labelme": (
        "labelme",
        {"a.jpg": JPEG, "a.json": '{"shapes": ['},
        ("a.json", "damaged"),
    ),
    "open images: none": (
        "openimages",
        {"b.jpg": JPEG, "train.csv": f"{OPEN_HEAD}a,x,{OPEN_CAT}"},
        ("no image has a label",),
    ),
    "yolo: no labels": ("yolo", {"b.jpg": JPEG}, ("give the folder that", "images and labels")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_one_line(tmp_path, case):
    form, files, keys = REFUSED[case]
    with pytest.raises(UserError) as error:
        label_folders.read(place(tmp_path, files), form)
    assert all(key in str(error.value) for key in keys), error.value
    assert "\n" not in str(error.value)


def test_globox_is_named_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "globox", None)
    data = place(tmp_path, IN_FOLDERS)
    assert label_folders.detect(data)
    with pytest.raises(UserError, match="pip install globox"):
        label_folders.read(data, "yolo")


def test_sizes_are_those_of_turned_photos(tmp_path):
    """As the tools show the photos; ultralytics takes the size so, too."""
    (content,) = label_folders.read(
        place(tmp_path, {"a.jpg": picture(orientation=6), "a.txt": CAT_LINE}), "yolo"
    ).splits.values()
    assert (content["images"][0]["width"], content["images"][0]["height"]) == (HEIGHT, WIDTH)
    assert content["annotations"][0]["bbox"] == pytest.approx([40, 60, 20, 80])


POLYGON_LINE = "0 .1 .1 .2 .1 .3 .2 .2 .3 .1 .2\n"
POLYGONS = CVAT.replace("<box", "<cuboid")


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"a.txt": POLYGON_LINE * 2}, {"yolo": (1, True)}),
        ({"a.txt": POLYGON_LINE + CAT_LINE}, {"yolo": (1, False)}),
        ({"a.txt": POLYGON_LINE, "d.yaml": "kpt_shape: [3, 2]\nnames: [a]"}, {"yolo": (1, False)}),
        ({"a.txt": CAT_LINE, "d.yaml": "names: [a"}, {"yolo": (1, False)}),  # `read` refuses it
        ({"a.txt": "0 .1 .1 .2 .1 .2 .3 .1 .3\n"}, {"yolo": (1, False)}),  # an oriented box
        ({"annotations.xml": POLYGONS}, {"cvat": (1, True)}),
        ({"annotations.xml": CVAT, "a.txt": CAT_LINE}, {"yolo": (1, False), "cvat": (1, False)}),
        ({"a.xml": xml("a.jpg", CAT_XML), "annotations.xml": CVAT}, {"voc": 1, "cvat": 1}),
        (
            {"a.json": labelme("a.jpg", ("x", [[0, 0]] * 3, "polygon", None))},
            {"labelme": (1, True)},
        ),
        ({"a.txt": "A cat on 2 mats.\n", "train.txt": "a.jpg\n", "data.yaml": "x: 1\n"}, {}),
        ({"_annotations.coco.json": '{"images": [], "annotations": []}', "a.csv": "a,b\n"}, {}),
    ],
)
def test_forms_say_what_is_there(tmp_path, files, expected):
    rows = label_folders.detect(place(tmp_path, {"a.jpg": JPEG, **files}))
    seen = {row.format: (row.num_files, row.masks) for row in rows}
    assert seen == {k: v if isinstance(v, tuple) else (v, False) for k, v in expected.items()}
    assert all(any(name in row.evidence for name in files) for row in rows)
