"""ResNet's benchmark: input specs and architectures from the config to the logits."""

import dataclasses
import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import benchmarks
import input_pipeline
from benchmarks import resnet
from benchmarks.resnet import records, use
from benchmarks.resnet.use import weights
from common.errors import ConfigError
from common.foreign import files
from common.images import input_spec
from common.images.input_spec import NAMED, prepare_image
from configs import resnet50_v2
from engine import schedules
from engine.plan import read_settings
from tests.benchmarks.resnet.test_variants import seeded
from tests.conftest import make_tiny_config
from tests.test_input_pipeline import encode, noise, smooth, write

TINY = {"resnet_depth": 50, "image_size": 32}


def load(folder, **overrides) -> Any:
    config = make_tiny_config(folder, **{**TINY, **overrides})
    return benchmarks.load(config.lock(), "")


def drawn(benchmark):
    """(params, model_state) without the initial zeros."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: seeded(
            jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape
        ),
        jax.eval_shape(benchmark.init, jax.random.key(0)),
    )


def test_evaluation_reads_the_pixels_of_prepare(tmp_path):
    """Cropped first or resized first, with and without antialias; JPEGs and other formats."""

    def encoded(i):
        file_format = ("JPEG", "PNG")[i > 5]
        return encode(smooth(40 + 7 * i, 90 - 5 * i), file_format)

    source = write(tmp_path, (4, 5), encoded)
    for name in ("tensorflow", "timm_a1", "vgg"):
        spec = NAMED[name]
        settings = input_pipeline.Preprocessing(32, 0.3, True, input_spec=name)
        (batch,) = input_pipeline.eval_batches(source, settings, 12, 0, 1)
        for i in (0, 4, 8):
            pixels = prepare_image(encoded(i), spec.at(32))
            np.testing.assert_array_equal(batch["image"][i], pixels, err_msg=name)


@pytest.mark.parametrize("name", NAMED)
def test_inputs_are_normalised_as_the_spec_says(name):
    images, flip = noise(8 * 2, 8).reshape(2, 8, 8, 3), np.array([True, False])
    spec = NAMED[name]
    expected = images.astype(float)
    expected[0] = expected[0][:, ::-1]
    expected = (expected - spec.mean) / spec.std
    if name == "keras":
        assert spec.channels == "BGR"
        expected = expected[..., ::-1]
    pixels = input_pipeline.normalize(jnp.asarray(images), jnp.asarray(flip), "float32", spec)
    np.testing.assert_allclose(pixels, expected, rtol=1e-4, atol=1e-4)


def test_the_manifest_has_the_input_spec(tiny_records):
    benchmark = load(tiny_records, input_spec="timm_a1", image_size=16)
    assert benchmark.input_spec == NAMED["timm_a1"].at(16)
    benchmark.open("train")
    facts = json.loads(json.dumps(benchmark.metadata))
    assert input_spec.from_dict(facts["input_spec"]) == benchmark.input_spec
    text = json.dumps(NAMED["keras"].as_dict())
    assert load(tiny_records, input_spec=text, image_size=224).input_spec == NAMED["keras"]
    fast = load(tiny_records, preprocessing="fast").input_spec
    assert (fast.kernel, fast.resize, fast.antialias) == ("bilinear", 0, False)


def test_classify_gives_what_predict_scores(tiny_records):
    benchmark = load(tiny_records, input_spec="keras", resnet_depth=18)
    variables = drawn(benchmark)
    benchmark.open("eval")
    batch = next(benchmark.eval_batches(8, 0, 1))
    outputs = jax.jit(benchmark.classify)(*variables, batch["image"])
    assert outputs["logits"].shape == (8, 4) and outputs["features"].shape == (8, 4 * 8)
    head = variables[0]["head"]
    logits = np.asarray(outputs["features"]) @ head["kernel"] + head["bias"]
    np.testing.assert_allclose(outputs["logits"], logits, atol=1e-5)
    rows = jax.jit(benchmark.predict)(*variables, batch)
    best = np.argmax(outputs["logits"], axis=1)
    np.testing.assert_array_equal(rows["top_1_accuracy"], best == batch["label"])


def bare(**overrides: Any) -> Any:
    """A benchmark that reads no data."""
    return benchmarks.load(make_tiny_config("", **overrides).lock(), "")


def test_qualities_and_predictions_are_those_of_numpy(monkeypatch):
    benchmark = bare(num_label_classes=7, label_smoothing=0.1)
    logits = np.random.default_rng(0).normal(0, 2, (6, 7)).astype(np.float32)
    order = np.argsort(-logits, axis=1)
    labels = order[np.arange(6), [0, 1, 4, 5, 6, 0]].astype(np.int32)  # by rank
    monkeypatch.setattr(benchmark, "classify", lambda *_: {"logits": jnp.asarray(logits)})
    batch = {"image": None, "id": np.arange(6), "label": labels}
    rows = jax.tree.map(np.asarray, benchmark.predict({}, {}, batch))
    odds = np.exp(logits.astype(float))
    odds /= odds.sum(1, keepdims=True)
    soft = 0.9 * np.eye(7)[labels] + 0.1 / 7
    assert rows["top_1_accuracy"].tolist() == [1, 0, 0, 0, 0, 1]
    assert rows["top_5_accuracy"].tolist() == [1, 1, 1, 0, 0, 1]
    assert rows["top"].tolist() == order[:, :5].tolist()
    own = odds[np.arange(6), labels]
    np.testing.assert_allclose(rows["label_probability"], own, rtol=1e-5)
    best = np.take_along_axis(odds, order[:, :5], 1)
    np.testing.assert_allclose(rows["probability"], best, rtol=1e-5)
    np.testing.assert_allclose(rows["loss"], -(soft * np.log(odds)).sum(1), rtol=1e-5)


def test_the_accuracy_of_each_class(tiny_records):
    """A class without an image is left out; of equal names each has its number."""
    benchmark = load(tiny_records)
    benchmark.open("eval")
    source = benchmark.source("eval")
    named = dataclasses.replace(source, class_names=("crane", "", "dog", "crane"))
    benchmark._sources["eval"] = named
    labels = np.array([0, 3, 1, 0, 3, 3, 0, 0], np.int32)
    for right in ([1, 0, 0, 1, 0, 1, 0, 1], [0] * 8):
        right = np.array(right, np.float32)
        some = ({"label": labels[i], "top_1_accuracy": right[i]} for i in (slice(5), slice(5, 8)))
        assert benchmark.group_scores(some) == {
            "crane (0)": (np.mean(right[labels == 0]), 4),
            "class 1": (right[2], 1),
            "crane (3)": (pytest.approx(np.mean(right[labels == 3], dtype=float)), 3),
        }


@pytest.mark.parametrize(("span", "shared"), [(1, 8), (0, 24)])
def test_statistics_are_kept_by_the_images_that_share_them(span, shared, monkeypatch):
    """One device's 8 images alone, or those of a group of three devices."""
    benchmark, counts = bare(bn_span=span), []

    class Model:
        def apply(self, variables, inputs, *, train):
            assert not train
            return jnp.zeros((len(inputs), 4))

    def keeps(count):
        counts.append(count)
        return True

    benchmark.__dict__["model"] = Model()
    monkeypatch.setattr(benchmark, "keeps_statistics", keeps)
    batch = {"image": np.zeros((3, 8, 16, 16, 3), np.uint8), "label": np.zeros((3, 8), np.int32)}
    batch["flip"] = np.zeros((3, 8), bool)

    def loss(batch):
        terms, qualities, _ = benchmark.loss({}, {}, batch, None)
        return {**terms, **qualities}

    sums = jax.vmap(loss, axis_name="group")(batch)
    assert counts == [shared]
    np.testing.assert_allclose(sums["cross_entropy"][0], [8 * np.log(4)] * 3, rtol=1e-5)
    assert {count for _, counts in sums.values() for count in counts.tolist()} == {8}


