"""Tables of boxes and VIA's files in COCO's form: as the tools write them, boxes by hand."""

import json

import pytest

from benchmarks.detection.preparation import label_folders, recognise
from common.errors import UserError
from scripts import prepare
from tests.benchmarks.detection.preparation.test_label_folders import (
    CAT,
    DOG,
    JPEG,
    TRIANGLE,
    labelme,
    objects,
    plain,
    xml,
)
from tests.helpers.preparation import place

RECT = {"name": "rect", "x": 80, "y": 30, "width": 40, "height": 40}
CORNERS = {"name": "polygon", "all_points_x": [20, 40, 40], "all_points_y": [10, 10, 30]}


def via(*rows, attribute="type", **more):
    """VIA's JSON: rows are file, shape, label."""
    images = {}
    for file, shape, label in rows:
        image = images.setdefault(f"{file}99", {"filename": file, "size": 99, "regions": []})
        attributes = {attribute: label, **more} if label else {**more}
        region = {"shape_attributes": shape, "region_attributes": attributes}
        image["regions"] += [region] if shape else []
    return images


VIA = via(("a.jpg", RECT, "cat"), ("a.jpg", CORNERS, "dog"), ("b.jpg", None, ""))
OLD = json.loads(json.dumps(VIA))
for each in OLD.values():
    each["regions"] = {str(i): region for i, region in enumerate(each["regions"])}
TICKED = via(("a.jpg", RECT, {"cat": True, "dog": False}), ("b.jpg", None, ""))
NAMELESS = via(("a.jpg", RECT, ""), ("a.jpg", {"name": "circle", "cx": 1, "cy": 2, "r": 3}, ""))
BOTH = {"a.jpg": [CAT, TRIANGLE], "b.jpg": []}
TF_HEAD = "filename,width,height,class,xmin,ymin,xmax,ymax\n"
SPLIT = {"train": {"a.jpg": [CAT]}, "val": {"b.jpg": [DOG]}}
OBJECT = plain("object", *CAT[1])

TABLES = {
    "via": ("via", {"via_region_data.json": VIA}, {"train": BOTH}),
    "via 1": ("via", {"v.json": OLD}, {"train": BOTH}),
    "via project": (
        "via",
        {"p.json": {"_via_settings": {"ui": {}}, "_via_img_metadata": VIA, "_via_attributes": {}}},
        {"train": BOTH},
    ),
    "via: boxes to tick": ("via", {"v.json": TICKED}, {"train": {"a.jpg": [CAT], "b.jpg": []}}),
    "via: no attribute": ("via", {"v.json": NAMELESS}, {"train": {"a.jpg": [OBJECT], "b.jpg": []}}),
    "via: other attributes": (
        "via",
        {"v.json": via(("a.jpg", RECT, "cat"), attribute="Label", occluded="no")},
        {"train": {"a.jpg": [CAT], "b.jpg": []}},
    ),
    "via: its own attributes": (
        "via",
        {"v.json": via(("a.jpg", RECT, "cat"), name="not_defined", image_quality={})},
        {"train": {"a.jpg": [CAT], "b.jpg": []}},
    ),
    "via: a number": (
        "via",
        {"v.json": via(("a.jpg", RECT, 7))},
        {"train": {"a.jpg": [plain("7", *CAT[1])], "b.jpg": []}},
    ),
    "via: splits": (
        "via",
        {"Training/a.jpg": JPEG, "Testing/b.jpg": JPEG}
        | {"Training/via_region_data.json": via(("a.jpg", RECT, "cat"))}
        | {"Testing/via_region_data.json": via(("b.jpg", RECT, "cat"))},
        {"train": {"Training/a.jpg": [CAT]}, "val": {"Testing/b.jpg": [CAT]}},
    ),
    "tensorflow, in folders": (
        "csv",
        {"train/a.jpg": JPEG, "valid/b.jpg": JPEG}
        | {"train/_annotations.csv": f"{TF_HEAD}a.jpg,200,100,cat,80,30,120,70\n"}
        | {"valid/_annotations.csv": f"\ufeff{TF_HEAD}b.jpg,200,100,dog,0,0,100,50\r\n"},
        {"train": {"train/a.jpg": [CAT]}, "val": {"valid/b.jpg": [DOG]}},
    ),
    "tensorflow, by the files' names": (
        "csv",
        {"train_labels.csv": f"{TF_HEAD}a.jpg,200,100,cat,80,30,120,70\n"}
        | {"test_labels.csv": f"{TF_HEAD}b.jpg,200,100,dog,0,0,100,50\n"},
        SPLIT,
    ),
    "a column of splits, semicolons": (
        "csv",
        {"all.csv": "Image;Left;Top;Right;Bottom;Label;Subset\na;80;30;120;70;cat;Training\n"}
        | {"b.csv": "image_id;x_min;x_max;y_min;y_max;class_name;set\nb;0;100;0;50;dog;dev\n"},
        SPLIT,
    ),
    "vott": (
        "csv",
        {"v.csv": '"image","xmin","ymin","xmax","ymax","label"\n"a.jpg",80,30,120.0,70,"cat"\n'},
        {"train": {"a.jpg": [CAT], "b.jpg": []}},
    ),
    "no classes": (
        "csv",
        {"v.csv": "image,x1,y1,x2,y2,age\na.jpg,80,30,120,70,8\n"},
        {"train": {"a.jpg": [OBJECT], "b.jpg": []}},
    ),
    "a type": (
        "csv",
        {"v.csv": "filename,type,left,top,right,bottom\na.jpg,cat,80,30,120,70\n"},
        {"train": {"a.jpg": [CAT], "b.jpg": []}},
    ),
    "gtsrb and stanford cars": (
        "csv",
        {"cars.csv": "fname,bbox_x1,bbox_y1,bbox_x2,bbox_y2,class\nb.jpg,0,0,100,50,dog\n"}
        | {"GT.csv": "Filename;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId\na.jpg;80;30;120;70;cat\n"},
        {"train": {"a.jpg": [CAT], "b.jpg": [DOG]}},
    ),
}


