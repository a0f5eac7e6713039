"""How `prepare imagenet` sees a folder: classes, splits, ImageNet's files, tables of labels."""

import csv
import io
import json

import pytest

from benchmarks.resnet.preparation.recognise import dataset_formats
from common.errors import UserError
from common.preparation.folders import DatasetFormat
from common.tensorflow import tensorflow
from scripts import prepare
from tests.benchmarks.resnet.preparation import test_digits
from tests.benchmarks.resnet.preparation.test_imagenet import pictures
from tests.helpers.preparation import choose, follow, place

PAIR = [f"{c}/{i}.jpg" for c in ("cats", "dogs") for i in range(3)]
SYNSETS = [f"n{i:08d}/{i}.JPEG" for i in range(1000)]
COCO = '{"info": {}, "images": [{"id": 1}]'


def under(*folders, names=PAIR):
    return {f"{folder}/{name}": "" for folder in folders for name in names}


def loose(folder, kind="jpg"):
    return {f"{folder}/{i}.{kind}": "" for i in range(6)}


def table(*rows):
    return "\n".join(map(",".join, rows)) + "\n"


NUMBERED = [(str(i), f"{5 - i}.jpg", "ab"[i % 2]) for i in range(6)]
ROWS = [(str(i), "ab"[i % 2]) for i in range(6)]