def test_values_of_a_checkpoint():
    spec = NAMED["timm_a1"].at(16).as_dict()
    tree = {"model": {"params/head/kernel": "float32[32,10]"}}
    assert resnet.MODEL.restored({}, {"tree": tree}) == {"num_label_classes": 10}
    named = {"input_spec": "timm_a1"}
    assert resnet.MODEL.restored(named, {"tree": {}, "input_spec": spec}) == named
    assert resnet.MODEL.restored(named, {}) == named and resnet.MODEL.restored({}, {}) == {}
    for other in ({}, {"input_spec": "vgg"}):
        values = resnet.MODEL.restored(other, {"input_spec": spec})
        assert json.loads(values["input_spec"]) == spec
    default = NAMED["tensorflow"].at(16).as_dict()
    assert resnet.MODEL.restored({}, {"input_spec": default}) == {}


def test_which_data_are_read(tiny_records):
    keys = ("records", "fake", "tfds:mnist")
    answers = [benchmarks.needs_data_dir(make_tiny_config("", dataset=key)) for key in keys]
    assert answers == [True, False, False]
    assert [bare(num_train_images=0).nominal_examples(k) for k in ("train", "eval")] == [
        *(1_281_167, 50_000)
    ]
    few = bare(num_train_images=90, num_eval_images=23)
    assert [few.nominal_examples(split) for split in ("train", "eval")] == [90, 23]
    assert bare(num_label_classes=0).classes == 1000 and bare(num_label_classes=6).classes == 6
    other: Any = benchmarks.load(make_tiny_config("x", dataset="tfds:x").lock(), "")
    assert records.load_data_manifest(other.keys) is None
    benchmark = load(tiny_records)
    assert [benchmark.open(split) for split in ("train", "eval")] == [90, 23]


