"""validate: a clean set passes, and each planted fault is found, named and fatal."""

import io
import struct
import types
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.resnet.preparation import checks
from benchmarks.resnet.records import open_records
from errors import DataError
from ops import records
from ops.preparation import checks as shared
from ops.preparation.checks import Findings, Shard
from ops.shards import tensorflow
from scripts import prepare, validate
from tests.ops.preparation import test_schema as test_records
from tests.preparation import check

CLASSES = ("cats", "dogs", "two words")


def photo(seed, kind="JPEG"):
    corners = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(corners).resize((40, 30), Image.Resampling.BICUBIC).save(file, kind)
    return file.getvalue()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """{name: bytes} of a prepared set of 3 classes, 24 and 6 images, 3 and 2 shards."""
    folder = tmp_path_factory.mktemp("photos")
    for c, name in enumerate(CLASSES):
        (folder / "in" / name).mkdir(parents=True)
        for i in range(10):
            (folder / "in" / name / f"{i}.jpg").write_bytes(photo(10 * c + i))
    flags = ["--layout=folder", f"--train={folder}/in", f"--out={folder}/out", "--shards=3"]
    prepare.make("imagenet", [*flags, "--validation_shards=2", "--validation_fraction=0.2"])
    return {path.name: path.read_bytes() for path in (folder / "out").iterdir() if path.is_file()}


@pytest.fixture
def folder(prepared, tmp_path):
    """A copy of the set that a test may spoil."""
    for name, data in prepared.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def rewrite(path, change):
    """Replaces the records of a shard by what `change` makes of their list."""
    path.write_bytes(b"".join(map(records.frame, change(test_records.frames(path)))))


def edited(record, **features):
    """A record with other values: label=3, encoded=b'...', or filename=None to drop the key."""
    message = tensorflow().train.Example.FromString(record)
    keys = {"label": "image/class/label", "encoded": "image/encoded"}
    for name, value in features.items():
        key = keys.get(name, f"image/{name}")
        del message.features.feature[key]
        if isinstance(value, int):
            message.features.feature[key].int64_list.value.append(value)
        elif value is not None:
            message.features.feature[key].bytes_list.value.append(value)
    return message.SerializeToString()


def test_a_clean_set_passes(folder, capsys):
    code, report = check(folder, capsys)
    assert (code, report["ok"], report["errors"], report["warnings"]) == (0, True, {}, {})
    assert report["splits"]["train"]["examples"] == 24 and report["manifest"]
    assert report["splits"]["validation"]["shards"] == 2
    rows = [{"label": i + 1, "name": n, "train": 8, "validation": 2} for i, n in enumerate(CLASSES)]
    assert report["classes"] == rows and report["num_label_classes"] == 3
    with pytest.raises(SystemExit) as leaving:
        validate.main([str(folder), "--workers=7"])
    message = capsys.readouterr()
    assert leaving.value.code == 0 and message.out.endswith("fit for training\n")
    assert "train: 24 examples, 3 shards" in message.out and "3 two words: 8 train" in message.out
    assert "checking [####################] 100% 30 images" in message.err


def test_sets_of_others_pass(tmp_path, capsys):
    """Without a manifest, in one folder, or in train/ and validation/ as the tutorial has them."""
    flags = ["--images=11", "--shards=4", "--validation_images=3", "--validation_shards=2"]
    prepare.make("fake", ["--out", str(tmp_path), *flags, "--size=40x60", "--classes=3"])
    code, report = check(tmp_path, capsys)
    assert (code, report["errors"], report["manifest"]) == (0, {}, False)
    for split in records.SPLITS:
        (tmp_path / split).mkdir()
        for path in tmp_path.glob(f"{split}-*"):
            path.rename(tmp_path / split / path.name)
    code, moved = check(tmp_path, capsys)
    assert code == 0 and moved["splits"] == report["splits"]