# Files with their texts; the form, the flags with paths relative to the folder, and words of what
# is found and made.
CASES = {
    "classes": (
        under(".") | {"notes.json": "{}", "README.md": ""},
        "photos --train=.",
        "2 folders of JPEGs: classes cats, dogs",
    ),
    "one deeper": (under("Photos/all"), "photos --train=Photos/all", ""),
    "AVIF": (under(".", names=["a/1.avif", "B/2.AVIF"]), "photos --train=.", "images: classes"),
    "splits": (
        under("Train", "VAL", "test"),
        "photos --train=Train --validation=VAL",
        "VAL/ is for validation; other images, which are not used: 6",
    ),
    "test alone": (
        under("x/train", "x/test"),
        "photos --train=x/train --validation=x/test",
        "test/ is for validation",
    ),
    "other words": (
        under("Training", "Testing"),
        "photos --train=Training --validation=Testing",
        "Testing/ is for validation",
    ),
    "words in names": (
        under("seg_train/seg_train", "seg_test/seg_test") | loose("seg_pred"),
        "photos --train=seg_train/seg_train --validation=seg_test/seg_test",
        "",
    ),
    "copies, and a stray picture": (
        under("train", "test", "data/train", "data/test") | {"train/banner.png": "x"},
        "photos --train=data/train --validation=data/test",
        "not used: 13",
    ),
    "docs elsewhere": (under("x") | loose("docs"), "photos --train=x", "not used: 6 (docs)"),
    "a copy in it": (under(".", "set"), "photos --train=set", "of 2 classes"),
    "a folder in each class": (
        under("train", names=["cats/images/1.jpg", "dogs/images/1.jpg"]) | loose("val/images"),
        "photos --train=train",
        "not used: 6",
    ),
    "test without classes": (under("train") | loose("test"), "photos --train=train", "a tenth"),
    "a class of the name": (under(".", names=["train/1.jpg", "bus/1.jpg"]), "photos --train=.", ""),
    "a part of ImageNet": (
        under("train", "val", names=SYNSETS[:10]),
        "photos --train=train --validation=val",
        "",
    ),
    "synsets": (
        under("Data/train", names=SYNSETS) | loose("Data/val") | {"synsets.txt": "n01440764\nn0"},
        "imagenet --train=Data/train --validation=Data/val --validation_labels=synsets.txt",
        "",
    ),
    "archives": (
        {"ILSVRC2012_img_train.tar": "", "ILSVRC2012_img_val.tar": "", "l.txt": "n01440764\nn0"},
        "imagenet --train=ILSVRC2012_img_train.tar --validation=ILSVRC2012_img_val.tar "
        "--validation_labels=l.txt",
        "",
    ),
    "table": (
        loose("train", "JPG") | loose("test") | {"train.csv": table(("id", "breed"), *ROWS)},
        "csv --train=train --labels=train.csv --file_column=id --label_column=breed",
        "6 images and train.csv (columns id, breed): 2 classes",
    ),
    "table with numbered rows": (
        loose("i") | {"l.csv": table(("", "file", "y"), *NUMBERED)},
        "csv --train=i --labels=l.csv --file_column=file --label_column=y",
        "",
    ),
    "table without header": (
        loose("i") | {"l.csv": table(*((f"C:\\data\\i\\{i}.JPG", x) for i, x in ROWS))},
        "csv --train=i --labels=l.csv --file_column=1 --label_column=2",
        "",
    ),
    "table of the folders' classes": (
        under(".") | {"labels.csv": table(("path", "class"), *((name, name[:4]) for name in PAIR))},
        "photos --train=.",
        "",
    ),
    "table of test photos": (
        under("Train") | loose("Test") | {"Test.csv": table(("p", "class"), *ROWS[:4])},
        "photos --train=Train",
        "",
    ),
    "face masks": (under(".", names=["mask/1.png", "no_mask/2.png"]), "photos --train=.", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_a_folder_is(case, tmp_path):
    files, expected, words = case
    (dataset,) = dataset_formats(place(tmp_path, files))
    assert dataset.preparation == "imagenet" and dataset.num_files > 1
    form, *flags = expected.split()
    arguments = [a.replace(str(tmp_path), "").replace("=/", "=") for a in dataset.arguments]
    arguments = [a.removesuffix("=") + "=." * a.endswith("=") for a in arguments]
    own = ["--layout=folder"] * (form != "imagenet")
    assert dataset.name == form and sorted(arguments) == sorted(flags + own)
    assert words in f"{dataset.evidence} | {dataset.output}"


OTHERS = {
    "one class": under(".", names=["cats/1.jpg", "cats/2.jpg"]),
    "one folder": loose("images"),
    "no classes by name": under("dataset", "frames", names=["1.jpg"]),
    "classes at two depths": under("videos") | under("frames", names=["up/1.jpg", "down/1.jpg"]),
    "classes in groups": under("a") | {"b/bus/1.jpg": "x", "b/car/1.jpg": "x"},
    "splits in classes": {f"{c}/{s}/1.jpg": "" for c in ("a", "b") for s in ("train", "test")},
    "masks in classes": {f"{c}/{k}/1.png": k for c in ("a", "b") for k in ("images", "masks")},
    "a table of few": {f"i/{i}.jpg": "" for i in range(13)} | {"t.csv": table(("id", "y"), *ROWS)},
    "masks": loose("images", "png") | loose("masks", "png"),
    "outlines": loose("leftImg8bit", "png") | loose("gtFine", "png"),
    "VOC": loose("JPEGImages") | loose("SegmentationClass", "png") | loose("Annotations", "xml"),
    "YOLO": loose("images/train") | loose("images/val") | loose("labels/train", "txt"),
    "YOLO again": loose("train/images") | loose("valid/images") | {"data.yaml": "nc: 3\n"},
    "COCO": loose("train2017") | loose("val2017") | {"annotations/a.json": COCO},
    "no table": loose("i") | {"b.csv": "a,b\n1.jpg,\"", "c.csv": "", "d.tsv": "\0"},
    "splits without training": under("val", "test"),
    "a program with pictures": under(".") | loose("src", "py") | {"a.md": ""},
    "text": {"a.en": "x", "a.de": "y"},
    "raw data and assets": {**loose("Raw_Data"), "assets/1.png": "", "a.py": ""},
    "a lonely picture": {f"photos/{i}.jpg": "" for i in range(12)} | {"pages/1.png": ""},
    "CamVid": {f"{s}{k}/{i}.png": "" for s in ("train", "val") for k in ("", "annot") for i in "1"},
    "masks beside photos": {f"{c}/{i}{m}.png": "" for c in "ab" for i in "12" for m in ("", "_gt")},
    "masks of one split": loose("train", "png") | loose("train_masks", "png"),
}  # fmt: skip


@pytest.mark.parametrize("files", OTHERS.values(), ids=OTHERS)
def test_what_belongs_to_others(files, tmp_path):
    assert dataset_formats(place(tmp_path, files)) == []


def test_class_folders_or_a_table(tmp_path):
    files = {f"part_{int(i) % 3}/{i}.jpg": "" for i, _ in ROWS}
    listed = table(("image_id", "dx"), *ROWS).replace(",", "\t")
    folder = place(tmp_path, files | {"meta.tsv": listed})
    with pytest.raises(UserError, match="--as=photos.* or .*--as=csv"):
        prepare.choose(folder, dataset_formats(folder))
    flags = ["--labels=%s/meta.tsv", "--file_column=image_id", "--label_column=dx"]
    expected = ["--layout=folder", "--train=%s", *flags]
    chosen = prepare.choose(folder, dataset_formats(folder), "csv").arguments
    assert [flag.removesuffix("/") for flag in chosen] == [
        flag.replace("%s", str(tmp_path)) for flag in expected
    ]


OBJECTS = {
    "batches of COCO": loose("batch_1") | loose("batch_2") | {"annotations.json": COCO},
    "CVAT": loose("a") | loose("b") | {"annotations.xml": "<?xml ?>\n<annotations>"},
    "LabelMe": under(".") | {name.replace("jpg", "json"): "{}" for name in PAIR},
    "classes elsewhere": loose("boxes/images") | {"boxes/a.json": COCO} | under("more"),
}


@pytest.mark.parametrize("files", OBJECTS.values(), ids=OBJECTS)
def test_class_folders_beside_labels_of_objects_are_taken_only_by_name(files, tmp_path, capsys):
    folder = place(tmp_path, files)
    (dataset,) = dataset_formats(folder)
    with pytest.raises(UserError, match="classes .*--as=photos"):
        prepare.choose(folder, [dataset])
    assert prepare.choose(folder, [dataset], "photos") == dataset
    boxes = dataset._replace(preparation="coco", name="voc", evidence="boxes", num_files=9)
    assert prepare.choose(folder, [dataset, boxes]) == boxes
    assert "not taken: 2 folders of JPEGs: classes " in capsys.readouterr().out


BOX, REGION = '{"name": "rect", "x": 4}', '{"type": "cat"}'
REGIONS = ("filename", "region_shape_attributes", "region_attributes")
NOT_CLASSES = {  # rows of a table of the photos i/0.jpg ... i/5.jpg, and words of the refusal
    "TensorFlow": (
        [("filename", "class", "xmin"), *((f"{i}.jpg", x, "1") for i, x in ROWS)],
        r"boxes.*xmin.*--label_column=class",
    ),
    "sides": (
        [("f", "x", "y", "w", "h", "label"), *((f"{i}.jpg", *"1234", x) for i, x in ROWS)],
        "boxes.* x, y, w, h",
    ),
    "RetinaNet": ([(f"{i}.jpg", "4", "5", "24", "25", x) for i, x in ROWS], "boxes.* 2, 3, 4, 5"),
    "AutoML": (
        [("TRAIN", f"gs://b/{i}.jpg", x, ".1", ".1", "", "", ".4", ".4", "", "") for i, x in ROWS],
        "boxes.* 4, 5, 8, 9",
    ),
    "VIA": ([REGIONS, *((f"{i}.jpg", BOX, REGION) for i, _ in ROWS)], "boxes.*region_shape"),
    "Label Studio": (
        [("image", "label"), *((f"/d/{i}.jpg", f"[{REGION}]") for i, _ in ROWS)],
        "JSON in column label",
    ),
    "uncertain": (
        [
            ("f", "Sex", "Edema", "Mass", "Cyst"),
            *((f"{i}.jpg", x, "-1", "0", "1") for i, x in ROWS),
        ],
        "-1 beside 0 and 1.*Edema, Mass, Cyst.*write 0 or 1",
    ),
    "boxes in a cell": (
        [("f", "BoxesString", "domain"), *((f"{i}.jpg", "9 6 60 64;6 2 7 5", x) for i, x in ROWS)],
        "boxes.*columns BoxesString.*--label_column=domain",
    ),
    "classes in cells of boxes": (
        [("f", "boxes", "label"), *((f"{i}.jpg", "", f"{x} 1 0 0 1.5 1") for i, x in ROWS)],
        "boxes.*columns boxes, label.: [^;]*$",
    ),
    "circles": (
        [("f", "label", "cx", "cy", "radius"), *((f"{i}.jpg", x, *"205") for i, x in ROWS)],
        "boxes.*columns cx, cy",
    ),
    "outlines": (
        [
            ("f", "EncodedPixels"),
            *((f"{i}.jpg", "26 17 29 33"[: 11 * (x == "a")]) for i, x in ROWS),
        ],
        "boxes.*columns EncodedPixels.: [^;]*$",
    ),
    "measures": (
        [("f", "age", "height"), *((f"{i}.jpg", f"2{i}", f"1.{i}") for i, _ in ROWS)],
        "which of age, height has the classes is not clear: call it 'label'$",
    ),
    "rows of one photo": (
        [("f", "label"), *((f"{i}.jpg", x) for i, x in ROWS), ("0.jpg", "b")],
        "several classes of one photo, such as i/0.jpg",
    ),
    "unknown columns": (
        [("f", "who", "mood"), *((f"{i}.jpg", x, x) for i, x in ROWS)],
        "which of who, mood has the classes is not clear.*--label_column=who",
    ),
}


def write_table(folder, rows):
    file = io.StringIO()
    csv.writer(file).writerows(rows)
    photos = pictures(f"i/{i}.jpg" for i in range(6))
    return place(folder, photos | {"t.csv": file.getvalue()})


@pytest.mark.parametrize("case", NOT_CLASSES.values(), ids=NOT_CLASSES)
def test_tables_of_something_else_are_named(case, tmp_path):
    """And the command that takes a column as the classes works, as far as one is advised."""
    rows, words = case
    folder = write_table(tmp_path, rows)
    with pytest.raises(UserError, match=f"{tmp_path}/t.csv .*{words}") as refused:
        dataset_formats(folder)
    if "type python -m scripts.prepare" in str(refused.value):
        flags, line = follow(refused, tmp_path / "out")
        column = flags[-1].partition("=")[2]
        k = int(column) - 1 if column.isdigit() else rows[0].index(column)
        cells = {row[k] for row in rows} - {column}
        assert f"of {len(cells)} classes" in line and not any(cell[0] in "[{" for cell in cells)


@pytest.mark.parametrize("held", ["", "val"])
def test_class_folders_among_other_images_are_named(held, tmp_path):
    """And the command for them works."""
    names = [f"set/{s}/{x}" for s in ("train", held) if s for x in PAIR]
    folder = place(tmp_path, pictures([*names, *loose("more/all")]))
    with pytest.raises(UserError, match="cats, dogs in set/train look like classes") as refused:
        choose(folder)
    flags, line = follow(refused, f"{tmp_path}.out")
    assert any(flag.startswith("--validation=") for flag in flags) == bool(held)
    assert "of 2 classes" in line


def test_names_of_several_words_are_classes(tmp_path):
    names = ["golden retriever", "great dane", "tench, Tinca tinca"] * 2
    rows = [("f", "label"), *((f"{i}.jpg", x) for i, x in enumerate(names))]
    (dataset,) = dataset_formats(write_table(tmp_path, rows))
    assert dataset.name == "csv" and ": 3 classes" in dataset.evidence


def test_a_folder_that_is_no_class_beside_class_folders_is_named(tmp_path):
    names = [f"{c}/{i}.jpg" for c in ("cat", "dog") for i in range(10)]
    folder = place(tmp_path, pictures([*names, "docs/x/1.jpg"]))
    with pytest.raises(UserError, match="cat, dog look like classes, docs beside") as refused:
        dataset_formats(folder)
    _, line = follow(refused, f"{tmp_path}.out")
    assert "of 3 classes" in line


# Tables of the photos i/0.jpg ... i/5.jpg with several labels: the rows, with headers as public
# sets have them; the flag; how many labels there are; and those of the first three photos.
SEVERAL = {
    "Roboflow": (
        ["filename, Unlabeled, cat, dog", "0.jpg, 0, 1, 1", "1.jpg, 1, 0, 0", "2.jpg, 0, 1, 0"]
        + [f"{i}.jpg, 0, 0, 1" for i in (3, 4, 5)],
        "columns",
        2,
        "cat dog//cat",
    ),
    "CelebA": (
        [",Bald,Young,Male", "0.jpg,-1,1,1", "1.jpg,-1,-1,-1", "2.jpg,1,1,-1"]
        + [f"{i}.jpg,-1,1,-1" for i in (3, 4, 5)],
        "columns",
        3,
        "Male Young//Bald Young",
    ),
    "CheXpert": (
        ["Path,Sex,Age,No Finding,Edema,Mass", "x/0.jpg,F,68,1.0,,", "x/1.jpg,M,51,,1.0,0.0"]
        + [f"x/{i}.jpg,M,{50 + i},,1.0,1.0" for i in (2, 3, 4, 5)],
        "columns",
        2,
        "/Edema/Edema Mass",
    ),
    "ChestX-ray14": (
        ["Image Index,Finding Labels,Patient ID,OriginalImage[Width,Height],Spacing[x,y],"]
        + ["0.jpg,Edema|Mass,1,9,9,1,1", "1.jpg,No Finding,1,9,9,1,1", "2.jpg,Mass,2,9,9,1,1"]
        + [f"{i}.jpg,Edema,3,9,9,1,1" for i in (3, 4, 5)],
        "|",
        2,
        "Edema Mass//Mass",
    ),
    "Planet": (
        ["image_name,tags", "0,haze primary", "1,clear primary water road", "2,clear primary"]
        + ["3,haze primary water", "4,clear road primary", "5,haze primary"],
        " ",
        5,
        "haze primary/clear primary road water/clear primary",
    ),
    "PASCAL of fastai": (
        ["fname,labels,is_valid", "0.jpg,horse person,True", "1.jpg,car,False", "2.jpg,horse,True"]
        + ["3.jpg,person,False", "4.jpg,car person,False", "5.jpg,horse,False"],
        " ",
        3,
        "horse person/car/horse",
    ),
    "numbers": (
        ["id,attribute_ids", "0,7 12 90", "1,12", "2,7 12", "3,90", "4,7 90", "5,12 90"],
        " ",
        3,
        "12 7 90/12/12 7",
    ),
    "commas": (
        ["f,category", '0.jpg,"cat, dog"', "1.jpg,cat", "2.jpg,dog"]
        + [f'{i}.jpg,"cat, dog"' for i in (3, 4, 5)],
        ",",
        2,
        "cat dog/cat/dog",
    ),
    "lists, and columns": (
        ["Id,Genre,Action,Comedy,Sci-Fi", "0,\"['Action', 'Sci-Fi']\",1,0,1", "1,['Comedy'],0,1,0"]
        + [f"{i},\"['Action', 'Comedy']\",1,1,0" for i in (2, 3, 4, 5)],
        "columns",
        3,
        "Action Sci-Fi/Comedy/Action Comedy",
    ),
    "lists": (
        [
            "Id,Genre",
            "0,\"['Action', 'Children''s']\"",
            "1,[Comedy]",
            '2,"[""Action"", ""Comedy""]"',
        ]
        + [f"{i},\"['Action', 'Comedy']\"" for i in (3, 4, 5)],
        "lists",
        None,
        None,
    ),
    "numbered columns": (
        ["f,label1,label2", "0.jpg,cat,dog", "1.jpg,,", "2.jpg,dog,cat"]
        + [f"{i}.jpg,dog," for i in (3, 4, 5)],
        "columns",
        2,
        "cat dog//cat dog",
    ),
    "rows": (
        ["f,label", "0.jpg,cat", "0.jpg,dog", "1.jpg,cat", "2.jpg,dog", "2.jpg,cat"]
        + [f"{i}.jpg,dog" for i in (3, 4, 5)],
        "rows",
        2,
        "cat dog/cat/cat dog",
    ),
}


def lines_table(folder, lines):
    photos = pictures(f"i/{i}.jpg" for i in range(6))
    return place(folder, photos | {"t.csv": "\n".join([*lines, ""])})


def prepared_labels(dataset, out):
    """{photo: its labels} of the records that the dataset's command makes."""
    prepare.make("imagenet", [*dataset.arguments, f"--out={out}"])
    found = {}
    for path in sorted(out.glob("*-of-*")):
        for record in test_digits.frames(path):
            feature = tensorflow().train.Example.FromString(record).features.feature
            texts = feature["image/class/text"].bytes_list.value
            name = feature["image/filename"].bytes_list.value[0].decode()
            found[name] = sorted(text.decode() for text in texts)
    return found


@pytest.mark.parametrize("case", SEVERAL.values(), ids=SEVERAL)
def test_tables_of_several_labels(case, tmp_path):
    lines, kind, number, expected = case
    (dataset,) = dataset_formats(lines_table(tmp_path / "in", lines))
    assert f"--several={kind}" in dataset.arguments
    if number:
        assert f"several of {number} labels each" in dataset.evidence
        found = prepared_labels(dataset, tmp_path / "out")
        assert len(found) == 6
        parts = [part.split() for part in expected.split("/")]
        assert [found[f"{i}.jpg"] for i in range(3)] == parts


ONE = {  # tables that look like it, and have one label; its column and classes
    "one-hot": (
        ["filename, early, late", *(f"{i}.jpg, {i % 2}, {1 - i % 2}" for i in range(6))],
        {"early", "late"},
    ),
    "one-hot with none": (
        ["f,none,rust,scab", *(f"{i}.jpg,{['1,0,0', '0,1,0', '0,0,1'][i % 3]}" for i in range(6))],
        {"none", "rust", "scab"},
    ),
    "lists of one": (["f,labels", *(f"{i}.jpg,['{'ab'[i % 2]}']" for i in range(6))], {"a", "b"}),
    "commas in names": (
        ["f,label", *(f'{i}.jpg,"black, {("white", "red", "grey")[i % 3]}"' for i in range(6))],
        {"black, grey", "black, red", "black, white"},
    ),
    "colours": (
        ["f,labels"]
        + [f'{i}.jpg,"{("black, white", "black, red", "white, red")[i % 3]}"' for i in range(6)],
        {"black, red", "black, white", "white, red"},
    ),
    "names of two words": (
        [
            "f,labels",
            *(f"{i}.jpg,{('black cat', 'white cat', 'black dog')[i % 3]}" for i in range(6)),
        ],
        {"black cat", "black dog", "white cat"},
    ),
    "a known class beside marks": (
        ["f,species,male,young,ill", *(f"{i}.jpg,{'ab'[i % 2]},1,0,{i % 2}" for i in range(6))],
        {"a", "b"},
    ),
    "a binary class beside a mark": (
        ["f,target,male", *(f"{i}.jpg,{i % 2},{i // 3}" for i in range(6))],
        {"0", "1"},
    ),
}


@pytest.mark.parametrize("case", ONE.values(), ids=ONE)
def test_tables_of_one_label_stay_so(case, tmp_path):
    lines, classes = case
    (dataset,) = dataset_formats(lines_table(tmp_path / "in", lines))
    found = prepared_labels(dataset, tmp_path / "out")
    assert {name for (name,) in found.values()} == classes
    assert "labels" not in json.loads((tmp_path / "out" / "manifest.json").read_text())


def test_raters_who_disagree_are_no_labels(tmp_path):
    rows = [(f"{i}.jpg", "ab"[(i + k) % 2 if i < 3 else 0]) for i in range(6) for k in range(3)]
    with pytest.raises(UserError, match="several classes of one photo.*--several=rows"):
        dataset_formats(write_table(tmp_path, [("f", "label"), *rows]))


def test_the_tables_of_splits_are_taken_together(tmp_path, capsys):
    """As Roboflow writes them; a label of validation alone counts, and the test photos do not."""
    head, files = "filename, cat, dog, owl", {}
    for split, rows in {"train": "110 100 010", "valid": "001 010", "test": "100"}.items():
        names = [f"{split}_{i}.jpg" for i in range(len(rows.split()))]
        files |= pictures(f"{split}/{name}" for name in names)
        lines = [f"{n}, {', '.join(row)}" for n, row in zip(names, rows.split(), strict=True)]
        files[f"{split}/_classes.csv"] = "\n".join([head, *lines])
    (dataset,) = dataset_formats(place(tmp_path / "in", files))
    found = prepared_labels(dataset, tmp_path / "out")
    assert found["train_0.jpg"] == ["cat", "dog"] and found["valid_0.jpg"] == ["owl"]
    assert len(found) == 5
    content = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [split["examples"] for split in content["splits"].values()] == [3, 2]
    assert [row["train"] for row in content["classes"]] == [2, 2, 0]
    assert "photos of the split 'test'" in capsys.readouterr().out


def test_the_user_names_columns_and_signs(tmp_path):
    lines = ["f,a,b,c,text", *(f"{i}.jpg,{i % 2},1,0,x / y" for i in range(6))]
    lines_table(tmp_path / "in", lines)
    given = f"--layout=folder --train={tmp_path}/in/i --labels={tmp_path}/in/t.csv".split()
    for n, flags in enumerate(
        (["--label_column=a,b", "--several=columns"], ["--label_column=text", "--several=/"])
    ):
        dataset = DatasetFormat("imagenet", "csv", "", "", [*given, *flags], 6)
        found = prepared_labels(dataset, tmp_path / f"out{n}")
        assert found["1.jpg"] == (["a", "b"], ["x", "y"])[n]
    for flags, words in (
        (["--several=|"], "give --label_column"),
        (["--several=rows", "--label_column=z"], "no column 'z'"),
    ):
        with pytest.raises(UserError, match=words):
            prepare.make("imagenet", [*given, *flags, f"--out={tmp_path}/no"])
