"""`prepare imagenet` on archives of the original form and on own photos, read back by hand."""

import hashlib
import io
import json
import os
import tarfile

import numpy as np
import pytest
from PIL import Image

from benchmarks.resnet.preparation import imagenet as preparation
from common.errors import UserError
from common.images import photos
from scripts import prepare
from tests.benchmarks.resnet.preparation import test_digits
from tests.helpers.preparation import leaves, place

SYNSETS = ["n01440764", "n01443537", "n02105855", "n15075141"]
IMAGES = 12  # in each inner archive


def picture(seed, size=(40, 30), mode="RGB"):
    """A smooth picture, so that JPEG changes little, of a size (width, height)."""
    corners = np.random.default_rng(seed).integers(0, 256, (2, 2, 3), np.uint8)
    return Image.fromarray(corners).resize(size, Image.Resampling.BICUBIC).convert(mode)


def encoded(image, kind="JPEG", **more):
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def pictures(names, kind="JPEG"):
    """{name: bytes} of different pictures."""
    return {name: encoded(picture(i), kind) for i, name in enumerate(names)}


def add(tar, name, data):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def train_files():
    """{synset: {file name: bytes}} with one PNG, two CMYK, a grey and an EXIF-rotated image."""
    files = {}
    for s, synset in enumerate(SYNSETS):
        files[synset] = {
            f"{synset}_{i}.JPEG": encoded(picture(100 * s + i, (40 + i, 30))) for i in range(IMAGES)
        }
    files["n02105855"]["n02105855_3.JPEG"] = encoded(picture(1), "PNG")
    for i in (1, 2):
        files["n01443537"][f"n01443537_{i}.JPEG"] = encoded(picture(i, mode="CMYK"))
    files["n01443537"]["n01443537_4.JPEG"] = encoded(picture(4, mode="L"))
    exif = Image.Exif()
    exif[0x0112] = 6
    files["n15075141"]["n15075141_5.JPEG"] = encoded(picture(5), exif=exif)
    return files


def write_imagenet(folder):
    """The archives as they are downloaded; returns their arguments and what is in them."""
    train = train_files()
    with tarfile.open(folder / "ILSVRC2012_img_train.tar", "w") as outer:
        for synset in reversed(SYNSETS):  # any order
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as tar:
                for name, data in train[synset].items():
                    add(tar, name, data)
            add(outer, f"{synset}.tar", inner.getvalue())
    validation = {f"ILSVRC2012_val_{i + 1:08d}.JPEG": encoded(picture(1000 + i)) for i in range(20)}
    with tarfile.open(folder / "ILSVRC2012_img_val.tar", "w") as tar:
        for name, data in reversed(validation.items()):
            add(tar, name, data)
    labels = [SYNSETS[i * 7 % 4] for i in range(20)]
    (folder / "synset_labels.txt").write_text("\n".join(labels) + "\n")
    arguments = [
        f"--train={folder}/ILSVRC2012_img_train.tar",
        f"--validation={folder}/ILSVRC2012_img_val.tar",
        f"--validation_labels={folder}/synset_labels.txt",
    ]
    return arguments, train, validation, labels


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """A small ImageNet, and the records made of it: 5 and 2 shards."""
    folder = tmp_path_factory.mktemp("imagenet")
    parts = write_imagenet(folder)
    out = folder / "records"
    flags = [*parts[0], "--subset", "--shards=5", "--validation_shards=2"]
    prepare.make("imagenet", [*flags, f"--out={out}", "--workers=3"])
    return flags, *parts[1:], out


