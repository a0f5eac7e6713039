"""What `dataset_formats` sees in a folder, and that its flags prepare the folder."""

import json
import shutil
import zipfile

import pytest

from benchmarks.detection.preparation import recognise
from common.errors import UserError
from common.preparation.folders import Folder
from scripts import prepare
from tests.benchmarks.detection.preparation.test_coco import (
    TRAIN,
    VAL,
    annotations,
    image_file,
    write_coco,
)
from tests.helpers import preparation
from tests.helpers.preparation import typed


def place(folder, tree):
    """Writes files; a number is the image of this number."""
    files = {k: image_file(v)[1] if isinstance(v, int) else v for k, v in tree.items()}
    return preparation.place(folder, files)


def photos(folder, first, count, *_):
    return {f"{folder}/{image_file(i)[0]}": i for i in range(first, first + count)}


def changed(part, change, drop=()):
    """The annotations of a part of the images, each file name through `change`."""
    data = annotations(*part)
    for row in data["images"]:
        row["file_name"] = change(row["file_name"])
    for row in data["annotations"]:
        for key in drop:
            row.pop(key, None)
    return data


def same(name):
    return name


T, V = annotations(*TRAIN), annotations(*VAL)
MIXED = json.loads(json.dumps(T))
MIXED["annotations"][0]["segmentation"] = []
TREES = {
    "roboflow": (
        {
            "train/_annotations.coco.json": T,
            "valid/_annotations.coco.json": V,
            "test/_annotations.coco.json": V,
            **photos("train", *TRAIN),
            **photos("valid", *VAL),
            **photos("test", *VAL),
        },
        [
            "polygons: boxes and masks",
            "16 train and 6 val images",
            "not used: test/_annotations.coco.json (images: 6)",
        ],
        ["train", "valid", "--masks"],
    ),
    "test_is_val": (
        {
            "a/train.json": T,
            "a/test.json": changed(VAL, same, ["segmentation"]),
            **photos("images", *TRAIN),
            **photos("images", *VAL),
        },
        [": boxes", "16 train and 6 val images"],
        ["images"],
    ),
    "one": (
        {"labels.json": MIXED, "notes.json": "[1]", **photos("deep/images", *TRAIN)},
        ["1 of 24 objects without an outline: boxes", "16 images, a tenth of them"],
        ["deep/images"],
    ),
    "other_machine": (
        {
            "all.json": changed(TRAIN, lambda name: f"C:\\me\\{name}".upper()),
            **photos("batch 1", *TRAIN),
        },
        ["3 categories"],
        ["batch 1", "--masks"],
    ),
    "several_folders": (
        {"all.json": T, **photos("a", 0, 8), **photos("b", 8, 8)},
        ["3 categories"],
        ["", "--masks"],
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_own_images_are_recognised_and_prepared(name, tmp_path, capsys, monkeypatch):
    tree, words, flags = TREES[name]
    place(tmp_path / "in", tree)
    (dataset,) = recognise.dataset_formats(Folder.open(str(tmp_path / "in")))
    text = f"{dataset.evidence}; {dataset.output}"
    assert (dataset.preparation, dataset.name) == ("coco", "coco")
    assert all(word in text for word in words)
    folders = [tmp_path / "in" / flag for flag in flags if flag != "--masks"]
    given = [flag.partition("=")[2] for flag in dataset.arguments if "_images=" in flag]
    assert set(given) == {str(folder) for folder in folders}
    assert ("--masks" in dataset.arguments) == ("--masks" in flags)
    prepare.make("coco", [*dataset.arguments, f"--out={tmp_path}/out"])
    splits = json.loads((tmp_path / "out" / "manifest.json").read_text())["splits"]
    images = [splits[split]["images"] for split in ("train", "val")]
    assert images == ([16, 6] if "--val_annotations" in str(dataset.arguments) else [12, 4])
    (line,) = (row for row in capsys.readouterr().out.splitlines() if "small.py" in row)
    _, config = typed(line, monkeypatch)
    assert config.benchmark == ("mask_rcnn" if "--masks" in flags else "ssd")
    batch = 4 if "--masks" in flags else 8
    assert config.data_dir == f"{tmp_path}/out" and config.train_batch_size == batch


def test_cocos_archives_and_folders(tmp_path):
    write_coco(tmp_path)
    shutil.move(tmp_path / "annotations.zip", tmp_path / "annotations_trainval2017.zip")
    (dataset,) = recognise.dataset_formats(Folder.open(str(tmp_path)))
    assert "--masks" in dataset.arguments and "COCO" in dataset.evidence
    prepare.make("coco", [*dataset.arguments, f"--out={tmp_path}/out"])
    (tmp_path / "open" / "annotations").mkdir()
    for path in (tmp_path / "open").glob("*.json"):
        shutil.move(path, tmp_path / "open" / "annotations")
    (dataset,) = recognise.dataset_formats(Folder.open(str(tmp_path / "open")))
    split = f"{tmp_path}/open/annotations/instances_val2017.json"
    assert f"--val_annotations={split}" in dataset.arguments


@pytest.mark.parametrize(
    "tree",
    [
        {},
        photos("cats", 0, 3),
        {"a.json": "{", "b.json": '{"images": [1], "annotations": [], "categories": []}'},
        {"c.json": '{"images": [{"id": 1}], "annotations": [2]', "d.tfrecord": "x" * 99},
        {"captions.json": {"images": [], "annotations": []}, "e.record": "", **photos("x", 1, 1)},
        {"lines.json": '{"images": [], "annotations": [], "categories": [], "bbox": 1}\n{}'},
        {"panoptic.json": changed(TRAIN, same, ["bbox"]), **photos("x", *TRAIN)},
    ],
)
def test_other_files_are_not_taken(tree, tmp_path):
    place(tmp_path, tree)
    assert recognise.dataset_formats(Folder.open(str(tmp_path))) == []


def test_images_in_an_archive_beside_the_annotations(tmp_path):
    with zipfile.ZipFile(tmp_path / "pictures.zip", "w") as archive:
        for i in range(TRAIN[1]):
            archive.writestr(*image_file(i)[:2])
    place(tmp_path, {"annotations.json": T})
    (dataset,) = recognise.dataset_formats(Folder.open(str(tmp_path)))
    assert dataset.arguments[0] == f"--train_images={tmp_path}/pictures.zip"
    prepare.make("coco", [*dataset.arguments, f"--out={tmp_path}/out"])
    assert (tmp_path / "out" / "manifest.json").exists()


def test_a_json_alone_has_its_images_beside_it(tmp_path):
    place(tmp_path, {"a.json": T, "b.json": V, **photos("images", *TRAIN)})
    (dataset,) = recognise.dataset_formats(Folder.open(str(tmp_path / "a.json")))
    assert dataset.arguments[:2] == [
        f"--train_images={tmp_path}/images",
        f"--train_annotations={tmp_path}/a.json",
    ]


def lvis():
    data = annotations(*TRAIN)
    for row in data["images"]:
        row["coco_url"] = f"http://images.cocodataset.org/train2017/{row.pop('file_name')}"
    return data


def test_lvis_has_an_address_for_a_file_name(tmp_path):
    place(tmp_path / "in", {"lvis_v1_train.json": lvis(), **photos("train2017", *TRAIN)})
    (dataset,) = recognise.dataset_formats(Folder.open(str(tmp_path / "in")))
    prepare.make("coco", [*dataset.arguments, f"--out={tmp_path}/out"])
    splits = json.loads((tmp_path / "out" / "manifest.json").read_text())["splits"]
    assert [splits[split]["images"] for split in ("train", "val")] == [12, 4]


NAMELESS = annotations(*TRAIN)
NAMELESS["images"][2] = {"id": 1002, "height": 9, "width": 9}
TEXT = json.dumps(T)


@pytest.mark.parametrize(
    "content, keys",
    [
        (TEXT[:-2], ("line 1, column", "damaged")),
        (json.dumps(T, indent=1)[:900], ("line ", "damaged")),
        (NAMELESS, ("image 1002", "file_name")),
        (TEXT.replace('"name": "', '"name": "\u00e9').encode("cp1252"), ("line 1", "iconv")),
    ],
)
def test_a_damaged_json_is_named_with_the_place(content, keys, tmp_path):
    place(tmp_path, {"deep/a.json": {}, **photos("deep", *TRAIN)})
    if isinstance(content, bytes):
        (tmp_path / "deep" / "a.json").write_bytes(content)
    else:
        place(tmp_path, {"deep/a.json": content})
    data = Folder.open(str(tmp_path))
    with pytest.raises(UserError) as refusal:
        dataset = prepare.choose(data, prepare.dataset_formats(data))
        prepare.make("coco", [*dataset.arguments, f"--out={tmp_path}.out"])
    message = str(refusal.value)
    assert "deep/a.json" in message and "\n" not in message
    assert all(key in message for key in keys), message


def test_a_damaged_json_beside_labels_is_named(tmp_path, capsys):
    labels = {"x/0000.txt": "0 0.5 0.5 0.2 0.2\n", **photos("x", *TRAIN)}
    place(tmp_path, {"a.json": TEXT[:-2], **labels})
    (dataset,) = recognise.dataset_formats(Folder.open(str(tmp_path)))
    assert dataset.name == "yolo"
    assert f"not taken: {tmp_path}/a.json is damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("labels", "table", "expected"),
    [(9, 1, (19, 1)), (8, 1, (18, 11)), (9, 8, (19, 8)), (10, 9, (20, 19))],
)
def test_a_table_beside_labels_of_nearly_all_images_is_a_copy(
    labels, table, expected, tmp_path, monkeypatch
):
    """Of ten images; the format with more files is likelier."""
    kind = recognise.label_folders.Detected
    found = [kind("yolo", "", labels, False), kind("table", "", table, True)]
    monkeypatch.setattr(recognise.label_folders, "detect", lambda folder: found)
    rows = recognise.dataset_formats(place(tmp_path, photos("a", 0, 10)))
    assert [(row.name, row.num_files) for row in rows] == [
        *(("yolo", expected[0]), ("table", expected[1]))
    ]
    assert "--masks" in rows[1].arguments and "--masks" not in rows[0].arguments
