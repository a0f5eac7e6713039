"""What is said of labels that no preparation reads, of masks, and of classes in names of photos."""

import json
import re
import shlex

import pytest

from common.errors import UserError
from common.preparation.folders import Folder
from scripts import prepare
from tests.benchmarks.resnet.preparation.test_imagenet import encoded, picture

BOX = {"x": 1, "y": 2, "width": 3, "height": 4}
RESULT = [{"type": "rectanglelabels", "value": {**BOX, "rectanglelabels": ["cat"]}}]
FILES = {  # by the words of the message: the name of a file and its text
    "Label Studio": ("a.json", json.dumps([{"id": 1, "annotations": [{"result": RESULT}]}])),
    "CreateML": (
        "_annotations.createml.json",
        json.dumps([{"image": "0.jpg", "annotations": [{"label": "cat", "coordinates": BOX}]}]),
    ),
    "Datumaro": ("d.json", json.dumps({"dm_format_version": "1.0", "categories": {}, "items": []})),
    "VoTT": ("v.json", json.dumps({"asset": {"name": "0.jpg"}, "regions": [{"tags": ["cat"]}]})),
    "Supervisely": ("0.jpg.json", json.dumps({"objects": [{"classTitle": "cat"}]})),
    "Git LFS": ("a.json", "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"),
    "captions": ("c.json", json.dumps({"annotations": [{"image_id": 1, "caption": "a cat"}]})),
    "no known form in odd.xml": ("odd.xml", "<things/>"),
}


def refusal(path, words: str) -> str:
    """What the preparation of a folder says, which has `words`."""
    folder = Folder.open(str(path))
    with pytest.raises(UserError, match=words) as refused:
        prepare.choose(folder, prepare.readings(folder))
    return str(refused.value)


@pytest.mark.parametrize("words", FILES)
def test_the_file_its_form_and_the_fix_are_named(words, tmp_path):
    name, text = FILES[words]
    for i in range(3):
        (tmp_path / f"{i}.jpg").write_bytes(encoded(picture(i)))
    (tmp_path / name).write_text(text)
    assert name in refusal(tmp_path, words)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [("v.json", FILES["VoTT"][1], "has labels of VoTT"), ("set.zip", "PK", "is an archive")],
)
def test_a_file_beside_classes_is_named(name, text, says, tmp_path, capsys):
    for i in range(6):
        (tmp_path / "ab"[i % 2]).mkdir(exist_ok=True)
        (tmp_path / "ab"[i % 2] / f"{i}.jpg").write_bytes(encoded(picture(i)))
    (tmp_path / name).write_text(text)
    folder = Folder.open(str(tmp_path))
    assert prepare.choose(folder, prepare.readings(folder)).form == "photos"
    assert f"not taken: {name} {says}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("photo", "name"),
    [
        ("train/{}.png", "trainannot/{}.png"),
        ("train/{}.png", "masks/{}.png"),
        ("train/{}.png", "x/{}_L.png"),
        ("train/{}.png", "train/{}_mask.png"),
        ("set_with_GT/a ({}).png", "set_with_GT/a ({})_mask_1.png"),
        ("train/u_{}_leftImg8bit.png", "gtFine/u_{}_gtFine_labelIds.png"),
    ],
)
def test_masks_are_named(photo, name, tmp_path):
    for pattern in (photo, name):
        for i in range(3):
            path = tmp_path / pattern.format(i)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(encoded(picture(i), "PNG"))
    refusal(tmp_path, f"3 masks, such as {re.escape(name.format(0))}, ")


@pytest.mark.parametrize("name", ["{}.{}.jpg", "train/{}_{}.jpg", "x/{}-{}-b.jpg"])
def test_classes_in_names(name, tmp_path):
    """The command that the message advises makes records of them; photos of the test have none."""
    names = [name.format(c, i) for c in ("great_cat", "dog") for i in range(4)]
    names += ["test1/7.jpg"] * ("/" in name)
    for i, each in enumerate(names):
        path = tmp_path / "p" / each
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture(i)))
    line = refusal(tmp_path / "p", "great_cat, dog in the names|dog, great_cat")
    command = re.search("type python -m scripts.prepare imagenet (.*) --out", line)
    assert command is not None
    prepare.make("imagenet", [*shlex.split(command[1]), f"--out={tmp_path}/out"])
    rows = json.loads((tmp_path / "out" / "manifest.json").read_text())["classes"]
    assert [(row["name"], row["train"] + row["validation"]) for row in rows] == [
        ("dog", 4),
        ("great_cat", 4),
    ]


def test_photos_without_a_pattern_are_no_classes(tmp_path):
    for name in ("IMG_1.jpg", "IMG_2.jpg", "3.jpg"):
        (tmp_path / name).write_bytes(encoded(picture(1)))
    refusal(tmp_path, "into a folder of its name")


def test_a_table_of_photos_alone_is_named(tmp_path):
    (tmp_path / "t.csv").write_text("photo,kind\n" + "".join(f"{i}.jpg,a\n" for i in range(9)))
    for path in (tmp_path / "t.csv", tmp_path):
        refusal(path, "lists photos")


def test_tables_without_known_columns_are_named_in_their_folder(tmp_path):
    (tmp_path / "a.csv").write_text("p,q\n" + "x,y\n" * 9)
    (tmp_path / "b.csv").write_text("p,q\n" + "x,y\n" * 99)
    refusal(tmp_path, f"interactions {tmp_path}/b.csv --user=COLUMN --item=COLUMN")
    (tmp_path / "b.csv").write_text("our shop\nuser,item\n" + "1,2\n" * 99)
    refusal(tmp_path, "b.csv, line 1 has 1 columns, and others 2")
