"""`prepare coco` on archives and folders in COCO's form, read back by hand."""

import collections
import hashlib
import io
import json
import re
import zipfile

import numpy as np
import pytest
from PIL import Image

from benchmarks.detection.preparation.coco import _warn, small_data
from common.data import data_manifest
from common.preparation import arguments
from common.tensorflow import tensorflow
from scripts import prepare
from tests.benchmarks.resnet.preparation.test_digits import frames
from tests.benchmarks.resnet.preparation.test_imagenet import (
    contents,
    encoded,
    near,
    picture,
    pixels,
)
from tests.benchmarks.resnet.preparation.test_imagenet_gcs import assert_same
from tests.conftest import plan_of
from tests.helpers.preparation import typed

CATEGORIES = [{"id": 12, "name": "owl"}, {"id": 3, "name": "cat"}, {"id": 7, "name": "Ähre"}]
SHARDS = ["--shards=3", "--validation_shards=2"]
RECORDS = [
    *(f"train-{i:05d}-of-00003.tfrecord" for i in range(3)),
    *(f"val-{i:05d}-of-00002.tfrecord" for i in range(2)),
]
FLOAT_KEYS = tuple(f"image/object/bbox/{n}" for n in ("ymin", "xmin", "ymax", "xmax"))


def image_file(i):
    """(name, bytes, (height, width)) of the i-th image; some need another encoding."""
    size = (40 + i, 30)
    kinds = {1: ("jpg", "JPEG", "L"), 2: ("jpg", "JPEG", "CMYK"), 3: ("png", "PNG", "RGB")}
    suffix, kind, mode = kinds.get(i, ("jpg", "JPEG", "RGB"))
    more = {}
    if i == 4:  # stands on its side; its annotations are of the upright picture
        more["exif"] = Image.Exif()
        more["exif"][0x0112] = 6
    data = encoded(picture(i, size, mode), kind, **more)
    return f"{i:04d}.{suffix}", data, size if i == 4 else size[::-1]


def boxes_of(i):
    """[(category, box, crowd)] of an image; every fourth has none."""
    if i % 4 == 3:
        return []
    rows = [(3, [1.5, 2, 20, 10.25], 0), (12, [0, 0, 29, 30], 0), (7, [10, 4, 5, 6], i % 2)]
    return rows[: 1 + i % 3]


def annotations(first, count, ids):
    """COCO's dict for images `first` ... with boxes, polygons, and runs for crowds."""
    data = {"info": {}, "images": [], "categories": [*CATEGORIES], "annotations": []}
    for i in range(first, first + count):
        name, _, (height, width) = image_file(i)
        image_id = ids(i)
        row = {"id": image_id, "file_name": name, "height": height, "width": width}
        data["images"].append(row | {"license": 1, "coco_url": "http://x"})
        for category, box, crowd in boxes_of(i):
            x, y, w, h = box
            outline = [[x, y, x + w, y, x + w, y + h, x, y + h]]
            if crowd:
                inside = np.zeros((width, height), int)
                inside[int(x) : int(x + w), int(y) : int(y + h)] = 1
                edges = np.flatnonzero(np.diff(inside.ravel(), prepend=0)).tolist()
                counts = np.diff([0, *edges, inside.size]).tolist()
                outline = {"counts": counts, "size": [height, width]}
            data["annotations"].append(
                {"id": len(data["annotations"]), "image_id": image_id, "category_id": category}
                | {"bbox": box, "area": w * h / 2, "iscrowd": crowd, "segmentation": outline}
            )
    return data


def train_id(i):
    return 2**31 - 1 - 5 * i


def val_id(i):
    return i - 20


TRAIN, VAL = (0, 16, train_id), (20, 6, val_id)