def test_the_printed_report(capsys):
    """20 classes are listed; the median is the eleventh of the sorted numbers."""
    rows = [{"label": i, "name": f"c{i}", "train": i * i, "val": 1} for i in range(1, 21)]
    split = {"examples": 1_234, "shards": 3, "missing": ["x", "y"], "bytes": 2_550_000 * 10**6}
    faults = {"crc": {"count": 1_003, "first": ["a", "b"]}, "cut": {"count": 1, "first": ["c"]}}
    report = {
        **{"splits": {"train": split, "val": {**split, "missing": []}}, "classes": rows},
        **{"num_label_classes": 21, "manifest": False, "ok": False},
        **{"errors": faults, "warnings": {"cut": {"count": 1, "first": ["c"]}}},
    }
    validate.print_report(report)
    assert capsys.readouterr().out.splitlines() == [
        "train: 1,234 examples, 3 shards, 2 missing, 2,550,000.0 MB",
        "val: 1,234 examples, 3 shards, 2,550,000.0 MB",
        "classes: 20, num_label_classes=21",
        "  train images per class: 1 to 400, median 121",
        "  val images per class: 1 to 1, median 1",
        *(f"  {i} c{i}: {i * i} train, 1 val" for i in range(1, 21)),
        "manifest.json: none",
        *("ERROR crc: 1,003", "  a", "  b", "  and 1,001 more", "ERROR cut: 1", "  c"),
        *("WARNING cut: 1", "  c", "NOT fit for training: see the errors above"),
    ]
    report["classes"] = [{**row, "id": 100 + row["label"]} for row in [*rows, rows[-1]]]
    validate.print_report({**report, "ok": True, "manifest": True, "errors": {}})
    lines = capsys.readouterr().out.splitlines()
    assert lines[3:6] == [
        "  train objects per class: 1 to 400, median 121",
        "  val objects per class: 1 to 1, median 1",
        "manifest.json: compared",
    ]


@pytest.mark.parametrize(("length", "rows"), [(0, "one pair"), (256, "256")])
def test_the_printed_report_of_text(length, rows, capsys):
    split = {"examples": 9, "shards": 1, "missing": [], "bytes": 0, "pairs": 1_234}
    split |= {"tokens": [5_000, 6], "length": length}
    report = {"splits": {"train": split}, "vocabulary": 32_316, "manifest": True, "ok": True}
    validate.print_report({**report, "errors": {}, "warnings": {}})
    assert capsys.readouterr().out.splitlines() == [
        "train: 9 examples, 1 shards, 0.0 MB",
        f"  1,234 pairs, 5,000 and 6 tokens, rows of {rows}",
        *("vocabulary: 32,316 entries", "manifest.json: compared", "fit for training"),
    ]


def shard(name, labels=(), names=None, **values):
    split = name.rpartition("/")[2].split("-")[0]
    return Shard(name, name, split, 9, labels=list(labels), names=names or {}, **values)


def texts(findings, level="errors"):
    return {kind: group["first"] for kind, group in findings.to_json(level).items()}


def test_counts_and_names_of_classes():
    findings, six = Findings(), [f"n{i}" for i in range(6)]
    first = shard("train-00000-of-00001", [1, 1, 3], {1: {"a"}, 3: {*six}})
    other = shard("val-00000-of-00001", [3, 7], {7: {"a"}, **{k: {"same"} for k in range(11, 17)}})
    rows = checks._counts([first, other], 3, findings)
    assert rows == [
        {"label": 1, "name": "a", "train": 2, "val": 0},
        {"label": 3, "name": "n0", "train": 1, "val": 1},
        {"label": 7, "name": "a", "train": 0, "val": 1},
    ]
    assert texts(findings, "warnings") == {
        "class names": [
            "a is the name of labels 1, 7",
            "label 3 has several names: n0, n1, n2, n3, n4",
            "same is the name of labels 11, 12, 13, 14, 15",
        ],
        "no images": [
            "class 1 has no val images",
            "class 2 has no train images",
            "class 2 has no val images",
        ],
    }


