"""predict.py as a user sees it: pictures in, classes out."""

import csv
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import types
from typing import Any

import jax
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from safetensors.numpy import save_file

import commands.predict
import predict
from benchmarks.uses import Classes
from commands.predict import classes, model, outputs, sources
from commands.predict.sources import Picture
from common.errors import ConfigError
from common.foreign import resnets as foreign
from common.images import photos
from common.images.input_spec import NAMED, prepare_image
from engine import evaluate, sharding
from engine.checkpoint import model_source
from engine.plan import read_settings
from tests.conftest import make_tiny_config
from tests.engine.checkpoint.test_model_source import (
    change_manifest,  # noqa: F401 (a fixture)
    workdir,  # noqa: F401 (a fixture)
)
from tests.helpers.uses import stub

CLASSES = ["n0", "n1", "n2", "n3"]


@pytest.fixture
def pictures(tiny_records, tmp_path):
    """The 23 evaluation images as files: pictures/CLASS/NUMBER.jpg."""
    paths = sorted(pathlib.Path(tiny_records).glob("validation-*"))
    for i, record in enumerate(tf.data.TFRecordDataset(list(map(str, paths)), buffer_size=9999)):
        features = tf.train.Example.FromString(record.numpy()).features.feature
        label = features["image/class/label"].int64_list.value[0]
        path = tmp_path / "pictures" / f"n{label - 1}" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(features["image/encoded"].bytes_list.value[0])
    return tmp_path / "pictures"


@pytest.fixture
def call(workdir, capsysbinary):  # noqa: F811
    """Calls predict.py; returns (exit code, rows of the CSV, stderr)."""

    def call(*argv):
        code = predict.main([*map(str, argv), f"--workdir={workdir}"])
        out, err = capsysbinary.readouterr()
        return code, list(csv.DictReader(io.StringIO(out.decode()))), err.decode()

    return call


def make_classifier(names, **flags):
    """A classifier without weights."""
    opened: Any = types.SimpleNamespace(manifest={"class_names": names})
    uses = stub(Classes, num_classes=len(names), input_spec=NAMED["tensorflow"])
    opened.benchmark = types.SimpleNamespace(uses=uses)
    return classes.Classifier(opened, classes.Options(**flags))


def make_row(classifier, path, *logits):
    """The row of a picture with these logits."""
    result = {"logits": np.array(logits, np.float32)}
    return classifier.row(Picture(path), result)


def refusal(capsys, *argv):
    with pytest.raises(SystemExit) as caught:
        predict.main([*map(str, argv)])
    text = caught.value.code if isinstance(caught.value.code, str) else capsys.readouterr().err
    assert text.count("\n") <= 1 and caught.value.code not in (0, None)
    return text


@pytest.mark.long
def test_the_accuracy_is_that_of_evaluation(call, pictures, workdir, tiny_records, monkeypatch):  # noqa: F811
    config = make_tiny_config(tiny_records, moving_average_decay=0.9)
    scores = evaluate.evaluate(read_settings(config, workdir), "4", 0.0)
    times = iter((100.0, 105.5, 115.5))  # the start, compiled, the end
    monkeypatch.setattr(sources, "time", types.SimpleNamespace(monotonic=lambda: next(times)))
    code, table, err = call(pictures, "--batch_size=64")
    assert "loaded and compiled in 5.5 s" in err and "23 files in 10.0 s: 2 images/s\n" in err
    assert code == 0 and len(table) == 23
    right = [row["label_1"] == row["folder_label"] for row in table]
    assert np.mean(right) == pytest.approx(scores["top_1_accuracy"])
    assert f"top 1 accuracy {np.mean(right):.2%}: {sum(right)} of 23 files" in err