def test_foreign_weights_are_of_the_configs_architecture(monkeypatch):
    benchmark, source = bare(resnet_depth=18, deep_stem=False), object()
    values = {key: getattr(benchmark.settings.model, key) for key in weights.ARCHITECTURE}
    monkeypatch.setattr(files, "read", lambda file: source)
    monkeypatch.setattr(weights, "read_settings", lambda file: (values, ["a remark"]))
    monkeypatch.setattr(weights, "translate", lambda *_: ("params", "state"))
    monkeypatch.setattr(weights, "describe", lambda *_: ())
    monkeypatch.setattr(use, "Imported", lambda *parts: parts)
    assert resnet.MODEL.foreign_settings("x.pth") == (values, ["a remark"])
    assert benchmark.uses.read_foreign("x.pth") == ("x.pth", "params", "state")
    values["deep_stem"] = True
    with pytest.raises(ConfigError, match="^config.deep_stem=False, but x.pth has True$"):
        benchmark.uses.read_foreign("x.pth")


@pytest.mark.long
def test_a_dropout_belongs_to_the_example(tiny_records):
    """So the sums of a batch are those of its parts, however many devices there are."""
    benchmark = load(tiny_records, resnet_depth=18, dropout=0.5, bn_statistics="frozen")
    benchmark.open("train")
    params, state = drawn(benchmark)
    batch = next(benchmark.train_batches(16, 0, 1, 0))
    batch.pop("host_seconds")

    @jax.jit
    def loss(batch):
        return benchmark.loss(params, state, batch, jax.random.key(0))[0]["cross_entropy"][0]

    total = loss(batch)
    parts = [loss({k: v[i : i + 8] for k, v in batch.items()}) for i in (0, 8)]
    np.testing.assert_allclose(total, sum(parts), rtol=1e-5)
    other = loss({**batch, "draw": batch["draw"][::-1]})
    assert abs(other - total) > 1e-3 * abs(total)


def test_a_config_without_the_new_keys_means_the_defaults(tiny_records):
    config = make_tiny_config(tiny_records, **TINY)
    for key in ("input_spec", "max_pool", "resnet_version", "deep_stem", "squeeze_excite"):
        del config[key]
    old: Any = benchmarks.load(config.lock(), "")
    new = load(tiny_records)
    assert old.input_spec == new.input_spec and old.settings == new.settings
    del config.unlock()["seed"]
    with pytest.raises(ConfigError, match=r"no config\.seed"):
        benchmarks.load(config, "")


def test_training_with_vgg_windows(tiny_records):
    benchmark = load(tiny_records, preprocessing="vgg", input_spec="vgg")
    (spec,) = benchmark.batch_spec("train", 8)
    benchmark.open("train")
    for batch in itertools.islice(benchmark.train_batches(8, 0, 1, 0), 3):
        for key, leaf in spec.items():
            assert batch[key].shape == leaf.shape and batch[key].dtype == leaf.dtype


def test_the_gradient_tutorials_recipe():
    config = resnet50_v2.get_config()
    settings = read_settings(config.lock())
    benchmark: Any = settings.load_benchmark("")
    assert benchmark.input_spec == NAMED["vgg"]
    params, _ = jax.eval_shape(benchmark.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 25_549_352
    sizes = {"batch_size": 1024, "train_steps": 130_000, "num_examples": 1_281_167}
    rate = schedules.make(settings, **sizes)
    epoch = 1_281_167 / 1024
    for epochs, expected in ((0, 0), (2.5, 0.2), (10, 0.4), (31, 0.04), (61, 4e-3), (81, 4e-4)):
        assert float(rate(round(epochs * epoch))) == pytest.approx(expected, rel=2e-3, abs=1e-9)
    assert float(rate(round(90.1 * epoch))) == 0 == float(rate(129_999))