def write_coco(folder):
    """The three archives as they are downloaded, and the same unpacked; returns the arguments."""
    for split, (first, count, ids) in (("train", TRAIN), ("val", VAL)):
        (folder / "open" / f"{split}2017").mkdir(parents=True)
        with zipfile.ZipFile(folder / f"{split}2017.zip", "w") as archive:
            archive.writestr(f"{split}2017/", b"")
            for i in reversed(range(first, first + count)):
                name, data, _ = image_file(i)
                method = zipfile.ZIP_DEFLATED if i % 3 == 1 else zipfile.ZIP_STORED
                archive.writestr(f"{split}2017/{name}", data, method)
                (folder / "open" / f"{split}2017" / name).write_bytes(data)
            archive.writestr("__MACOSX/._x.jpg", b"x")
        text = json.dumps(annotations(first, count, ids), ensure_ascii=False)
        (folder / "open" / f"instances_{split}2017.json").write_text(text, encoding="utf-8")
    with zipfile.ZipFile(folder / "annotations.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for split in ("train", "val"):
            name = f"instances_{split}2017.json"
            archive.write(folder / "open" / name, f"annotations/{name}")
            archive.writestr(f"annotations/captions_{split}2017.json", b"{}")
    return [
        f"--train_images={folder}/train2017.zip",
        f"--val-images={folder}/val2017.zip",  # as the downloads' own pages write flags
        f"--annotations={folder}/annotations.zip",
    ]


COCO = ["--train_images=a.zip", "--annotations=b.zip", "--out=o"]
OWN = ["--train_images=a", "--train_annotations=t.json", "--val_annotations=v.json", "--out=o"]


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (COCO, "the following arguments are required: --val_images"),
        ([*OWN, "--annotations=b.zip"], "give --annotations="),
        ([flag for flag in COCO if "annotations" not in flag], "give --annotations="),
        ([flag for flag in OWN if "train_a" not in flag], "--val_annotations needs --train_annot"),
        ([*OWN, "--labels=yolo"], "give --annotations="),
        ([*OWN, "--group=a"], "are for images without validation annotations"),
        ([*OWN[:2], "--val_images=v", "--out=o"], "--val_images needs --val_annotations"),
        ([*OWN, "--out=a/b"], "--out must not be in --train_images: a/b"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_flags_that_do_not_fit(flags, fault, capsys):
    assert prepare.parse("coco", OWN).val_images == "a"
    with pytest.raises(SystemExit):
        prepare.parse("coco", flags)
    assert fault in capsys.readouterr().err


@pytest.mark.parametrize(
    ("masks", "images", "batch", "steps"),
    [(False, 20_000, 256, 4_688), (False, 60_000, 256, 14_063), (True, 60_000, 16, 225_000)],
)
def test_the_schedule_fits_the_number_of_images(masks, images, batch, steps, monkeypatch):
    """60 epochs with the recipe's base rate per image; Google's drops at 2/3 and 5/6 of the run."""
    recipe, flags = small_data(images, masks)
    assert recipe == ("mask_rcnn" if masks else "ssd")
    config = typed(arguments.train_command(recipe, "x", *flags), monkeypatch)[1]
    plan = plan_of(config.lock(), images)
    assert (config.train_batch_size, plan.total_steps) == (batch, steps)
    peak = 0.02 if masks else 2.5e-3 * batch / 32
    parts = np.array([0.05, 0.66, 0.67, 0.83, 0.84]) * steps
    rates = plan.learning_rate(parts.astype(int))
    np.testing.assert_allclose(rates, peak * np.array([1, 1, 0.1, 0.1, 0.01]), rtol=2e-3)
    assert config.steps_per_eval == config.steps_per_checkpoint == str(steps // 10)
    assert not config.stop_at_target
    if not masks:
        assert (config.eval_batch_size, config.bn_span) == (batch, 0)


def test_categories_without_objects_and_many_cut_boxes_are_said(capsys):
    none, some = ({"dropped": 0, "cut": cut, "per_image": [0, 10, 5]} for cut in (0, 3))
    rows = {"images": 5, "with_boxes": 5}
    splits = {"train": {**rows, "boxes": none}, "val": {**rows, "boxes": some}}
    classes = [{"id": i, "name": f"c{i}", "train": int(i > 6), "val": 1} for i in range(1, 9)]
    _warn({"splits": splits, "classes": classes})
    categories, cut = capsys.readouterr().out.splitlines()
    assert categories.endswith(
        "6 categories have no object in train: 1 c1, 2 c2, 3 c3, 4 c4 and 2 more"
    )
    assert cut.startswith("warning: val: 3 boxes were cut") and "15% of all" in cut


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    """(folder, arguments, output) of a small COCO with masks: 3 and 2 shards."""
    folder = tmp_path_factory.mktemp("coco")
    flags = [*write_coco(folder), "--masks", *SHARDS]
    prepare.make("coco", [*flags, f"--out={folder}/records", "--workers=3"])
    return folder, flags, folder / "records"


def rows(folder, split):
    """{key: list of values} of the records by image id, in their order."""
    by_id = {}
    for path in sorted(folder.glob(f"{split}-*")):
        for record in frames(path):
            feature = tensorflow().train.Example.FromString(record).features.feature
            kinds = {key: value.WhichOneof("kind") for key, value in feature.items()}
            row = {key: list(getattr(feature[key], kind).value) for key, kind in kinds.items()}
            assert by_id.setdefault(int(row["image/source_id"][0]), row) is row
    return by_id


def check_row(row, i, image_id):
    """A record holds image i and its objects, by the schema of create_coco_tf_record."""
    name, data, (height, width) = image_file(i)
    [jpeg] = row["image/encoded"]
    with Image.open(io.BytesIO(jpeg)) as image:
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (width, height))
    if i not in (1, 2, 3, 4):
        assert jpeg == data
    elif i != 4:
        assert near(pixels(jpeg), pixels(data), 12)
    names = {row["id"]: row["name"].encode() for row in CATEGORIES}
    boxes = boxes_of(i)
    expected = {
        "image/filename": [name.encode()],
        "image/format": [b"jpeg"],
        "image/height": [height],
        "image/width": [width],
        "image/source_id": [str(image_id).encode()],
        "image/key/sha256": [hashlib.sha256(jpeg).hexdigest().encode()],
        "image/object/class/label": [category for category, *_ in boxes],
        "image/object/class/text": [names[category] for category, *_ in boxes],
        "image/object/is_crowd": [crowd for *_, crowd in boxes],
        "image/object/area": [w * h / 2 for _, (_, _, w, h), _ in boxes],
    }
    assert {key: row[key] for key in expected} == expected
    assert row.keys() - expected.keys() == {"image/encoded", "image/object/mask", *FLOAT_KEYS}
    corners = np.array([[y, x, y + h, x + w] for _, (x, y, w, h), _ in boxes]).reshape(-1, 4)
    corners /= [height, width, height, width]
    np.testing.assert_allclose(np.transpose([row[key] for key in FLOAT_KEYS]), corners, rtol=1e-6)


def test_archives_become_googles_schema(coco):
    *_, out = coco
    assert sorted(contents(out)) == sorted([*RECORDS, "instances_val2017.json", "manifest.json"])
    train, val = rows(out, "train"), rows(out, "val")
    expected = {train_id(i): i for i in range(TRAIN[1]) if boxes_of(i)}
    assert set(train) == set(expected) and len(train) == 12
    assert list(train) != sorted(train) and list(train) != sorted(train)[::-1]  # shuffled
    for image_id, i in expected.items():
        check_row(train[image_id], i, image_id)
    assert list(val) == list(range(6))  # with the empty one
    for image_id, row in val.items():
        check_row(row, image_id + 20, image_id)
    assert [] in [row["image/object/class/label"] for row in val.values()]
    scored = (out / "instances_val2017.json").read_bytes()
    assert scored == (coco[0] / "open" / "instances_val2017.json").read_bytes()


def test_each_object_has_a_mask_of_its_image(coco):
    crowds = 0
    for image_id, row in rows(coco[-1], "train").items():
        i = (2**31 - 1 - image_id) // 5
        objects_ = zip(row["image/object/mask"], boxes_of(i), strict=True)
        for png, (_, (x, y, w, h), crowd) in objects_:
            with Image.open(io.BytesIO(png)) as image:
                assert image.format == "PNG"
                mask = np.asarray(image)
            assert mask.dtype == np.uint8 and set(np.unique(mask)) == {0, 1}
            assert [mask.shape[0]] == row["image/height"] and [mask.shape[1]] == row["image/width"]
            ys, xs = np.nonzero(mask)
            edges = np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])
            assert np.abs(edges - [x, y, x + w, y + h]).max() <= 1
            assert mask.sum() == np.prod(edges[2:] - edges[:2])  # filled
            crowds += crowd
    assert crowds