@pytest.mark.parametrize(
    ("asked", "manifest", "highest", "number"),
    [(None, None, 3, 3), (None, 4, 4, 4), (5, None, 5, 5), (5, 4, 5, 5)],
)
def test_the_number_of_classes(asked, manifest, highest, number, monkeypatch):
    """Asked for, else that of the manifest, else the largest label of 1 to 1,000."""
    shards, findings, labels = [shard("train-00000-of-00001", [1, 3, 1001])], Findings(), []
    monkeypatch.setattr(
        shared, "scan_all", lambda shards, check_of, *_: labels.append(check_of(shards[0]))
    )
    args: Any = types.SimpleNamespace(num_label_classes=asked, workers=1)
    content = manifest and {"classes": [None] * manifest}
    rows, count = checks.scan(args, shards, content, findings)
    assert count == number and labels[0].keywords["labels"] == range(
        1, (asked or manifest or 1000) + 1
    )
    empty = {f"class {k} has no train images" for k in range(1, highest + 1) if k not in (1, 3)}
    assert set(texts(findings, "warnings").get("no images", [])) == empty
    nothing = checks.scan(args, [shard("train-0-of-1")], None, Findings())
    assert nothing[1] == (asked or 0)


def test_shards_that_are_missing_or_of_several_sets():
    names = ["train-00000-of-00003", "train-00003-of-00003", "train/train-00000-of-00003"]
    names += ["train-00001-of-00002", "val-00001-of-00002"]
    findings = Findings()
    missing = shared.missing([*map(shard, names)], findings)
    gaps = ["train-00000-of-00002", "train-00001-of-00003", "train-00002-of-00003"]
    assert missing == {"train": gaps, "val": ["val-00000-of-00002"]}
    assert texts(findings) == {
        "missing shard": [*gaps, "val-00000-of-00002"],
        "mixed sets": [
            "train shards of several sets: -of-00002, -of-00003",
            "train-00000-of-00003 is in the folder and in train/ as well",
            "train-00003-of-00003: numbers end at 00002",
        ],
    }
    findings = Findings()
    one = shard("train-00001-of-00002.tfrecord")
    assert shared.missing([one], findings) == {"train": ["train-00000-of-00002.tfrecord"]}


def test_images_that_the_manifest_counts_otherwise():
    listed = {"name": "train-00000-of-00001", "examples": 3, "bytes": 9, "sha256": "s"}
    manifest: dict[str, Any] = {"splits": {"train": {}}}
    manifest["classes"] = [
        {"label": k, "name": f"c{k}", "train": n} for k, n in ((1, 2), (2, 0), (3, 1_000))
    ]
    counts, findings = [{"label": 1, "train": 1_500}, {"label": 2, "train": 0}], Findings()
    own = shard("train-00000-of-00001", examples=3, sha256="s")
    shared.compare([own, shard("val-0")], {listed["name"]: listed}, findings)
    shared._compare_classes(manifest, counts, findings)
    assert texts(findings)["manifest"] == [
        "class 1 (c1) has 1,500 train images, in the manifest 2",
        "class 3 (c3) has 0 train images, in the manifest 1,000",
        "val-0 is not in the manifest",
    ]


def test_an_interruption_has_its_exit_code(tmp_path, monkeypatch, capsys):
    def stop(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(validate, "validate", stop)
    with pytest.raises(SystemExit) as leaving:
        validate.main([str(tmp_path)])
    assert leaving.value.code == 130
    assert capsys.readouterr().err.endswith("validate: stopped\n")


def bad_crc(folder):
    path = folder / "train-00000-of-00003"
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)


def bad_length(folder):
    path = folder / "train-00000-of-00003"
    path.write_bytes(struct.pack("<Q", 7) + path.read_bytes()[8:])


