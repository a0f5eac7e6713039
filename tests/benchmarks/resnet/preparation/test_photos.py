"""`prepare imagenet --layout=folder`: own photos of every odd kind, and their validation split."""

import collections
import io
import json

import numpy as np
import pytest
from PIL import Image

from benchmarks.resnet.preparation import examples, recognise
from common.data import records
from common.errors import UserError
from common.preparation import holdout, sources
from common.tensorflow import tensorflow
from scripts import prepare
from tests.benchmarks.resnet.preparation import test_digits
from tests.benchmarks.resnet.preparation.test_imagenet import (
    encoded,
    near,
    picture,
    pictures,
    pixels,
    rows,
)
from tests.helpers.preparation import place


def parse_own(record):
    message = tensorflow().train.Example.FromString(record)
    feature = message.features.feature
    kind = "bytes_list"
    text = feature["image/class/text"].bytes_list.value[0]
    assert feature["image/class/text"].WhichOneof("kind") == kind
    del feature["image/class/text"]
    return {**test_digits.parse(message.SerializeToString()), "image/class/text": text}


def photos(folder):
    """Own photos of every odd kind, as they lie on somebody's disk."""
    classes = ("Dogs and cats", "Äpfel", "birds")
    place(folder, pictures(f"{c}/{c[0]} photo {i}.jpg" for c in classes for i in range(10)))
    scene = picture(77, (48, 32))
    exif = Image.Exif()
    exif[0x0112] = 6
    grey = np.asarray(scene.convert("L")).astype(np.uint16)
    clear = scene.convert("RGBA")
    clear.paste((9, 9, 9, 0), (0, 0, 24, 32))
    jpeg = encoded(scene, quality=95)
    birds = {
        "turned.jpg": encoded(scene.transpose(Image.Transpose.ROTATE_90), exif=exif),
        "lossless.webp": encoded(scene, "WEBP", lossless=True),
        "bitmap.bmp": encoded(scene, "BMP"),
        "palette.png": encoded(scene.quantize(256), "PNG"),
        "cmyk.jpg": encoded(scene.convert("CMYK"), quality=95),
        "deep.png": encoded(Image.fromarray(grey * 257), "PNG"),
        "clear.png": encoded(clear, "PNG"),
        "more/ñandú 🐦.JPG": encoded(scene),
        "truncated.jpg": jpeg[: len(jpeg) // 2],
        "page.jpg": "<html>not found</html>",
        "empty.png": b"",
        ".hidden.jpg": encoded(scene),
    }
    place(folder / "birds", birds)
    place(folder, {".DS_Store": b"\0", "loose.jpg": encoded(scene)})
    return scene


def test_own_photos_of_every_kind(tmp_path, capsys):
    scene = photos(tmp_path / "photos")
    flags = ["--layout=folder", f"--train={tmp_path}/photos", "--validation_fraction=0.2"]
    line = prepare.make("imagenet", [*flags, f"--out={tmp_path}/out"])
    output = capsys.readouterr().out + line
    train, rest = (rows(tmp_path / "out", split, parse_own) for split in records.SPLITS)
    counts = collections.Counter()
    for path in (tmp_path / "out").glob("*-of-*"):
        for row in map(parse_own, test_digits.frames(path)):
            counts[row["image/class/label"], row["image/class/text"].decode()] += 1
            assert row["image/class/synset"] == row["image/class/text"]
    assert counts == {(1, "Dogs and cats"): 10, (2, "birds"): 18, (3, "Äpfel"): 10}
    both = {**train, **rest}
    expected = pixels(encoded(scene, "PNG"))
    for name in ("turned.jpg", "lossless.webp", "bitmap.bmp", "palette.png", "ñandú 🐦.JPG"):
        assert near(pixels(both[name.encode()]["image/encoded"]), expected, 12), name
    grey = np.repeat(np.asarray(scene.convert("L"))[..., None], 3, -1).astype(float)
    assert near(pixels(both[b"deep.png"]["image/encoded"]), grey)
    clear = pixels(both[b"clear.png"]["image/encoded"])
    assert (clear[:, :16] > 245).all() and near(clear[:, 32:], expected[:, 32:], 12)
    for row in both.values():
        image = Image.open(io.BytesIO(row["image/encoded"]))
        assert (image.format, image.getexif().get(0x0112, 1)) == ("JPEG", 1)
        assert image.size == (row["image/width"], row["image/height"])
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert {row["file"].removeprefix("train/") for row in manifest["left_out"]} == {
        "birds/truncated.jpg", "birds/page.jpg", "birds/empty.png", "loose.jpg",
    }  # fmt: skip
    assert "left out: train/birds/truncated.jpg: damaged or cut short" in output
    assert "--config=configs/finetune.py " in output and ".train_batch_size=8 " in output
    assert [row["validation"] for row in manifest["classes"]] in ([2, 4, 2], [2, 3, 2])


def test_a_long_short_side_is_shrunk(tmp_path, capsys):
    """To the pixels of TensorFlow's resize; what is small enough stays byte for byte."""
    scene, small = picture(77, (96, 64)), encoded(picture(3, (60, 20)))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = scene.transpose(Image.Transpose.ROTATE_90)
    birds = {"wide.jpg": encoded(scene, quality=95), "tall.png": encoded(turned, "PNG")}
    birds |= {"turned.jpg": encoded(turned, quality=95, exif=exif), "small.jpg": small}
    place(tmp_path / "photos" / "birds", birds)
    flags = ["--layout=folder", f"--train={tmp_path}/photos", f"--out={tmp_path}/out"]
    prepare.make("imagenet", [*flags, "--max_side=20"])
    train, rest = (rows(tmp_path / "out", split, parse_own) for split in records.SPLITS)
    both = {**train, **rest}
    assert both[b"small.jpg"]["image/encoded"] == small
    image = tensorflow().image
    wide = image.resize(np.asarray(scene, np.float32), (20, 30), "bicubic", antialias=True).numpy()
    wide = wide.clip(0, 255)
    for name, expected in (("wide.jpg", wide), ("turned.jpg", wide), ("tall.png", np.rot90(wide))):
        actual = pixels(both[name.encode()]["image/encoded"])
        assert near(actual, expected, 16) and np.abs(actual - expected).mean() < 2, name
    sizes = {name: (row["image/width"], row["image/height"]) for name, row in both.items()}
    assert sizes[b"tall.png"] == (20, 30) and sizes[b"turned.jpg"] == sizes[b"wide.jpg"] == (30, 20)
    assert "short side above --max_side" in capsys.readouterr().out
    with pytest.raises(UserError, match="max_side"):
        prepare.make("imagenet", flags)


def planned(names, **settings):
    """(class names, splits, source) of images with these names."""
    source = sources.Source("x", [sources.File(name, 1) for name in sorted(names)])
    usual = {"layout": "folder", "seed": 0, "shards": 0, "validation_shards": 0}
    return *examples.make(source, None, [], usual | {"validation_fraction": 0.1} | settings), source


def test_the_split_is_stratified_seeded_and_stable():
    sizes = {"a": 40, "b": 5, "c": 2, "d": 1}
    names = [f"{c}/{i}.jpg" for c, n in sizes.items() for i in range(n)]
    classes, splits, source = planned(names)
    rest = splits["validation"]
    assert collections.Counter(rest.labels[i] for i in rest.rows) == {(1,): 4, (2,): 1, (3,): 1}
    every = [*rest.rows, *splits["train"].rows]
    assert sorted(every) == list(range(48))
    for split in splits.values():
        expected = [(classes.index(source.class_names(i)[0]) + 1,) for i in split.rows]
        assert [split.labels[i] for i in split.rows] == expected
    assert set(planned(names, seed=1)[1]["validation"].rows) != set(rest.rows)


def grouped(names, pattern, fraction=0.2):
    _, splits, source = planned(names, validation_fraction=fraction, group=pattern)
    return {split: [source.files[i].name for i in splits[split].rows] for split in splits}


def test_a_group_is_in_one_split():
    """Photos of one object, and photos of one day across classes, which its first words name."""
    names = sorted(f"{c}/object{k}_{i}.jpg" for c in "ab" for k in range(10) for i in range(5))
    for pattern in (r"^(.*)_\d+", r"object\d+", r"/(object\d+)_"):
        splits = grouped(names, pattern)
        keys = {s: {holdout.groups([n], pattern)[0] for n in kept} for s, kept in splits.items()}
        assert not keys["train"] & keys["validation"]
        for c in "ab":
            assert sum(name.startswith(c) for name in splits["validation"]) == 10
        assert sorted(splits["train"] + splits["validation"]) == names
    assert grouped(names, "") == grouped(names, "^.*$")


def test_groups_never_empty_a_class_and_odd_patterns_are_refused(capsys):
    names = ["a/x1.jpg", "a/x2.jpg", "b/x1.jpg", "b/y1.jpg", "b/z1.jpg"]
    splits = grouped(names, r"/([xyz])", 0.5)  # all of a is one group
    assert {name for name in splits["train"] if name[0] == "a"} == set(names[:2])
    assert {name[2] for name in splits["validation"]} <= {"y", "z"}
    with pytest.raises(sources.SourceError, match=r"--group=q: the pattern finds nothing in a/x1"):
        grouped(names, "q")
    with pytest.raises(sources.SourceError, match="two groups"):
        grouped(names, "jpg")
    for flags, message in (
        (["--layout=folder", "--group=("], "is not a regular expression"),
        (["--layout=folder", "--validation=v", "--group=a"], "without --validation"),
        (["--validation=v", "--group=a"], "--group is for --layout=folder"),
    ):
        with pytest.raises(SystemExit):
            prepare.parse("imagenet", ["--train=t", "--out=o", *flags])
        assert message in capsys.readouterr().err


def test_photos_of_a_phone_are_named(tmp_path):
    heic = b"\0\0\0\x18ftypheic" + bytes(40)
    folder = place(tmp_path, {f"train/{name}/1.HEIC": heic for name in ("cats", "dogs")})
    (dataset,) = recognise.dataset_formats(folder)
    with pytest.raises(UserError, match="cats/1.HEIC is a HEIC image: save it as a JPEG"):
        prepare.make("imagenet", [*dataset.arguments, f"--out={tmp_path}/out"])


def test_own_validation_folder(tmp_path):
    names = [f"train/{c}/train.jpg" for c in "ab"] + [f"val/{c}/val.jpg" for c in "abz"]
    place(tmp_path, dict.fromkeys(names, encoded(picture(1))))
    flags = ["--layout=folder", f"--validation={tmp_path}/val", f"--out={tmp_path}/out"]
    with pytest.raises(UserError, match="no class 'z' is among the training images"):
        prepare.make("imagenet", [*flags, f"--train={tmp_path}/train"])
    with pytest.raises(UserError, match=r"holds splits \(train, val\), not classes"):
        prepare.make("imagenet", [*flags[::2], f"--train={tmp_path}", f"--out={tmp_path}.out"])
    (tmp_path / "val" / "z" / "val.jpg").unlink()
    # The same --out, because no records were written.
    prepare.make("imagenet", [*flags, f"--train={tmp_path}/train"])
    assert len(list((tmp_path / "out").glob("validation-*"))) == 1
    rest = [parse_own(r) for r in test_digits.frames(next(tmp_path.glob("out/validation-*")))]
    assert [row["image/class/text"] for row in rest] == [b"a", b"b"]


@pytest.mark.parametrize(
    ("folders", "inner", "fix"),
    [
        ("Training Testing", True, "give --train={}/Training --validation={}/Testing"),
        ("train dev", True, "give --train={}/train --validation={}/dev"),
        ("trainset testset extra", True, "give --train={}/trainset --validation={}/testset"),
        ("train trainannot val valannot", False, "into a folder of its name"),
        ("image image_masks", False, "into a folder of its name"),
        ("images masks", False, "into a folder of its name"),
    ],
)
def test_splits_and_masks_are_no_classes(folders, inner, fix, tmp_path):
    """The command with the advised flags makes records of the classes."""
    inside = ("cat/", "dog/") if inner else ("",)
    place(tmp_path / "p", pictures(f"{x}/{c}1.jpg" for x in folders.split() for c in inside))
    fix = fix.replace("{}", f"{tmp_path}/p")
    flags = ["--layout=folder", f"--out={tmp_path}/out"]
    with pytest.raises(UserError, match=f", not classes: .*{fix}$"):
        prepare.make("imagenet", [*flags, f"--train={tmp_path}/p"])
    if inner:
        assert "of 2 classes" in prepare.make("imagenet", [*flags, *fix.split()[1:]])


def test_the_class_is_in_the_name(tmp_path, capsys):
    kinds = ("Cat", "dog", "dog", "Cat")
    place(tmp_path / "train", pictures(f"{'ab'[i % 2]}/{kinds[i // 2]}-{i}.jpg" for i in range(8)))
    place(tmp_path / "train", {"b/Cat-1_mask.png": encoded(picture(99), "PNG")})
    flags = ["--layout=folder", f"--train={tmp_path}/train", f"--out={tmp_path}/out"]
    prepare.make("imagenet", [*flags, r"--class=(\w+)-\d", "--validation_fraction=0.25"])
    assert "train/b/Cat-1_mask.png: by its name a mask" in capsys.readouterr().out
    rows = json.loads((tmp_path / "out" / "manifest.json").read_text())["classes"]
    assert [(row["name"], row["train"], row["validation"]) for row in rows] == [
        ("Cat", 3, 1),
        ("dog", 3, 1),
    ]
    with pytest.raises(UserError, match="class"):  # other classes are other records
        prepare.make("imagenet", [*flags, r"--class=\w", "--validation_fraction=0.25"])
    with pytest.raises(UserError, match=r"--class=cow: the pattern finds nothing in a/"):
        prepare.make("imagenet", [*flags, "--class=cow", "--overwrite"])
    for wrong in (["--layout=folder", "--labels=x"], ["--validation=x"]):
        with pytest.raises(SystemExit):
            prepare.parse("imagenet", ["--train=t", "--out=o", "--class=a", *wrong])
        assert "--class is for --layout=folder without --labels" in capsys.readouterr().err


def test_folders_whose_names_look_alike_are_refused(tmp_path):
    names = ("Äpfel", "A\u0308pfel", "birds")
    place(tmp_path / "photos", pictures(f"{name}/1.jpg" for name in names))
    flags = ["--layout=folder", f"--train={tmp_path}/photos", f"--out={tmp_path}/out"]
    with pytest.raises(UserError, match="look alike"):
        prepare.make("imagenet", flags)


def test_a_validation_folder_may_write_a_name_in_another_form(tmp_path, capsys):
    """An empty folder and one without images are named; equal photos are, too."""
    names = [f"{folder}/{i}.jpg" for folder in ("train/Äpfel", "val/A\u0308pfel") for i in "01"]
    place(tmp_path, dict.fromkeys([*names, "train/hidden/.x.jpg"], encoded(picture(1))))
    place(tmp_path, {"train/texts/x.txt": "x"})
    (tmp_path / "train" / "empty").mkdir()
    inputs = [f"--train={tmp_path}/train", f"--validation={tmp_path}/val"]
    prepare.make("imagenet", ["--layout=folder", *inputs, f"--out={tmp_path}/out"])
    warnings = [row for row in capsys.readouterr().out.splitlines() if row.startswith("warning")]
    assert "--train: the folders empty, hidden, texts have no image" in warnings[0]
    assert "in both splits" in warnings[1] and warnings[1].count("Äpfel/0.jpg") == 1
    assert "1 classes have fewer than 20 training photos: Äpfel (2)" in warnings[2]
    assert len(warnings) == 3
    (row,) = json.loads((tmp_path / "out" / "manifest.json").read_text())["classes"]
    assert row == {"label": 1, "name": "Äpfel", "train": 2, "validation": 2}


def test_large_photos_get_a_hint(tmp_path, capsys):
    photos = {f"{i % 2}/{i}.jpg": encoded(picture(i, (1400, 1000))) for i in range(4)}
    place(tmp_path / "photos", photos)
    flags = ["--layout=folder", f"--train={tmp_path}/photos", f"--out={tmp_path}/out"]
    assert "--config.reduced_decoding=True" in prepare.make("imagenet", flags)
    assert "photos of 1.4 megapixels take long to decode" in capsys.readouterr().out
    last = prepare.make("imagenet", [*flags, "--max_side=300", "--overwrite"])
    assert "reduced_decoding" not in last and "megapixels" not in capsys.readouterr().out