def test_the_manifest_says_what_is_there(coco):
    out = coco[-1]
    content = json.loads((out / "manifest.json").read_text())
    assert (content["format"], content["kind"], content["num_label_classes"]) == (1, "detection", 3)
    counts = [
        collections.Counter(row[0] for i in range(first, first + count) for row in boxes_of(i))
        for first, count, _ in (TRAIN, VAL)
    ]
    assert content["classes"] == [
        {"label": k, "id": number, "name": name, "train": counts[0][number]}
        | {"val": counts[1][number]}
        for k, (number, name) in enumerate([(3, "cat"), (7, "Ähre"), (12, "owl")], 1)
    ]
    train, val = content["splits"]["train"], content["splits"]["val"]
    assert (train["images"], train["with_boxes"], train["examples"]) == (16, 12, 12)
    assert (val["images"], val["with_boxes"], val["examples"]) == (6, 5, 6)
    shards = [*train["shards"], *val["shards"]]
    assert [shard["name"] for shard in shards] == RECORDS
    for shard in shards:
        data = (out / shard["name"]).read_bytes()
        assert (shard["bytes"], shard["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert {row["file"]: row["reason"] for row in content["re_encoded"]} == {
        "train/0001.jpg": "grey",
        "train/0002.jpg": "CMYK colours",
        "train/0004.jpg": "EXIF rotation",
    }  # the PNG has no boxes
    assert content["left_out"] == [] and content["annotations"] == "instances_val2017.json"
    loaded = data_manifest.load(str(out))
    paths = [str(out / name) for name in RECORDS]
    assert loaded and loaded.counts(str(out), paths) == (4, 4, 4, 3, 3)
    assert loaded.class_names == ("cat", "Ähre", "owl")


def test_folders_and_one_worker_give_the_same_bytes(coco, tmp_path):
    folder, flags, out = coco
    unpacked = [
        f"--train-images={folder}/open/train2017/",
        f"--val_images={folder}/open",  # also holds the training images
        f"--annotations={folder}/open",
    ]
    prepare.make("coco", [*unpacked, *flags[3:], f"--out={tmp_path}/out", "--workers=1"])
    assert contents(tmp_path / "out") == contents(out)


def test_from_gs_to_gs_the_bytes_are_those_of_a_local_run(gcs, tmp_path, capsys):
    """An image of a zip is one ranged read."""
    settings = ["--masks", *SHARDS]
    prepare.make("coco", [*write_coco(tmp_path), *settings, f"--out={tmp_path}/records"])
    expected, raw, out = contents(tmp_path / "records"), gcs.bucket("read"), gcs.bucket("objects")
    assert set(expected) == {*RECORDS, "instances_val2017.json", "manifest.json"}
    for path in tmp_path.rglob("*"):
        if path.is_file() and "records" not in path.parts:
            gcs.write(f"{raw}/{path.relative_to(tmp_path)}", path.read_bytes())
    inputs = [f"--{split}_images={raw}/{split}2017.zip" for split in ("train", "val")]
    command = [*inputs, f"--annotations={raw}/annotations.zip", *settings, f"--out={out}/a"]
    prepare.make("coco", [*command, "--workers=16"])
    assert_same(gcs, f"{out}/a", expected)
    paths = [request for request, _, _ in gcs.log() if "train2017.zip" in request]
    reads = [path for path in paths if "/storage/v1/" not in path]
    assert 12 <= len(reads) <= 12 + 10  # of 12 images, the directory, and both ends of the archive
    before = len(gcs.log())
    prepare.make("coco", command)
    assert "continuing: 5 of 5 shards" in capsys.readouterr().out
    again = [request for request, _, _ in gcs.log()[before:]]
    kept = r"GET |POST .*ifGenerationMatch|DELETE .*/prepare\.lock"  # the second is the lock, too
    assert again and not [line for line in again if not re.match(kept, line)]
    folders = [f"--{split}_images={raw}/open/{split}2017" for split in ("train", "val")]
    folders += [f"--annotations={raw}/open", *settings, f"--out={out}/b"]
    prepare.make("coco", folders)
    assert_same(gcs, f"{out}/b", expected)