def contents(folder):
    """All files but the state, which may hold anything."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def rows(folder, split, parse=test_digits.parse):
    """Records by file name, each parsed by hand."""
    by_name = {}
    for path in sorted(folder.glob(f"{split}-*")):
        for record in test_digits.frames(path):
            row = parse(record)
            assert row["image/filename"] not in by_name
            by_name[row["image/filename"]] = row
    return by_name


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(float)


def near(a, b, tolerance=6):
    return a.shape == b.shape and np.abs(a - b).max() <= tolerance


def test_archives_become_the_originals_schema(imagenet):
    _, train, validation, labels, out = imagenet
    by_name = rows(out, "train")
    assert len(by_name) == 4 * IMAGES
    same = changed = 0
    for label, synset in enumerate(SYNSETS, 1):
        for name, data in train[synset].items():
            row = by_name[name.encode()]
            assert (row["image/class/label"], row["image/class/synset"]) == (label, synset.encode())
            if row["image/encoded"] == data:
                same += 1
                size = Image.open(io.BytesIO(data)).size
            else:
                changed += 1
                size = test_digits.pixels(row).shape[1::-1]
                assert near(pixels(row["image/encoded"]), pixels(data))
            assert (row["image/width"], row["image/height"]) == size
    assert (same, changed) == (4 * IMAGES - 3, 3)  # grey ones and EXIF are as the original has them
    evaluated = rows(out, "validation")
    assert [row["image/filename"].decode() for row in evaluated.values()] == sorted(validation)
    for name, synset in zip(sorted(validation), labels, strict=True):
        assert evaluated[name.encode()]["image/class/label"] == SYNSETS.index(synset) + 1
        assert evaluated[name.encode()]["image/encoded"] == validation[name]
    order = [row["image/class/label"] for row in by_name.values()]
    assert order != sorted(order) and len(set(order[:12])) > 2


def test_manifest_says_what_is_there(imagenet):
    *_, out = imagenet
    manifest = json.loads((out / "manifest.json").read_text())
    for split, n, shards in (("train", 48, 5), ("validation", 20, 2)):
        part = manifest["splits"][split]
        assert part["examples"] == n and len(part["shards"]) == shards
        for shard in part["shards"]:
            data = (out / shard["name"]).read_bytes()
            assert hashlib.sha256(data).hexdigest() == shard["sha256"]
            assert len(data) == shard["bytes"]
            assert len(test_digits.frames(out / shard["name"])) == shard["examples"]
    assert manifest["num_label_classes"] == 4 and manifest["settings"]["seed"] == 0
    classes = [(row["label"], row["name"], row["train"]) for row in manifest["classes"]]
    assert classes == [(i, name, IMAGES) for i, name in enumerate(SYNSETS, 1)]
    assert sum(row["validation"] for row in manifest["classes"]) == 20
    assert {row["file"]: row["reason"] for row in manifest["re_encoded"]} == {
        "train/n02105855/n02105855_3.JPEG": "PNG, not JPEG",
        "train/n01443537/n01443537_1.JPEG": "CMYK colours",
        "train/n01443537/n01443537_2.JPEG": "CMYK colours",
    }
    assert manifest["left_out"] == []


def test_extracted_folders_and_one_worker_give_the_same_bytes(imagenet, tmp_path):
    flags, train, validation, _, out = imagenet
    for synset, files in train.items():
        place(tmp_path / "train" / synset, files)
    place(tmp_path / "val", validation)
    folders = [f"--train={tmp_path}/train", f"--validation={tmp_path}/val/", *flags[2:]]
    prepare.make("imagenet", [*folders, f"--out={tmp_path}/out", "--workers=1"])
    assert contents(tmp_path / "out") == contents(out)


def test_finished_is_left_alone_and_missing_is_replaced(imagenet, capsys):
    flags, *_, out = imagenet
    expected, times = contents(out), {path: path.stat().st_mtime_ns for path in out.iterdir()}
    again = [*flags, f"--out={out}"]
    prepare.make("imagenet", again)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times
    (out / "train-00001-of-00005").unlink()
    (out / "validation-00001-of-00002").write_bytes(b"torn")
    (out / "tmp.train-00001-of-00005.0123abcd").write_bytes(b"left by kill -9")
    prepare.make("imagenet", again)
    assert contents(out) == expected
    assert "continuing: 5 of 7 shards" in capsys.readouterr().out
    same = out / "train-00000-of-00005"
    assert same.stat().st_mtime_ns == times[same]


def test_an_interrupted_run_goes_on_to_the_same_bytes(imagenet, tmp_path, monkeypatch):
    flags, *_, out = imagenet
    command, convert, left = [*flags, f"--out={tmp_path}", "--workers=1"], photos.to_jpeg, [30]

    def stop(*args, **options):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return convert(*args, **options)

    monkeypatch.setattr(photos, "to_jpeg", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare.make("imagenet", command)
    monkeypatch.undo()
    finished = contents(tmp_path)
    assert 1 <= len(finished) < 5 and finished.items() <= contents(out).items()
    prepare.make("imagenet", command)
    assert contents(tmp_path) == contents(out)


def test_another_input_or_setting_is_refused_and_never_mixed(tmp_path):
    arguments, *_ = write_imagenet(tmp_path)
    command = [*arguments, "--subset", "--shards=5", "--validation_shards=2"]
    command += [f"--out={tmp_path}/out"]
    prepare.make("imagenet", command)
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match="changed: --seed, --shards.*--overwrite"):
        prepare.make("imagenet", [*command, "--seed=1", "--shards=4"])
    labels = tmp_path / "synset_labels.txt"
    labels.write_text(labels.read_text().replace(SYNSETS[0], SYNSETS[1]))
    os.utime(tmp_path / "ILSVRC2012_img_train.tar", (1, 1))
    with pytest.raises(UserError, match="changed: --train, --validation_labels"):
        prepare.make("imagenet", command)
    assert contents(tmp_path / "out") == before
    prepare.make("imagenet", [*command, "--overwrite", "--shards=3"])
    names = sorted(contents(tmp_path / "out"))
    assert names[1:4] == [f"train-0000{i}-of-00003" for i in range(3)] and len(names) == 6
    other = tmp_path / "taken"
    place(other, {"train-00000-of-00001": b"precious"})
    with pytest.raises(UserError, match="already holds train-00000-of-00001"):
        prepare.make("imagenet", [*command, f"--out={other}"])
    assert contents(other) == {"train-00000-of-00001": b"precious"}


def test_imagenet_must_be_complete(imagenet, tmp_path, monkeypatch):
    flags = [flag for flag in imagenet[0] if flag != "--subset"]
    counts = "48 train images instead of 1,281,167, 20 validation images instead of 50,000"
    with pytest.raises(UserError, match=f"{counts}, 4 classes instead of 1,000; "):
        prepare.make("imagenet", [*flags, f"--out={tmp_path}/out"])
    assert not list((tmp_path / "out").glob("train-*"))  # refused before anything is written
    counts = {"train": 48, "eval": 20, "classes": 4}
    monkeypatch.setattr(preparation, "IMAGENET_COUNTS", counts)
    prepare.make("imagenet", [*flags, f"--out={tmp_path}/out"])
    assert contents(tmp_path / "out") == contents(imagenet[-1])


def test_a_damaged_inner_archive_takes_one_line(tmp_path, capsys):
    arguments, *_ = write_imagenet(tmp_path)
    path = tmp_path / "ILSVRC2012_img_train.tar"
    data = path.read_bytes()
    with tarfile.open(path, "w") as outer:
        add(outer, "n01440764.tar", data[: 512 * 40])
    code, message = leaves("imagenet", [*arguments, "--subset", f"--out={tmp_path}/out"], capsys)
    assert code == 2 and "ILSVRC2012_img_train.tar" in message
    assert "cut short or damaged" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--train=/no/such.tar", "there is no /no/such.tar"),
        ("--validation=", "needs --validation"),
        ("--validation_fraction=0.2", "not both"),
        ("LABELS short", "has 1 lines for the 20 images"),
        ("LABELS numbers", "no class '490' is among the training images; lines must be synsets"),
        ("LABELS none", "has no class folders: give --validation_labels"),
        ("--out=RAW/records", "--out must not be in --train: "),  # later it would be read as input
    ],
)
def test_a_mistake_takes_one_line(change, message, imagenet, tmp_path, capsys):
    command = [*imagenet[0], f"--out={tmp_path}/out", change.replace("RAW", str(tmp_path))]
    if change.startswith("LABELS"):
        lines = {"short": "n1\n", "numbers": "490\n" * 20}.get(change[7:], "")
        (tmp_path / "labels").write_text(lines)
        command = [*command[:2], *command[3:-1]]
        command += [f"--validation_labels={tmp_path}/labels"] if lines else []
    elif "RAW" in change:
        command += [f"--train={tmp_path}/"]
    code, line = leaves("imagenet", command, capsys)
    assert code == 2 and message in line
    assert not [path for path in tmp_path.glob("out/*") if path.name != "prepare_state"]