@pytest.mark.parametrize("case", TABLES)
def test_each_table_becomes_cocos(tmp_path, case):
    form, files, expected = TABLES[case]
    if not any(content is JPEG for content in files.values()):
        files = files | {"a.jpg": JPEG, "b.jpg": JPEG}
    data = place(tmp_path, files)
    assert [row.format for row in label_folders.detect(data)] == [form]
    result = label_folders.read(data, form)
    assert {name: objects(content) for name, content in result.splits.items()} == expected
    notes = "".join(result.notes)
    assert ("(not taken: age): all objects are 'object'" in notes) == (case == "no classes")
    assert ("'object'" in notes) == (OBJECT in expected["train"].get("a.jpg", ()))
    assert ("shape 'circle'" in notes) == ("no attribute" in case)
    assert ("not occluded" in notes) == ("other" in case)


def test_other_tables_are_none_of_boxes(tmp_path):
    tables = (
        "image,label\na.jpg,cat\na.jpg,1,2,3,4,cat\n",
        "a.jpg,cat\n",
        "user,item,x1\n1,2,3\n",
        "1,2,3,4,5,6\n",
        "/data/a.jpg,80,30,120,70,cat\n",  # RetinaNet's
    )
    data = place(tmp_path, {"a.jpg": JPEG} | {f"{i}.csv": text for i, text in enumerate(tables)})
    assert label_folders.detect(data) == []


@pytest.mark.parametrize(
    "name, text, keys",
    [
        ("t.csv", f"{TF_HEAD}a.jpg,200,100,cat,120,70,80,30\n", ("t.csv:2",)),
        ("t.csv", f"{TF_HEAD}a.jpg,200,100,,80,30,120,70\n", ("t.csv:2", "label")),
        ("v.json", json.dumps(VIA)[:-9], ("v.json", "damaged")),
        (
            "v.json",
            via(("a.jpg", RECT, "x"), attribute="colour", height="3"),
            ("v.json", "colour, height", "'label'"),
        ),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, name, text, keys):
    data = place(tmp_path, {"a.jpg": JPEG, name: text})
    (form,) = (row.format for row in label_folders.detect(data))
    with pytest.raises(UserError) as error:
        label_folders.read(data, form)
    assert all(key in str(error.value) for key in keys), error.value


def test_a_second_form_is_named(tmp_path):
    """A few LabelMe files beside VIA's: a question with both, and a line for the other one."""
    photos = {f"{i}.jpg": JPEG for i in range(6)}
    one = labelme("0.jpg", ("cat", [[1, 1], [9, 9]], "rectangle", None))
    files = {"0.json": one, "via.json": via(*((name, RECT, "cat") for name in photos))}
    data = place(tmp_path, {**photos, **files})
    found = {row.name: row.evidence for row in recognise.dataset_formats(data)}
    assert found.keys() == {"labelme", "via"}
    assert "1 label file" in found["labelme"] and "via.json" in found["via"]


def test_a_table_beside_label_files_for_all_images_is_not_taken(tmp_path, capsys):
    """As in the tutorials of TensorFlow's API, where the table is made of the XML."""
    files = {f"{i}.jpg": JPEG for i in range(30)}
    files |= {f"{i}.xml": xml(f"{i}.jpg", ("cat", 0, 80, 30, 120, 70)) for i in range(30)}
    rows = (f"{i}.jpg,200,100,cat,80,30,120,70\n" for i in range(20))
    data = place(tmp_path, {**files, "train_labels.csv": TF_HEAD + "".join(rows)})
    dataset = prepare.choose(data, recognise.dataset_formats(data))
    assert dataset.name == "voc"
    printed = capsys.readouterr().out
    assert "not taken: 1 label file" in printed and "train_labels.csv (--as=csv)" in printed
