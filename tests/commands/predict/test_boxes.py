"""predict.py with detectors: photos in, boxes and outlines in pixels of the photo out."""

import csv
import dataclasses
import importlib
import io
import json
import types
from typing import Any

import jax
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import benchmarks
from benchmarks.base import BATCH_AXES
from benchmarks.detection import coco
from benchmarks.uses import Boxes
from commands.predict import boxes
from commands.predict.boxes import Object, image_ids
from commands.predict.sources import Picture
from common.errors import DataError
from common.images.photos import Jpeg, to_jpeg
from engine import sharding, step
from engine.checkpoint import model_source
from scripts.demo import make_answer
from tests.benchmarks.detection import scenes_fixture
from tests.commands.predict.test_predict import refusal
from tests.helpers.uses import stub

SMALL: dict[str, dict[str, Any]] = {
    "ssd": {"image_size": 64, "max_detections": 20},
    "mask_rcnn": {"image_short": 48, "image_long": 64, "image_shape": (48, 64), "min_score": 0.0}
    | {"mask_size": 16, "max_boxes": 3, "max_detections": 12, "num_filters": 4},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Records and photos/ID.jpg of 23 images of two orientations, with outlined objects."""
    folder = tmp_path_factory.mktemp("outlined")
    scenes_fixture.make(folder, outlined=True)
    (folder / "photos").mkdir()
    records = sorted(map(str, folder.glob("val-*")))
    for record in tf.data.TFRecordDataset(records, buffer_size=9999):
        features = tf.train.Example.FromString(record.numpy()).features.feature
        name = features["image/source_id"].bytes_list.value[0].decode()
        encoded = features["image/encoded"].bytes_list.value[0]
        (folder / "photos" / f"{name}.jpg").write_bytes(encoded)
    return folder


@pytest.fixture(params=["ssd", "mask_rcnn"])
def model(request, data, opens):
    """(the model that predict.py opens, its benchmark with the records) of a detector."""
    config = importlib.import_module(f"configs.{request.param}_digits").get_config()
    config.update({**SMALL[request.param], "num_classes": 0, "data_dir": str(data)})
    config.compilation_cache = ""
    with_data: Any = benchmarks.load(config.copy_and_resolve_references().lock(), "")
    return opens(with_data, config.to_dict(), 0.05, data_dir="/not/here"), with_data


@pytest.mark.long
@pytest.mark.parametrize("tile", [0, 40])
def test_the_detections_are_those_of_evaluation(call, data, model, tmp_path, tile):
    opened, benchmark = model
    if tile:
        config = opened.config.copy_and_resolve_references()
        config.update({"data_dir": str(data), "eval_tiles": tile})
        benchmark: Any = benchmarks.load(config.lock(), "")
        benchmark.open("eval")
    mesh = sharding.make(BATCH_AXES, 1)
    score = step.make_predict_step(benchmark.predict, mesh)
    rows = []
    for batch in benchmark.eval_batches(8, 0, 1):
        batch = {k: v for k, v in batch.items() if k != "host_seconds"}
        rows.append(jax.tree.map(np.asarray, score(opened.params, opened.model_state, batch)))
    rows = [{k: v[row["mask"] > 0] for k, v in row.items()} for row in rows]
    columns = benchmark.scorer.columns(iter(rows))
    out = tmp_path / "boxes.coco.json"
    flags = [f"--tiles={tile}", "--max_detections=9999"] if tile else []
    code, _, err = call(data / "photos", f"--out={out}", "--batch_size=3", *flags)
    assert ("23 pictures in 92 tiles" in err) == bool(tile)
    assert code == 0 and "NOTE image_id of 23 pictures, which no annotations of the run list" in err
    written = json.loads(out.read_text())
    assert len(written) == len(columns["score"]) > 23
    expected = sorted(zip(columns["image_id"], -columns["score"], strict=True))
    found = sorted((row["image_id"], -row["score"]) for row in written)
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-5)
    by_place = {(r["image_id"], r["category_id"], *np.round(r["bbox"], 1)) for r in written}
    wanted = zip(columns["image_id"], columns["category_id"], columns["bbox"], strict=True)
    shared = sum((int(i), int(c), *np.round(box, 1)) in by_place for i, c, box in wanted)
    assert shared > 0.95 * len(written)  # a coordinate may lie at the edge of rounding
    assert ("segmentation" in written[0]) == (opened.config.benchmark == "mask_rcnn")


def test_boxes_and_masks_are_in_pixels_of_the_photo(call, data, model, tmp_path):
    """A photo that lies on its side, twice as large: EXIF turns it, and boxes have its size."""
    small = Image.open(data / "photos" / "11.jpg")
    large = small.resize((2 * small.width, 2 * small.height), Image.Resampling.NEAREST)
    exif = Image.Exif()
    exif[0x0112] = 6  # the stored pixels have to be turned a quarter clockwise
    photo = tmp_path / "in" / "photo.jpg"
    photo.parent.mkdir()
    turned = large.transpose(Image.Transpose.ROTATE_90)
    turned.save(photo, "JPEG", quality=100, subsampling=0, exif=exif)
    flags = ["--min-score=0", "--format=json", "--max_detections=4"]
    _, out, _ = call(photo, data / "photos" / "11.jpg", *flags, f"--draw={tmp_path}/drawn")
    (big, normal), (height, width) = json.loads(out), (2 * small.height, 2 * small.width)
    assert (big["height"], big["width"]) == (height, width)
    assert (normal["height"], normal["width"]) == (small.height, small.width)
    assert 0 < len(big["objects"]) <= 4
    for each in big["objects"]:
        x, y, w, h = each["bbox"]
        assert x >= -1 and x + w <= width + 1 and y >= -1 and y + h <= height + 1
    assert max(x + w for x, _, w, _ in (o["bbox"] for o in big["objects"])) > small.width
    drawn = Image.open(tmp_path / "drawn" / "photo.jpg")
    times = drawn.width // width  # so that the names do not hide the objects
    assert max(drawn.size) >= 640 > (times - 1) * max(width, height)
    assert drawn.size == (times * width, times * height)
    middles = np.asarray(drawn).astype(int)[times // 2 :: times, times // 2 :: times]
    apart = np.abs(middles - np.asarray(large)).max(axis=2)
    assert apart.max() > 60 and np.median(apart) < 20
    best = big["objects"][0].get("segmentation")
    assert best is None or (coco.outline_mask(best, height, width) > 0).any()


def test_tiles_of_several_photos_share_batches(call, data, model, tmp_path):
    """The results are the same for all batch sizes, beside photos that cannot be used."""
    draw, photos = np.random.default_rng(4), tmp_path / "photos"
    photos.mkdir()
    for name, size in (("a", (130, 90)), ("c", (70, 130)), ("d", (32, 30)), ("e", (65, 64))):
        noise = Image.fromarray(draw.integers(0, 256, (9, 9, 3), np.uint8))
        noise.resize(size).save(photos / f"{name}.jpg", quality=95)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(photos / "a.jpg").save(photos / "f.jpg", quality=95, exif=exif)
    turned = to_jpeg((photos / "f.jpg").read_bytes(), rotate=True, quality=95)
    (photos / "g.jpg").write_bytes(turned.encoded)
    (photos / "b.jpg").write_bytes(b"")
    flags = ["--format=json", "--min-score=0.02", "--tiles=64"]
    results = []
    for size in (1, 3, 8):
        code, out, err = call(photos, *flags, f"--batch_size={size}")
        assert code == 1 and "tiles of 64 pixels: 5 pictures in 26 tiles" in err
        results.append(json.loads(out))
    first = results[0]
    assert results[1] == first == results[2]
    assert [bool(row.get("error")) for row in first] == [i == 1 for i in range(7)]
    assert first[5]["objects"] == first[6]["objects"] and first[5]["height"] == 130
    _, out, _ = call(photos / "d.jpg", *flags[:2])  # smaller than a tile
    assert json.loads(out)[0]["objects"] == first[3]["objects"]
    _, out, err = call(photos / "d.jpg", photos / "e.jpg", *flags[:2], "--tiles=65")
    assert "no picture is larger" in err


def test_what_cannot_be_used_has_a_row(call, data, model, tmp_path):
    (tmp_path / "empty.jpg").write_bytes(b"")
    annotations = data / "instances_val2017.json"
    good = data / "photos" / "21.jpg"
    code, out, err = call(tmp_path / "empty.jpg", annotations, good, f"--draw={tmp_path}/d")
    lines = list(csv.DictReader(io.StringIO(out)))
    assert code == 1 and "2 of 3 files have no prediction" in err
    assert [bool(line["error"]) for line in lines[:2]] == [True, True]
    assert "not a JPEG" in lines[1]["error"] and lines[2]["path"] == str(good)
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["21.jpg"]


def test_flags_of_other_models_are_refused(capsys, data, model, tmp_path):
    photo, workdir = data / "photos" / "21.jpg", "--workdir=any"
    for flag, text in (
        ("--top_k=3", "--top_k=3: "),
        ("--heatmap=maps", "--heatmap=maps: "),
        ("--min_score=2", "from 0 to 1"),
        (f"--draw={photo.parent}", "would be overwritten"),
        ("--tiles=0", "argument --tiles: "),
        ("--tiles=31", "argument --tiles: "),
        ("--tiles=-5", "argument --tiles: "),
        ("--tiles=large", "argument --tiles: "),
        ("--out=x.txt", ".csv, .json, .jsonl, .coco.json"),
    ):
        assert text in refusal(capsys, photo, workdir, flag)


@pytest.mark.parametrize(
    ("paths", "ids"),
    [
        (["p/frame_0.jpg", "p/frame_1.jpg"], [11, 12]),
        (["gs://b/cam/a.jpg", "/x/other/a.jpg"], [21, 22]),
        (["frame_1.jpg", "photo_7.jpg"], [12, 7]),  # the other one has a number of its own
        (["frame_0.jpg", "photo_11.jpg", "y.jpg"], [11, 12, 13]),
        (["a.jpg"], [1]),  # two of the list end so
        (["a/COCO_val2014_000000000042.jpg", "7.png"], [42, 7]),
        (["x.jpg", "2.jpg"], [1, 2]),
        (["p/frame_0.jpg", "q/frame_0.jpg"], [1, 2]),  # one image is not two pictures
        (["/photos/deep/b.jpg"], [31]),
    ],
)
def test_ids_of_images_are_those_of_the_runs_own_annotations(paths, ids, tmp_path, capsys):
    names = {11: "frame_0.jpg", 12: "frame_1.jpg", 21: "cam/a.jpg", 22: "other/a.jpg"}
    names |= {31: "C:\\deep\\b.jpg".removeprefix("C:\\")}
    images = [{"id": i, "file_name": n, "height": 9, "width": i} for i, n in names.items()]
    content = {"images": images, "categories": [{"id": 1, "name": "x"}], "annotations": []}
    (tmp_path / "instances_val2017.json").write_text(json.dumps(content))
    config = importlib.import_module("configs.ssd_digits").get_config()
    config.update({"num_classes": 0, "data_dir": str(tmp_path)})
    uses: Any = benchmarks.load(config.copy_and_resolve_references().lock(), "").uses
    source, listed = uses.listed(paths)
    assert source == f"{tmp_path}/instances_val2017.json"
    assert all(row == (row[0], 9, row[0]) for row in listed.values())
    assert image_ids(paths, source, listed) == ids
    notes = capsys.readouterr().err
    assert (f"{source} for {len(listed)} pict" in notes) == bool(listed)
    assert ("other pictures" in notes) == (0 < len(listed) < len(paths))
    assert paths[0] != "x.jpg" or "1, 2, ..., as not all" in notes


def test_weak_boxes_of_cocos_results_are_not_drawn(tmp_path, monkeypatch):
    file = io.BytesIO()
    Image.new("RGB", (64, 48), (90, 90, 90)).save(file, "JPEG")
    picture = Picture("in/a.jpg", Jpeg(file.getvalue(), 48, 64, ""))
    good, weak = (Object("x", 3, s, (5, 5, 30, 90 * s)) for s in (0.31, 0.29))
    options = boxes.Options(draw=str(tmp_path))
    assert options.least("coco") == 0  # as COCO's score wants them

    opened: Any = types.SimpleNamespace(manifest={"categories": []}, check_finite=lambda: None)
    opened.benchmark = types.SimpleNamespace(uses=stub(Boxes))

    def drawn(objects, **changes):
        detector = boxes.Detector(opened, dataclasses.replace(options, **changes), "coco")
        monkeypatch.setattr(detector, "objects", lambda *_: objects)
        assert len(detector.row(picture, {}).content["objects"]) == len(objects)
        return (tmp_path / "a.jpg").read_bytes()

    assert drawn((good, weak)) == drawn((good,)) != drawn(())
    assert drawn((good, weak), min_score=0.0) != drawn((good,))
    assert Image.open(io.BytesIO(drawn((good,)))).size == (640, 480)


def test_the_page_answers_as_predict_py(call, model, data, tmp_path):
    assert model  # which model_source.load opens
    answer, photo = make_answer(model_source.load("any")), next((data / "photos").glob("*.jpg"))
    image, objects = answer(str(photo))
    _, out, _ = call(photo, "--format=json")
    expected = json.loads(out)[0]["objects"]
    times = max(image.size) / max(Image.open(photo).size)
    assert max(image.size) == 960 and len(objects) == len(expected)
    for (place, text), each in zip(objects, expected, strict=True):
        assert text == f"{each['label']} {each['score']:.0%}"
        if "segmentation" in each:  # a mask
            assert place.shape == image.size[::-1] and set(np.unique(place)) <= {0, 0.5}
        else:
            x, y, width, height = each["bbox"]
            box = np.clip(np.array([x, y, x + width, y + height]) * times, 0, None)
            np.testing.assert_allclose(place, box, atol=0.51)
    text = tmp_path / "no_picture.jpg"
    text.write_bytes(b"no picture")
    with pytest.raises(DataError, match="not a JPEG"):
        answer(str(text))