def test_examples_share_full_batches_by_their_shape_and_stay_in_order(workdir):  # noqa: F811
    opened = model_source.load(workdir)
    shapes = []

    def predict(params, state, batch):
        shapes.append(batch["x"].shape)
        return {"sum": batch["x"].sum(1), "mask": batch["mask"]}

    predictor = model.Predictor(predict, opened, 1, 1)  # a batch of 8, one for each device
    examples = [{"x": np.full(2 + (i % 5 == 3), i, np.float32)} for i in range(20)]
    rows = predictor(examples)
    assert [float(row["sum"]) for row in rows] == [float(each["x"].sum()) for each in examples]
    assert all(row["mask"] == 1 for row in rows) and {*shapes} == {(1, 2), (1, 3)}
    assert predictor([]) == []


@pytest.mark.long
def test_bits_depend_neither_on_the_batch_nor_on_the_devices(call, pictures, tmp_path, monkeypatch):
    tables, arrays, make = [], [], sharding.make
    for devices, batch in ((8, 1), (8, 200), (1, 7)):
        monkeypatch.setattr(
            sharding, "make", lambda axes, span, n=devices: make(axes, span, jax.devices()[:n])
        )
        out = tmp_path / "features.npy"
        _, table, _ = call(pictures, "--logits", f"--batch_size={batch}", f"--embeddings={out}")
        tables.append(table)
        arrays.append(np.load(out))
    assert all(table == tables[0] for table in tables)
    assert all(array.tobytes() == arrays[0].tobytes() for array in arrays)
    assert arrays[0].shape == (23, 32) and arrays[0].dtype == np.float32
    assert len(np.unique(arrays[0], axis=0)) > 10


def test_cpus_compute_in_float32_whatever_the_run_trained_in(call, pictures, workdir, monkeypatch):  # noqa: F811
    assert commands.predict.prepare(model_source.load(workdir), True).config.precision == "float32"
    _, exact, _ = call(pictures, "--logits")
    load = model_source.load
    for precision in ("float32", "bfloat16"):
        changes = {"precision": precision}
        changed = lambda *a, c=changes, **k: load(*a, **k).changed(**c)  # noqa: E731
        monkeypatch.setattr(model_source, "load", changed)
        assert call(pictures, "--logits")[1] == exact
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert commands.predict.prepare(model_source.load(workdir), True).config.precision == "bfloat16"


def test_probabilities_are_the_softmax_of_the_logits(call, pictures):
    _, logits, _ = call(pictures, "--logits", "--top-k=99")
    _, shares, _ = call(pictures, "--top_k=2")
    assert "prob_3" not in shares[0] and "logit_5" not in logits[0]
    for row, share in zip(logits, shares, strict=True):
        values = np.array([float(row[f"logit_{k}"]) for k in (1, 2, 3, 4)])
        expected = np.exp(values) / np.sum(np.exp(values))
        assert list(values) == sorted(values, reverse=True)
        assert float(share["prob_2"]) == pytest.approx(expected[1], rel=1e-5)
        indices = [int(row[f"index_{k}"]) for k in (1, 2, 3, 4)]
        assert sorted(indices) == [0, 1, 2, 3]
        assert [CLASSES[i] for i in indices] == [row[f"label_{k}"] for k in (1, 2, 3, 4)]


