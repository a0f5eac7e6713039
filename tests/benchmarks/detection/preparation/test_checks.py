"""validate on images with objects: each planted fault is named with file and record."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from benchmarks.detection.coco import FILES
from benchmarks.detection.preparation import checks
from configs import ssd
from ops import records
from ops.shards import tensorflow
from scripts import prepare, validate
from tests.benchmarks.detection.preparation.test_coco import RECORDS, SHARDS, contents, write_coco
from tests.ops.preparation import test_schema as test_records
from tests.preparation import check

BOX = "image/object/bbox/"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """{name: bytes} of a prepared set with masks: 3 and 2 shards."""
    folder = tmp_path_factory.mktemp("coco")
    flags = [*write_coco(folder), "--subset", "--masks", *SHARDS]
    prepare.make("coco", [*flags, f"--out={folder}/records"])
    return contents(folder / "records")


@pytest.fixture
def folder(prepared, tmp_path):
    """A copy of the set that a test may spoil."""
    for name, data in prepared.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def edit(folder, change, name=RECORDS[0], with_boxes=1):
    """Applies `change` to the features of the first record with so many boxes; returns its name."""
    path, found = folder / name, ""
    out = []
    for i, record in enumerate(test_records.frames(path)):
        message = tensorflow().train.Example.FromString(record)
        feature = message.features.feature
        if not found and len(feature["image/object/class/label"].int64_list.value) >= with_boxes:
            change(feature)
            found = f"{name} record {i} "
        out.append(records.frame(message.SerializeToString()))
    path.write_bytes(b"".join(out))
    assert found
    return found


def test_a_clean_set_passes(folder, capsys):
    code, report = check(folder, capsys)
    assert (code, report["errors"], report["warnings"]) == (0, {}, {})
    assert report["manifest"] and report["num_label_classes"] == 3
    assert {name: row["examples"] for name, row in report["splits"].items()} == {
        "train": 12,
        "val": 6,
    }
    rows = [(row["label"], row["id"], row["name"]) for row in report["classes"]]
    assert rows == [(1, 3, "cat"), (2, 7, "Ähre"), (3, 12, "owl")]
    with pytest.raises(SystemExit) as leaving:
        validate.main([str(folder)])
    printed = capsys.readouterr().out
    assert leaving.value.code == 0 and printed.endswith("fit for training\n")
    assert "objects per class" in printed and "  12 owl: " in printed


def test_googles_own_records_pass(folder, capsys):
    """Without a manifest; training images may have no boxes, and lists without values may lack."""
    (folder / "manifest.json").unlink()

    def empty(feature):
        for key in [key for key in feature if key.startswith("image/object/")]:
            del feature[key]

    record = edit(folder, empty)
    code, report = check(folder, capsys)
    assert (code, report["errors"]) == (0, {})
    [line] = report["warnings"]["no boxes"]["first"]
    assert line.startswith(record)


def floats(key, i, value):
    return lambda feature: feature[BOX + key].float_list.value.__setitem__(i, value)


def flat(feature):
    feature[BOX + "ymax"].float_list.value[0] = feature[BOX + "ymin"].float_list.value[0]


def text(key, value):
    def change(feature):
        del feature[key].bytes_list.value[:]
        feature[key].bytes_list.value.append(value)

    return change


def number(key, value):
    return lambda feature: feature[key].int64_list.value.__setitem__(0, value)


def drop(key):
    return lambda feature: feature.pop(key)


def shorter(feature):
    del feature["image/object/area"].float_list.value[0]


def small_mask(feature):
    file = io.BytesIO()
    Image.fromarray(np.zeros((4, 5), np.uint8)).save(file, "PNG")
    feature["image/object/mask"].bytes_list.value[1] = file.getvalue()


def redrawn(draw):
    """Changes the mask uint8[h, w] of the second object in place."""

    def change(feature):
        masks = feature["image/object/mask"].bytes_list.value
        with Image.open(io.BytesIO(masks[1])) as image:
            pixels = np.array(image)
        draw(pixels)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        masks[1] = file.getvalue()

    return change


def elsewhere(pixels):
    pixels[:] = 1 - pixels


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (floats("xmax", 1, 1.5), "boxes outside the image", "object 1 (category 12) has a box out"),
        (floats("ymin", 0, -0.1), "boxes outside the image", "object 0 (category 3) has a box out"),
        (floats("ymin", 0, float("nan")), "boxes outside the image", "object 0 (category 3)"),
        (flat, "boxes without area", "object 0 (category 3) has a box without area: y "),
        (number("image/object/class/label", 4), "unknown category", "none of the 3"),
        (drop("image/source_id"), "keys", "has no image/source_id"),
        (text("image/source_id", b"0007.jpg"), "image ids", "is no number"),
        (text("image/source_id", b" 7"), "image ids", "is no number"),
        (text("image/source_id", b"9876543210"), "image ids", "does not fit 32 bits"),
        (drop("image/object/class/label"), "keys", "has no image/object/class/label"),
        (drop(f"{BOX}xmin"), "keys", "has no image/object/bbox/xmin"),
        (shorter, "objects", "image/object/area of "),
        (small_mask, "masks", "object 1 has a mask of 4x5 pixels"),
        (lambda f: f["image/object/mask"].bytes_list.value.__setitem__(0, b"x"), "masks", "no PNG"),
        (redrawn(elsewhere), "masks", "object 1 has a mask with "),
        (number("image/height", 7), "image size", "but says 7x"),
        (text("image/encoded", b"\xff\xd8\xff no"), "undecodable image", "damaged or cut short"),
    ],
)
def test_a_fault_is_named_with_file_and_record(change, kind, message, folder, capsys):
    record = edit(folder, change, with_boxes=2)
    code, report = check(folder, capsys)
    lines = report["errors"][kind]["first"]
    assert code == 1 and [line for line in lines if line.startswith(record) and message in line]


def test_a_mask_without_a_pixel_is_a_warning(folder, capsys):
    record = edit(folder, redrawn(lambda pixels: pixels.fill(0)), with_boxes=2)
    _, report = check(folder, capsys)
    [line] = report["warnings"]["masks"]["first"]
    assert line.startswith(f"{record}") and "object 1 has a mask without a pixel" in line


@pytest.mark.parametrize(
    ("box", "shares"),
    [
        ((0.1, 0.2, 0.3, 0.6), (0.5, 8 / 100)),  # 1 of its 2 pixels
        ((0.1, 0.2, 0.1 + 1e-7, 0.2), (0, 0)),
        ((0.15, 0.2, 0.25, 0.6), (0.5, 8 / 100)),  # touches the same pixels
        ((0, 0, 1, 1), (1, 1)),
        ((-1, -1, 2, 2), (1, 1)),
    ],
)
def test_the_share_of_a_mask_in_a_box(box, shares):
    mask = np.zeros((10, 10), bool)
    mask[2, 5] = mask[9, 9] = True
    assert checks._shares(mask, box) == pytest.approx(shares)


def test_ids_are_compared_with_the_annotations(folder, capsys):
    first = edit(folder, text("image/source_id", b"77"), RECORDS[3], 0)
    code, report = check(folder, capsys)
    assert code == 1
    lines = report["errors"]["image ids"]["first"]
    assert lines == [f"{first}has image id 77, which is not in instances_val2017.json"]
    lines = report["errors"]["missing ids"]["first"]
    assert lines == ["image 0 of instances_val2017.json has no record"]
    edit(folder, text("image/source_id", b"1"), RECORDS[3], 0)
    code, report = check(folder, capsys)
    [line] = report["errors"]["image ids"]["first"]
    assert code == 1 and line.endswith("have image id 1") and line.count("val-00000") == 2


def remove_annotations(folder):
    (folder / "instances_val2017.json").unlink()


def spoil_annotations(folder):
    (folder / "instances_val2017.json").write_text("{")


def test_annotations_may_lie_where_training_finds_them(folder, capsys):
    """In Google's folder of v0.5, ssd_coco."""
    (folder / "raw-data/annotations").mkdir(parents=True)
    path = folder / "instances_val2017.json"
    path.rename(folder / "raw-data/annotations/instances_val2017.json")
    code, report = check(folder, capsys)
    assert (code, report["errors"], report["warnings"]) == (0, {}, {})
    assert ssd.get_config().eval_annotations == FILES
    path.write_text("{}")
    code, report = check(folder, capsys)
    assert code == 1 and "matches 2 files" in report["errors"]["annotations"]["first"][0]


