"""--mode=export of detectors (photos to boxes), translators (ids to ids) and NCF (a score)."""

import dataclasses
import hashlib
import importlib
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from PIL import Image

import benchmarks
from benchmarks.ncf import use
from commands import export
from commands.export import formats, programs
from common.errors import CheckpointError, ConfigError
from common.images import pixels
from engine.checkpoint.model_source import Weights
from tests.commands.predict import test_items, test_sentences
from tests.commands.predict.test_boxes import (
    data,  # noqa: F401 (fixtures)
    model,  # noqa: F401 (fixtures)
)

translator, ncf = test_sentences.model, test_items.model  # fixtures


def photo(height, width):
    """A JPEG with edges, waves and noise."""
    return programs._draw(3, height, width, "JPEG")


@pytest.mark.long
def test_the_program_has_the_pixels_that_evaluation_reads(model):  # noqa: F811
    """Equal ones, also where rounding must break ties."""
    uses = model[1].uses
    for height, width in ((480, 640), (640, 480), (375, 500), (500, 333), (31, 87), (64, 64)):
        encoded = photo(height, width)
        expected = uses.inputs(encoded, height, width)
        upright = height > width
        resized = jax.jit(uses.resized, static_argnums=1)
        for name, values in resized(pixels.decode(encoded).numpy(), upright).items():
            assert values.dtype == expected[name].dtype
            np.testing.assert_array_equal(values, expected[name])


@pytest.mark.long
@pytest.mark.parametrize("antialias", [False, True])
def test_every_format_of_an_ssd_finds_what_predict_finds(data, opens, call, antialias, tmp_path):  # noqa: F811
    """A photo of 640 x 480, by predict.py and by the programs that read the files."""
    pytest.importorskip("onnxruntime")
    config = importlib.import_module("configs.ssd_digits").get_config()
    # 480 to 64 pixels: between two pixels are quarters, and a sum of them often ends with a half.
    values = {"image_size": 64, "max_detections": 20, "num_classes": 0, "antialias": antialias}
    config.update({**values, "data_dir": str(data), "compilation_cache": ""})
    benchmark = benchmarks.load(config.copy_and_resolve_references().lock(), "")
    opens(benchmark, config.to_dict(), 0.05, data_dir="/not/here")
    path = tmp_path / "photo.jpg"
    path.write_bytes(photo(480, 640))
    code, text, _ = call(path, "--format=jsonl", "--min_score=0.06")
    objects = json.loads(text)["objects"]
    assert code == 0 and len(objects) > 5
    out = tmp_path / "out"
    export.run("any", "latest", "savedmodel,stablehlo,onnx", str(out))
    labels = (out / "labels.txt").read_text().splitlines()
    image = np.asarray(Image.open(path).convert("RGB"))
    for name in programs.FORMATS:
        results = formats.read(name, str(out / formats.PATHS[name]))({"photo": image})
        found = {key: np.asarray(x) for key, x in results.items()}
        for each in objects:
            x, y, width, height = each["bbox"]
            off = np.abs(found["boxes"] - [y, x, y + height, x + width]).max(axis=1) / 640
            off = np.maximum(off, np.abs(found["score"] - each["score"]))
            off[found["class"] != 1 + labels.index(each["label"])] = 1
            assert off.min() < 0.001, name