def cut(folder):
    path = folder / "train-00001-of-00003"
    path.write_bytes(path.read_bytes()[:-100])


def cut_head(folder):
    path = folder / "train-00001-of-00003"
    path.write_bytes(path.read_bytes() + b"\1\0\0")


def first(**features):
    def change(folder):
        rewrite(
            folder / "train-00002-of-00003", lambda rows: [edited(rows[0], **features), *rows[1:]]
        )

    return change


def twice(folder):
    rewrite(folder / "train-00000-of-00003", lambda rows: [*rows, rows[2]])


def leaked(folder):
    [stolen, *_] = test_records.frames(folder / "validation-00001-of-00002")
    rewrite(folder / "train-00000-of-00003", lambda rows: [*rows, stolen])


def swap(folder):
    a, b = folder / "train-00000-of-00003", folder / "train-00001-of-00003"
    rows = [test_records.frames(path) for path in (a, b)]
    rewrite(a, lambda _: [rows[1][0], *rows[0][1:]])
    rewrite(b, lambda _: [rows[0][0], *rows[1][1:]])


JPEG = photo(99)
FAULTS = {
    "crc": (bad_crc, "damaged", "train-00000-of-00003 record 0 has a wrong checksum"),
    "length crc": (bad_length, "damaged", "record 0 has a wrong length checksum"),
    "cut": (cut, "truncated", "train-00001-of-00003 record 7 is cut short"),
    "cut head": (cut_head, "truncated", "train-00001-of-00003 record 8 is cut short"),
    "label 0": (first(label=0), "label 0", "train-00002-of-00003 record 0 has label 0"),
    "label 4": (first(label=4), "label range", "record 0 has label 4, outside of 1..3"),
    "label -1": (first(label=-1), "label range", "has label -1"),
    "no label": (first(label=None), "keys", "has no image/class/label"),
    "text label": (first(label=b"cat"), "keys", "has not one value (int64_list) of"),
    "no image": (first(encoded=None), "keys", "has no image/encoded"),
    "text image": (first(encoded=b"<html>"), "undecodable image", "record 0 ("),
    "half image": (first(encoded=JPEG[:400]), "undecodable image", "damaged or cut short"),
    "webp": (first(encoded=photo(1, "WEBP")), "undecodable image", "not a JPEG, PNG"),
    "text twice": (
        first(**{"class/text": 7}),
        "keys",
        "has not one value (bytes_list) of image/class/text",
    ),
    "no example": (
        lambda folder: rewrite(folder / "train-00002-of-00003", lambda rows: [b"\xff", *rows[1:]]),
        "damaged",
        "record 0 is no tf.train.Example",
    ),
    "twice": (twice, "duplicates within a split", "record 2 and train-00000-of-00003 record 8"),
    "leak": (leaked, "duplicates across splits", "validation-00001-of-00002 record 0"),
    "missing": (
        lambda folder: (folder / "train-00001-of-00003").unlink(),
        "missing shard",
        "train-00001-of-00003",
    ),
    "stray": (
        lambda folder: (folder / "train-00001-of-00003.bak").write_bytes(b""),
        "stray file",
        "train-00001-of-00003.bak would be read",
    ),
    "mixed": (
        lambda folder: (folder / "train-00000-of-00001").write_bytes(b""),
        "mixed sets",
        "-of-00001, -of-00003",
    ),
    "swapped rows": (swap, "manifest", "train-00000-of-00003: sha256 is"),
    "manifest": (
        lambda folder: (folder / "manifest.json").write_text("{}"),
        "manifest",
        "is not one that",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, folder, capsys):
    plant, kind, message = FAULTS[fault]
    plant(folder)
    code, report = check(folder, capsys)
    assert code == 1 and not report["ok"]
    assert any(message in text for text in report["errors"][kind]["first"]), report["errors"]
    with pytest.raises(SystemExit) as leaving:
        validate.main([str(folder)])
    text = capsys.readouterr().out
    assert leaving.value.code == 1 and message in text and "NOT fit for training" in text
    if fault not in ("manifest", "stray"):  # with one the change shows there as well
        assert "manifest" in report["errors"]
        (folder / "manifest.json").unlink()
        code, report = check(folder, capsys, "--num_label_classes=3")
        assert code == (0 if fault == "swapped rows" else 1)


@pytest.mark.parametrize(
    ("spoil", "kind", "message"),
    [
        (lambda split: rewrite(split, lambda rows: []), "training refuses", "records: the 1 files"),
        (lambda split: split.unlink(), "training refuses", "no file there matches"),
        (
            lambda split: rewrite(split, lambda rows: [edited(rows[0], label=1 << 40), *rows[1:]]),
            "label range",
            f"has label {1 << 40}, outside of 1..1000",
        ),
    ],
)
@pytest.mark.parametrize("split", records.SPLITS)
def test_what_training_refuses_is_not_fit(split, spoil, kind, message, tmp_path, capsys):
    """The same folder is refused by the program that trains."""
    flags = ["--images=9", "--shards=1", "--validation_images=3", "--validation_shards=1"]
    prepare.make("fake", ["--out", str(tmp_path), *flags, "--size=20x20", "--classes=3"])
    spoil(tmp_path / f"{split}-00000-of-00001")
    code, report = check(tmp_path, capsys)
    assert code == 1 and message in report["errors"][kind]["first"][0]
    assert report["num_label_classes"] <= 3
    name = {"train": "train", "validation": "eval"}[split]
    with pytest.raises(DataError):
        open_records(str(tmp_path), f"{split}-*", 1000, f"{tmp_path}/index", name)


def test_fewer_classes_than_in_the_manifest(folder, capsys):
    code, report = check(folder, capsys, "--num_label_classes=2")
    assert code == 1
    assert "but the data manifest names 3 classes" in report["errors"]["label range"]["first"][0]


def test_what_training_does_not_read_is_a_warning(folder, capsys):
    (folder / "manifest.json").unlink()
    first(height=31, filename=None)(folder)
    code, report = check(folder, capsys)
    assert code == 0
    assert report["warnings"]["image size"]["first"] == [
        "train-00002-of-00003 record 0 is 30x40, but says 31x40"
    ]
    assert report["warnings"]["keys"] == {"count": 1, "first": ["records has no image/filename"]}
    twice(folder)
    assert check(folder, capsys)[0] == 1
    code, report = check(folder, capsys, "--allow_duplicates")
    assert code == 0 and "duplicates within a split" in report["warnings"]


def test_faults_are_counted_and_the_first_named(folder, capsys):
    for path in folder.glob("train-*"):
        rewrite(path, lambda rows: [edited(row, label=0) for row in rows])
    code, report = check(folder, capsys)
    group = report["errors"]["label 0"]
    assert (code, group["count"], len(group["first"])) == (1, 24, 20)
    assert group["first"] == check(folder, capsys, "--workers=1")[1]["errors"]["label 0"]["first"]
    code, report = check(folder, capsys, "--num_label_classes=1001")
    assert "label 0" not in report["errors"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such/folder"], "there is no folder /no/such/folder"),
        (["."], "holds no records"),
        ([], "required: DIR"),
        ([".", "--num_label_classes=99999999999"], "10,000,000 or less"),
        ([".", "--num_label_classes=0"], "must be a whole number of 1 or more"),
        ([".", "--num_label_classes=10000001"], "10,000,000 or less"),
        ([".", "--num_label_classes=1"], "holds no records"),
        ([".", "--workers=0"], "must be a whole number of 1 or more"),
    ],
)
def test_a_mistake_takes_one_line(arguments, message, tmp_path, capsys):
    arguments = [str(tmp_path) if a == "." else a for a in arguments]
    with pytest.raises(SystemExit) as leaving:
        validate.main(arguments)
    assert leaving.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]