def rename(folder):
    content = json.loads((folder / "instances_val2017.json").read_text())
    content["categories"][0]["name"] = "eagle"
    (folder / "instances_val2017.json").write_text(json.dumps(content))


def lose_a_shard(folder):
    (folder / RECORDS[1]).unlink()


def add_another_set(folder):
    (folder / "train-00000-of-00001").write_bytes((folder / RECORDS[1]).read_bytes())


def change_a_record(folder):
    edit(folder, number("image/object/is_crowd", 1))


@pytest.mark.parametrize(
    ("spoil", "level", "kind", "message"),
    [
        (remove_annotations, "warnings", "annotations", "no instances_val2017.json: the score"),
        (spoil_annotations, "errors", "annotations", "is damaged or no JSON"),
        (rename, "warnings", "category names", "category 12 is called owl, not eagle"),
        (lose_a_shard, "errors", "missing shard", RECORDS[1]),
        (lose_a_shard, "errors", "training refuses", "1 of 3 files are missing"),
        (add_another_set, "errors", "mixed sets", "train-00000-of-00001 lies beside files that"),
        (change_a_record, "errors", "manifest", f"{RECORDS[0]}: sha256 is"),
    ],
)
def test_faults_of_the_set(spoil, level, kind, message, folder, capsys):
    spoil(folder)
    code, report = check(folder, capsys)
    assert code == (1 if level == "errors" else 0)
    assert [line for line in report[level][kind]["first"] if message in line]


def test_the_number_of_classes_is_not_an_argument_here(folder, capsys):
    code, report = check(folder, capsys, "--num_label_classes=3")
    assert code == 1 and "not for the records of detection" in str(report["errors"]["arguments"])