@pytest.mark.long
@pytest.mark.parametrize("model", ["ssd"], indirect=True)
def test_jax_alone_runs_the_file(model, tmp_path, capsys):  # noqa: F811
    """In a process of its own, without this program; the photo may have any size."""
    opened, benchmark = model
    out = tmp_path / "out"
    export.run("any", "latest", "stablehlo", str(out))
    assert "off by 0.0e+00" in capsys.readouterr().out
    listed = json.loads((out / "export.json").read_text())
    assert listed["labels"] == ["red", "green", "blue", "grey"]
    assert {*os.listdir(out)} == {"README.md", "export.json", "labels.txt", "model.stablehlo"}
    photo = np.random.default_rng(0).integers(0, 256, (31, 87, 3), np.uint8)
    np.save(tmp_path / "photo.npy", photo)
    code = (
        "import jax, numpy as np, sys; model = jax.export.deserialize(bytearray(open("
        "'out/model.stablehlo', 'rb').read())); np.savez('found.npz', "
        "**jax.jit(model.call)({'photo': np.load('photo.npy')})); print('models' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    found = np.load(tmp_path / "found.npz")
    batch = {name: x[None] for name, x in benchmark.uses.resized(photo, upright=False).items()}
    batch["image_id"] = np.zeros(1, np.int32)
    wanted = jax.jit(benchmark.predict)(opened.params, opened.model_state, batch)
    assert found["boxes"].shape == (20, 4) and found["score"][0] > 0
    for name in ("boxes", "class", "score"):
        np.testing.assert_allclose(found[name], np.asarray(wanted[name][0]), rtol=1e-4, atol=1e-4)


def exported(folder, names=""):
    """Exports the model that is open; returns the functions of its formats, and export.json."""
    export.run("any", "latest", names, str(folder))
    listed = json.loads((folder / "export.json").read_text())
    rows = listed["formats"].items()
    runs = {name: formats.read(name, f"{folder}/{row['path']}") for name, row in rows}
    return runs, listed


@pytest.mark.parametrize(
    "translator", [pytest.param("transformer", marks=pytest.mark.long), "gnmt"], indirect=True
)
def test_translations_do_not_depend_on_the_batch(translator, tmp_path, capsys, request):
    benchmark, sentences, params = translator
    name = request.node.callspec.params["translator"]
    # Each compilation by TensorFlow takes seconds.
    runs, listed = exported(tmp_path / "out", "" if name == "transformer" else "stablehlo")
    assert "off by 0.0e+00" in capsys.readouterr().out
    vocabulary = {"transformer": "vocab.toy.subwords", "gnmt": "vocab.bpe.32000.de"}[name]
    content = (tmp_path / "out" / vocabulary).read_bytes()
    assert hashlib.sha256(content).hexdigest() == benchmark.metadata["vocabulary"]["digest"]
    rows = np.zeros((3, benchmark.settings.eval_lengths[-1]), np.int32)
    for row, sentence in zip(rows, sentences, strict=False):
        ids = benchmark.uses.encode(sentence)
        row[: len(ids)] = ids
    tokens, scores = jax.jit(benchmark.n_best, static_argnums=2)(params, rows, 3)
    for run in runs.values():
        found = run({"sources": rows})
        np.testing.assert_array_equal(found["tokens"], tokens)
        np.testing.assert_allclose(found["scores"], scores, rtol=1e-5)
    alone = [runs["stablehlo"]({"sources": rows[i : i + 1]}) for i in range(3)]
    for name, values in runs["stablehlo"]({"sources": rows}).items():
        np.testing.assert_array_equal(values, np.concatenate([each[name] for each in alone]))


def test_scores_of_users_and_items_by_their_ids(ncf, tmp_path):
    benchmark, params = ncf
    runs, _ = exported(tmp_path / "out")
    lines = (tmp_path / "out" / "items.csv").read_text().splitlines()
    assert lines[:2] == ["item,title", "5,"] and len(lines) == 1 + len(test_items.ITEMS)
    users, items = (np.array(ids, np.uint32) for ids in ([8, 155, 9], [115, 5, 5]))
    vectors = params["users"]["embedding"][np.array([1, 22])]
    expected = np.asarray(benchmark.uses.scores(params, vectors))
    for run in runs.values():
        found = run({"user": users, "item": items})["score"]
        np.testing.assert_allclose(found, [expected[0, 11], expected[1, 0], np.nan], rtol=1e-5)
    lists = use.make_program(benchmark, params, {8: "Bob, B."}, {5: "Heat"}).files
    assert lists["users.csv"].splitlines()[:3] == [b"user,name", b"1,", b'8,"Bob, B."']
    assert lists["items.csv"].splitlines()[1] == b"5,Heat"


def test_only_a_few_values_may_differ_by_rounding():
    """A NaN, an infinity and a value of its own differ from all but themselves."""
    wanted = [{"x": np.array([-np.inf, np.nan, 2.0, 0.0])}]
    assert programs.difference(wanted, wanted, 1e-3) == (0.0, 0.0)
    for other in (np.inf, np.nan, 2.0):
        error, share = programs.difference(
            [{"x": np.array([-np.inf, np.nan, other, 1.0])}], wanted, 1e-3
        )
        assert share == (0.25 if other == 2.0 else 0.5) and not error <= 1e-3


@pytest.mark.parametrize("model", ["ssd"], indirect=True)
def test_what_cannot_be_exported_is_refused(model, tmp_path):  # noqa: F811
    opened, _ = model
    words = "^--format=hf: .* is exported as savedmodel, stablehlo, onnx$"
    with pytest.raises(ConfigError, match=words):
        export.run("any", "latest", "stablehlo,hf", str(tmp_path / "out"))
    assert not [*(tmp_path / "out").iterdir()]
    values = jax.tree.map(lambda x: x * np.nan, opened.params)
    diverged = dataclasses.replace(opened, _read=lambda: (1, Weights("ssd", values, {})))
    with pytest.raises(CheckpointError, match="^ssd: weights are not finite; the run diverged"):
        programs.write(diverged, {}, (), str(tmp_path))