def test_every_broken_file_is_a_row(call, pictures, tmp_path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    good = (pictures / "n0" / "0.jpg").read_bytes()
    (folder / "1.jpg").write_bytes(good)
    (folder / "2.jpg").write_bytes(b"")
    (folder / "3.jpg").write_bytes(b"hello, world, this is no picture")
    (folder / "4.jpg").write_bytes(good[: len(good) * 2 // 3])
    (folder / "5.heic").write_bytes(b"\0\0\0\x20ftypheic" + b"\0" * 50)
    (folder / "6.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 50)
    (folder / "7.jpg").symlink_to("/not/there")
    (folder / "8.jpg").write_bytes(good)
    out = tmp_path / "features.npy"
    code, table, err = call(folder, f"--embeddings={out}")
    assert code == 1 and "6 of 8 files have no prediction" in err
    errors = [row["error"] for row in table]
    assert [bool(error) for error in errors] == [False, *[True] * 6, False]
    assert errors[1:3] == ["the file is empty", photos.unknown(b"")]
    assert "HEIC" in errors[4]
    assert errors[6] == "unreadable: No such file or directory"
    assert table[0]["prob_1"] == table[7]["prob_1"] and table[1]["prob_1"] == ""
    features = np.load(out)
    assert np.isnan(features[1:7]).all() and np.isfinite(features[[0, 7]]).all()
    for name in "18":
        (folder / f"{name}.jpg").unlink()
    code, table, _ = call(folder, f"--embeddings={out}")
    assert code == 1 and len(table) == 6 and np.load(out).shape == (6, 0)


def test_formats_say_the_same(call, pictures, tmp_path):
    (pictures / "a.jpg").write_bytes(b"")
    _, table, _ = call(pictures)
    contents = {}
    for form in ("csv", "json", "jsonl"):
        path = tmp_path / f"out.{form}"
        assert call(pictures, f"--out={path}")[:2] == (1, [])
        contents[form] = path.read_text()
    assert list(csv.DictReader(io.StringIO(contents["csv"]))) == table
    objects = json.loads(contents["json"])
    assert objects == [json.loads(line) for line in contents["jsonl"].splitlines()]
    assert objects[0] == {"path": f"{pictures}/a.jpg", "error": "the file is empty"}
    for row, item in zip(table[1:], objects[1:], strict=True):
        assert item["path"] == row["path"] and item["folder_label"] == row["folder_label"]
        for k, best in enumerate(item["predictions"], 1):
            printed = row[f"label_{k}"], int(row[f"index_{k}"]), float(row[f"prob_{k}"])
            assert printed == (best["label"], best["index"], best["probability"])
    assert json.loads("".join(outputs.json_array([]))) == []


def test_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (
        *("b/photo_10.JPG", "b/photo_9.jpg", "b/inner/x.png", "b/notes.txt", "b/.hidden.jpg"),
        *("b/.cache/x.jpg", "[1].jpg", "1.jpg", "c.tif", "d[1]/x.jpg", "d1/y.jpg"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    inside = ["b/inner/x.png", "b/photo_9.jpg", "b/photo_10.JPG"]
    for names, expected in (
        (["b"], inside),
        (["b/", "c.tif"], [*inside, "c.tif"]),
        (["[1].jpg"], ["[1].jpg"]),  # a name, not the pattern for 1.jpg
        (["*.jpg"], ["1.jpg", "[1].jpg"]),
        (["d[1]/*.jpg"], ["d[1]/x.jpg"]),  # such a folder exists
        (["d[12]/*.jpg"], ["d1/y.jpg"]),
        (["b/**/*.png", "?"], ["b/inner/x.png", *inside]),
        (["-", "c.tif"], ["x y.jpg", "z", "c.tif"]),
        (["b/notes.txt"], ["b/notes.txt"]),
    ):
        assert sources.find_pictures(names, ["x y.jpg", "", "z"]) == expected


def test_names_of_files_may_be_anything(call, pictures, tmp_path, capsysbinary):
    folder = os.fsencode(tmp_path) + b"/odd"
    os.mkdir(folder)
    names = [b"bad\xff.jpg", b'new\nline,"quoted".jpg', "фото_照片.jpg".encode(), b"\x1b[31m.jpg"]
    for name in names:
        shutil.copy(os.fsencode(pictures / "n0" / "0.jpg"), folder + b"/" + name)
    code, table, _ = call(os.fsdecode(folder))
    assert code == 0
    printed = {os.path.basename(row["path"]) for row in table}
    assert printed == {"bad\\udcff.jpg", 'new\nline,"quoted".jpg', "фото_照片.jpg", "\x1b[31m.jpg"}
    written = [outputs.Row(Picture(os.fsdecode(name)).source, "x") for name in names]
    text = list(make_classifier(CLASSES).table(["a" * 30], written, 80))
    assert all(line.count("\n") == 1 and "\x1b" not in line for line in text)


def test_a_table_for_people():
    known = make_classifier(["cat", "a name of many letters, too long"])
    path = "folder/cat/" + "x" * 90 + ".jpg"
    row = make_row(known, path, 1, 2)
    assert classes.other_folder(row) == "cat"
    assert not classes.other_folder(make_row(known, "cat/a.jpg", 2, 1))
    accents = make_classifier(["e\u0301te\u0301", "cat"])
    assert classes.other_folder(make_row(accents, "\u00e9t\u00e9 /a.jpg", 1, 2))
    assert "has diverged" in make_row(known, "a.jpg", np.nan, 1).error
    _, line = known.table([path], [row], 130)
    assert line.startswith("…xx") and "a name of many lett…   73.1%" in line
    assert len(line) < 150 and line.endswith("(folder: cat)\n")


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "exif"])
def test_a_photo_has_the_pixels_of_its_record(tmp_path, kind):
    draw = np.random.default_rng(1)
    image = Image.fromarray(draw.integers(0, 256, (40, 60, 3), np.uint8))
    path = tmp_path / "photo"
    if kind == "exif":  # stored lying on its side
        exif = Image.Exif()
        exif[0x0112] = 6
        image.save(path, "JPEG", exif=exif)
    else:
        image.save(path, kind)
    spec = NAMED["tensorflow"].at(32)
    picture = sources.load_picture(
        str(path), lambda photo: [lambda: {"x": prepare_image(photo.encoded, spec)}]
    )
    record = photos.to_jpeg(path.read_bytes(), rotate=True, quality=95)
    assert (record.height, record.width) == ((60, 40) if kind == "exif" else (40, 60))
    assert picture.parts and picture.error == ""
    expected = prepare_image(record.encoded, spec)
    np.testing.assert_array_equal(picture.parts[0]()["x"], expected, strict=True)


def test_names_come_from_a_file_or_are_numbers(call, pictures, workdir, tmp_path):  # noqa: F811
    _, known, _ = call(pictures)
    (tmp_path / "names.txt").write_text("\ufeffred one\r\ngreen\nblue\n\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"has 3 lines, but .* has 4 classes"):
        call(pictures, f"--labels={tmp_path}/names.txt")
    (tmp_path / "names.txt").write_text("\ufeffred one\r\ngreen\nblue\nn3\n", encoding="utf-8")
    _, table, _ = call(pictures, f"--labels={tmp_path}/names.txt")
    names = dict(zip(CLASSES, ("red one", "green", "blue", "n3"), strict=True))
    assert [names[row["label_1"]] for row in known] == [row["label_1"] for row in table]
    swapped = f"--labels={tmp_path}/names.txt"
    (tmp_path / "names.txt").write_bytes("rouge\nvert\nbleu\nété\n".encode("cp1252"))
    with pytest.raises(SystemExit, match=r"names.txt, line 4 is not UTF-8 .* iconv"):
        call(pictures, swapped)
    (tmp_path / "names.txt").write_text("n0\nn2\nn1\nn3\n")
    with pytest.raises(SystemExit, match=r"in another order: line 2 is 'n2', class 2 of .* 'n1'"):
        call(pictures, swapped)
    assert call(pictures, swapped, "--accept_other_data")[0] == 0
    change_manifest(workdir, class_names=[])
    _, table, err = call(pictures)
    assert "NOTE the model has no class names" in err and "accuracy" not in err
    assert [row["label_1"] for row in table] == [row["index_1"] for row in table]


def test_everything_may_be_in_a_bucket(gcs, workdir, pictures, capsysbinary):  # noqa: F811
    bucket = gcs.bucket()
    for root in (pathlib.Path(workdir), pictures):
        for path in filter(pathlib.Path.is_file, root.rglob("*")):
            gcs.write(f"{bucket}/{root.name}/{path.relative_to(root)}", path.read_bytes())
    gcs.write(f"{bucket}/pictures/n0/notes.txt", b"no picture")
    gcs.write(f"{bucket}/pictures/n0/.hidden/x.jpg", b"")
    outputs = (f"--out={bucket}/r/x.jsonl", f"--embeddings={bucket}/r/x.npy")
    outputs += (f"--heatmap={bucket}/maps",)
    paths = (f"{bucket}/pictures/n0", f"{bucket}/pictures/n[1-3]/*.jpg", f"{bucket}/nothing.jpg")
    code = predict.main([*paths[:2], f"--workdir={bucket}/run", *outputs])
    assert code == 0
    capsysbinary.readouterr()
    written = filter(None, gcs.names(f"{bucket}/r"))  # and the folder itself
    assert sorted(written) == ["x.jsonl", "x.npy"]
    assert len([name for name in gcs.names(f"{bucket}/maps") if name.endswith(".jpg")]) == 23
    remote = [json.loads(line) for line in gcs.read(f"{bucket}/r/x.jsonl").splitlines()]
    assert predict.main([str(pictures), f"--workdir={workdir}", "--format=jsonl"]) == 0
    local = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    assert [row["predictions"] for row in remote] == [row["predictions"] for row in local]
    assert f"{bucket}/nothing.jpg: " in refusal(capsysbinary, paths[2], f"--workdir={workdir}")
    other = refusal(capsysbinary, paths[0], f"--workdir={workdir}", "--out=gs://not-here/x.csv")
    assert "cannot write to --out=gs://not-here" in other


def test_heat_maps_lie_on_the_photos(call, pictures, tmp_path):
    folder, drawn = tmp_path / "mixed", tmp_path / "maps" / "new"
    for name in "ab":
        (folder / name).mkdir(parents=True)
    image = Image.open(pictures / "n0" / "0.jpg").resize((90, 60))
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying on its side
    image.save(folder / "a" / "x.jpg", exif=exif)
    image.convert("P").save(folder / "b" / "x.png")
    image.convert("LA").save(folder / "b" / "grey.png")
    image.convert("L").resize((1, 1)).save(folder / "b" / "pixel.jpg")
    image.resize((900, 3)).save(os.fsencode(folder) + b"/b/bad\xff.jpg")
    (folder / "b" / "broken.jpg").write_bytes(b"")
    _, plain, _ = call(folder)
    code, table, _ = call(folder, f"--heatmap={drawn}")
    assert code == 1 and [row["error"] for row in table] == [row["error"] for row in plain]
    for row, other in zip(table, plain, strict=True):
        assert row["label_1"] == other["label_1"]
        assert float(row["prob_1"] or 0) == pytest.approx(float(other["prob_1"] or 0), abs=1e-5)
    images = {path.name: np.asarray(Image.open(path), int) for path in drawn.iterdir()}
    assert {name: image.shape[:2] for name, image in images.items()} == {
        "x.jpg": (8 * 90, 8 * 60),  # upright, enlarged by a whole number
        "x_2.jpg": (8 * 60, 8 * 90),
        "grey.jpg": (480, 720),
        "pixel.jpg": (640, 640),
        "bad\\udcff.jpg": (3, 900),
    }
    # The model sees 16 / 18 of the shorter side, in the middle of the longer one.
    for image in (images["x.jpg"], images["x_2.jpg"].swapaxes(0, 1)):
        frame = np.flatnonzero(image[:, 60:-60].mean((1, 2)) > 200)
        np.testing.assert_allclose([frame[0], frame[-1]], [360 - 213, 360 + 213], atol=9)
    assert call(folder, f"--heatmap={drawn}", "--logits", "--batch_size=64")[0] == 1


def test_a_classifier_may_have_no_heat_maps(tmp_path):
    uses = stub(Classes, classify=lambda *_: {"logits": np.zeros((2, 4))}, num_classes=4)
    uses.input_spec = NAMED["vgg"]
    opened: Any = types.SimpleNamespace(manifest={"class_names": CLASSES})
    opened.benchmark = types.SimpleNamespace(uses=uses)
    opened.config = types.SimpleNamespace(benchmark="shapes")
    classifier: Any = classes.Classifier(opened, classes.Options(heatmap=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"--heatmap=.*'shapes'"):
        classifier.predict({}, {}, {"image": np.zeros(())})


def test_mistakes_end_in_one_line(capsys, tmp_path, pictures, workdir):  # noqa: F811
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("")
    model = f"--workdir={workdir}"
    for argv, message in (
        ([pictures], "one of the arguments --workdir --model is required"),
        ([model], "name a picture"),
        ([pictures, model, "--config.input_spec=vgg"], "goes with --model, not --workdir"),
        (
            [pictures, f"--model={workdir}", "--config.resnet_version=1"],
            "--config.resnet_version: ",
        ),
        ([pictures, model, "--out=x.txt"], "--out=x.txt: "),
        ([pictures, model, "--embeddings=x.csv"], "x.csv: must end with .npy"),
        ([pictures, model, "--out=/proc/x/y.csv"], "cannot write to --out=/proc/x"),
        ([pictures, model, "--heatmap=/proc/x"], "cannot write to --heatmap=/proc/x"),
        ([pictures, model, f"--heatmap={pictures}/n0"], "--heatmap: "),
        ([tmp_path / "empty", model], "no such picture, or no picture in it"),
        (["s3://x/y.jpg", model], "SOURCE=s3://x/y.jpg: s3:// is not supported"),
        ([pictures, "--workdir=s3://x/run"], "--workdir=s3://x/run: s3:// is not supported"),
        ([pictures, "--model=s3://x/m.pth"], "--model=s3://x/m.pth: s3:// is not supported"),
        ([pictures, model, "--data_dir=x"], "--data_dir=x: "),
    ):
        assert message in refusal(capsys, *argv)


def test_the_weights_of_other_libraries(capsysbinary, pictures, workdir, tmp_path):  # noqa: F811
    model = model_source.load(workdir)
    arrays = foreign.names(model.params, model.model_state)
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(arrays, tmp_path / "model.safetensors")
    argv = [pictures, f"--model={tmp_path}/model.safetensors", "--config.input_spec=nope"]
    assert "config.input_spec='nope': use one of" in refusal(capsysbinary, *argv)
    code = predict.main([str(pictures), f"--model={tmp_path}/model.safetensors", "--logits"])
    out, err = capsysbinary.readouterr()
    assert b"NOTE" in err and b"'torchvision_v1' is assumed; --config.input_spec takes one" in err
    assert b"as the weights want it" not in err
    table = list(csv.DictReader(io.StringIO(out.decode())))
    assert code == 0 and len(table) == 23 and b"model.safetensors: 4 classes, 224 px" in err
    assert all(row["label_1"] == row["index_1"] for row in table) and b"no class names" in err
    argv = [pictures, f"--model={tmp_path}/model.safetensors", "--checkpoint=best"]
    assert "is a single model" in refusal(capsysbinary, *argv)


@pytest.mark.long
def test_the_command(pictures, workdir):  # noqa: F811
    """From a shell: paths on stdin, CSV in a pipe, the exit code."""
    names = [f"{pictures}/n0/0.jpg", "/not/there.jpg"]
    command = [sys.executable, predict.__file__, "-", f"--workdir={workdir}", "--top_k=1"]
    done = subprocess.run(command, input="\n".join([*names, ""]), capture_output=True, text=True)
    table = list(csv.DictReader(io.StringIO(done.stdout)))
    assert done.returncode == 1 and [row["path"] for row in table] == names, done.stderr
    assert table[1]["error"] == "unreadable: No such file or directory"
    assert "Traceback" not in done.stderr and "1 of 2 files have no prediction" in done.stderr
