"""What is said of labels that no preparation reads, of masks, and of classes in names of photos."""

import json
import re

import pytest

from common.errors import UserError
from common.preparation.folders import Folder
from tests.benchmarks.resnet.preparation.test_imagenet import pictures
from tests.helpers.preparation import choose, follow, place

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


@pytest.mark.parametrize("words", FILES)
def test_the_file_its_form_and_the_fix_are_named(words, tmp_path):
    name, text = FILES[words]
    photos = pictures(f"{i}.jpg" for i in range(3))
    with pytest.raises(UserError, match=words) as refused:
        choose(place(tmp_path, {**photos, name: text}))
    assert name in str(refused.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("v.json", FILES["VoTT"][1], "v.json has labels of VoTT"),
        ("set.zip", b"PK", "set.zip is an archive"),
    ],
)
def test_labels_and_archives_beside_classes_are_named(name, content, words, tmp_path, capsys):
    photos = pictures(f"{'ab'[i % 2]}/{i}.jpg" for i in range(6))
    assert choose(place(tmp_path, {**photos, name: content})).name == "photos"
    assert f"not taken: {words}" in capsys.readouterr().out


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
    names = [pattern.format(i) for pattern in (photo, name) for i in range(3)]
    with pytest.raises(UserError, match=f"3 masks, such as {re.escape(name.format(0))}, "):
        choose(place(tmp_path, pictures(names, "PNG")))


@pytest.mark.parametrize("name", ["{}.{}.jpg", "train/{}_{}.jpg", "x/{}-{}-b.jpg"])
def test_classes_in_names(name, tmp_path):
    """The command that the message advises makes records of them; photos of the test have none."""
    names = [name.format(c, i) for c in ("great_cat", "dog") for i in range(4)]
    names += ["test1/7.jpg"] * ("/" in name)
    folder = place(tmp_path / "p", pictures(names))
    with pytest.raises(UserError, match="great_cat, dog in the names|dog, great_cat") as refused:
        choose(folder)
    follow(refused, tmp_path / "out")
    rows = json.loads((tmp_path / "out" / "manifest.json").read_text())["classes"]
    assert [(row["name"], row["train"] + row["validation"]) for row in rows] == [
        ("dog", 4),
        ("great_cat", 4),
    ]


TABLE = "p,q\n" + "x,y\n" * 9
SHOP = "our shop\nuser,item\n" + "1,2\n" * 99


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (pictures(["IMG_1.jpg", "IMG_2.jpg", "3.jpg"]), "into a folder of its name"),
        ({"t.csv": "photo,kind\n" + "".join(f"{i}.jpg,a\n" for i in range(9))}, "lists photos"),
        ({"a.csv": TABLE, "b.csv": TABLE * 9}, "interactions {}/b.csv --user=COLUMN --item=COLUMN"),
        ({"a.csv": TABLE, "b.csv": SHOP}, "b.csv, line 1 has 1 columns, and others 2"),
    ],
)
def test_what_is_in_no_known_form_is_named(files, words, tmp_path):
    """A table also where the file itself is given."""
    folders = [place(tmp_path, files)]
    folders += [Folder.open(f"{tmp_path}/{name}") for name in files if name == "t.csv"]
    for folder in folders:
        with pytest.raises(UserError, match=words.format(tmp_path)):
            choose(folder)
