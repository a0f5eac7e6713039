"""Record files as a stranger reads them: framing by hand, then tf.train.Example, then PIL."""

import io
import pathlib
import re
import struct

import google_crc32c
import numpy as np
import pytest
from PIL import Image

from benchmarks.resnet.preparation import digits as preparation
from common.data import records
from common.errors import UserError
from common.tensorflow import tensorflow
from scripts import prepare
from tests.helpers.preparation import leaves

NUMBERS = "image/height", "image/width", "image/channels", "image/class/label"
TEXTS = "image/colorspace", "image/class/synset", "image/format", "image/filename", "image/encoded"
SCHEMA = dict.fromkeys(NUMBERS, "int64_list") | dict.fromkeys(TEXTS, "bytes_list")


def masked_crc(data):
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frames(path):
    """The records of one file, every length and checksum verified."""
    data, at, parsed = path.read_bytes(), 0, []
    while at < len(data):
        length, length_crc = struct.unpack_from("<QI", data, at)
        assert length_crc == masked_crc(data[at : at + 8])
        record = data[at + 12 : at + 12 + length]
        assert len(record) == length
        assert struct.unpack_from("<I", data, at + 12 + length) == (masked_crc(record),)
        parsed.append(record)
        at += 16 + length
    return parsed


def parse(record):
    """One record as {key: value}, its keys, types and single values verified."""
    message = tensorflow().train.Example.FromString(record)
    feature = dict(message.features.feature)
    assert {key: value.WhichOneof("kind") for key, value in feature.items()} == SCHEMA
    values = {key: getattr(feature[key], kind).value for key, kind in SCHEMA.items()}
    assert all(len(value) == 1 for value in values.values())
    return {key: value[0] for key, value in values.items()}


def pixels(row):
    image = Image.open(io.BytesIO(row["image/encoded"]))
    assert (image.format, image.mode) == ("JPEG", "RGB")
    assert image.size == (row["image/width"], row["image/height"])
    fixed = ("image/colorspace", "image/channels", "image/format")
    assert tuple(row[key] for key in fixed) == (b"RGB", 3, b"JPEG")
    return np.asarray(image)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def rows(folder, split):
    return [parse(record) for path in sorted(folder.glob(f"{split}-*")) for record in frames(path)]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    out = tmp_path_factory.mktemp("digits")
    prepare.make("digits", ["--out", str(out)])
    return out


def test_an_unwritable_folder_takes_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, line = leaves("digits", ["--out", str(tmp_path / "file" / "x")], capsys)
    assert code == 1 and "failed: " in line and "file/x" in line


def test_digits_are_scikit_learns(digits):
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rows_by_split = {split: rows(digits, split) for split in records.SPLITS}
    assert [len(part) for part in rows_by_split.values()] == [1437, 360]
    assert [len(list(digits.glob(f"{split}-*"))) for split in rows_by_split] == [8, 2]
    seen = set()
    for row in rows_by_split["train"] + rows_by_split["validation"]:
        name = re.fullmatch(rb"digit_(\d)_(\d{4})\.JPEG", row["image/filename"])
        assert name
        digit, i = map(int, name.groups())
        seen.add(i)
        assert (digit, row["image/class/label"]) == (labels[i], labels[i] + 1)
        assert row["image/class/synset"] == b"digit_%d" % digit
        image = pixels(row).astype(float)
        assert image.shape == (32, 32, 3) and np.ptp(image, axis=-1).max() == 0
        # The middle of each 4x4 block: the outer pixels blend into the neighbours.
        small = image[..., 0].reshape(8, 4, 8, 4)[:, 1:3, :, 1:3].mean((1, 3)) * (16 / 255)
        original = images[i].reshape(8, 8)
        assert np.abs(small - original).mean() < 0.5
    assert seen == set(range(1797))
    # The same share of every digit in both splits.
    shares = [
        np.bincount([r["image/class/label"] for r in part], minlength=11)[1:] / len(part)
        for part in rows_by_split.values()
    ]
    np.testing.assert_allclose(shares[0], shares[1], atol=0.002)


def test_a_held_out_digit_of_each_class_is_a_picture(digits):
    """Twice as small as the viewer's, it is the one in the records, whose shade JPEG changes."""
    names = {row["image/filename"]: row for row in rows(digits, "validation")}
    paths = sorted(digits.with_name(f"{digits.name}_photos").iterdir())
    assert [path.name[:2] for path in paths] == [f"{digit}_" for digit in range(10)]
    for path in paths:
        image = Image.open(path)
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", (256, 256))
        stored = pixels(names[b"digit_%s.JPEG" % path.stem.encode()]).astype(float)
        small = np.asarray(image.resize((32, 32), Image.Resampling.BOX), float)
        assert np.abs(small - stored).mean() < 4


@pytest.mark.long
def test_complete_digits_are_left_alone_and_others_replaced(digits, tmp_path):
    before = contents(digits)
    for name, data in before.items():
        (tmp_path / name).write_bytes(data)
    first, second = tmp_path / "train-00000-of-00008", tmp_path / "validation-00001-of-00002"
    times = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert "already complete" in prepare.make("digits", ["--out", str(tmp_path)])
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times

    swapped = before["validation-00000-of-00002"]
    for path, data in ((first, None), (first, before[first.name][:-9]), (second, swapped)):
        path.unlink() if data is None else path.write_bytes(data)
        assert "wrote" in prepare.make("digits", ["--out", str(tmp_path)])
        assert contents(tmp_path) == before


def test_digits_do_not_replace_other_images(tiny_records, tmp_path):
    others = pathlib.Path(tiny_records)
    before = contents(others)
    with pytest.raises(UserError, match="holds other images; choose another --out"):
        prepare.make("digits", ["--out", tiny_records])
    assert contents(others) == before
    theirs = before["train-00000-of-00004"]
    for i in range(8):
        (tmp_path / f"train-0000{i}-of-00008").write_bytes(theirs)
    with pytest.raises(UserError, match="holds other images; choose another --out"):
        prepare.make("digits", ["--out", str(tmp_path)])
    assert (tmp_path / "train-00000-of-00008").read_bytes() == theirs


def test_some_digits_are_the_first_images_of_the_complete_set():
    every, small = preparation.examples(), preparation.examples(range(5, 10), per_class=20)
    for split, examples in every.items():
        rows = [row for row in map(parse, examples) if row["image/class/label"] > 5]
        kept = list(map(parse, small[split]))
        for label in range(1, 6):  # of 5 to 9
            names = [row["image/filename"] for row in rows if row["image/class/label"] == label + 5]
            assert all(name.startswith(b"digit_%d_" % (label + 4)) for name in names)
            own = [row["image/filename"] for row in kept if row["image/class/label"] == label]
            assert own == (names[:20] if split == "train" else names)
        assert len(kept) == (100 if split == "train" else len(rows))


@pytest.mark.parametrize("flags", [["--digits=9-5"], ["--digits=5"], ["--per_class=1"]])
def test_odd_tasks_are_refused(flags, tmp_path, capsys):
    with pytest.raises(SystemExit):
        prepare.make("digits", ["--out", str(tmp_path), *flags])
    assert "must be" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
