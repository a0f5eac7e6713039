"""What every benchmark promises the loop; a new one needs an entry in TINY and no test of its own.

Compute is checked in float32: 8 devices differ from 1 only by the order of additions.
"""

import collections
import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from ml_collections import ConfigDict

import benchmarks
from benchmarks.base import BATCH_AXES, Model
from common.errors import ConfigError
from engine import sharding
from engine import step as steps
from engine.corruption import DeviceCheck
from tests.conftest import FIXTURES, adopt_values, open_run, opened, plan_of

QUICK: Any = {"xla_backend_optimization_level": 0}  # most of a test's time is compilation
ROWS = 24  # divides among 1, 2, 3 and 8


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A benchmark made small. Its dropout, if any, must be off, and `train_steps` be 20."""

    config: str  # the module of the real job's recipe
    data: str  # fixture in conftest.py: makes data in the benchmark's own format, gives the folder
    overrides: dict[str, Any]
    variants: dict[str, dict[str, Any]]  # other ways to get data
    # What makes the real job shallower where its steps are lowered; its layers are alike.
    shallow: dict[str, Any] = dataclasses.field(default_factory=dict)
    tolerance: float = 1e-5  # relative, of sums that differ in the order of additions
    # Of the first steps on one batch, with jax 0.10.2 on a CPU; () where a test of whole runs has
    # them. A change of the data, the initial weights, the loss or the optimizer would move them.
    golden_losses: tuple[float, ...] = ()


TINY = {
    "gnmt": Tiny(
        config="configs.gnmt",
        data="tiny_bpe",
        overrides={
            **{"num_train_pairs": 90, "num_eval_sentences": 23, "vocabulary_size": 13},
            **{"bucket_lengths": (9, 18), "eval_lengths": (6, 18), "max_length": 12},
            **{"num_encoder_layers": 3, "num_decoder_layers": 3, "width": 16, "beam_size": 2},
            **{"dropout": 0.0, "precision": "float32", "init_scale": 0.5, "attention_gain": 1.0},
            **{"label_smoothing": 0.01},
            **{"train_batch_size": ROWS, "eval_batch_size": 8, "train_steps": "20"},
            **{"base_learning_rate": 0.05, "warmup_steps": "2"},
        },
        variants={"as data": {"num_train_pairs": 0, "num_eval_sentences": 0, "vocabulary_size": 0}},
    ),
    "languages": Tiny(
        config="tests.fixtures.recipes.languages",
        data="tiny_texts",
        overrides={
            **{"num_train_texts": 72, "num_eval_texts": 23, "train_batch_size": ROWS},
            **{"eval_batch_size": 8, "train_steps": "20", "base_learning_rate": 2.0},
        },
        variants={},
    ),
    "mask_rcnn": Tiny(
        config="configs.mask_rcnn_digits",
        data="tiny_masks",
        overrides={
            **{"num_train_images": 90, "num_eval_images": 23, "num_classes": 4},
            **{"image_short": 48, "image_long": 64, "image_shape": (48, 64), "mask_size": 8},
            **{"shuffle_buffer_size": 48, "input_streams": 12, "max_boxes": 6},
            **{"resnet_stages": (1, 1, 1), "num_filters": 4, "bn_statistics": "frozen"},
            **{"pyramid_filters": 8, "box_features": (16,), "mask_features": (8,)},
            **{"box_pool": 3, "mask_pool": 4, "anchor_scale": 2.5, "region_scale": 32.0},
            **{"anchor_samples": 16, "region_samples": 8, "max_detections": 6},
            **{"proposals_before_nms": 20, "proposals_after_nms": 8},
            **{"eval_proposals_before_nms": 20, "eval_proposals_after_nms": 8},
            **{"train_batch_size": ROWS, "eval_batch_size": 8, "train_steps": "20"},
            **{"warmup_steps": "2", "base_learning_rate": 1e-2},
        },
        variants={"one shape": {"image_shape": (64, 64)}},
        golden_losses=(3.148177, 3.148177, 3.024159, 2.812930, 2.682487),
    ),
    "ncf": Tiny(
        config="configs.ncf",
        data="tiny_ratings",
        overrides={
            **{"num_users": 23, "num_items": 12, "num_ratings": 46, "min_ratings": 2},
            **{"eval_negatives": 50, "gmf_dim": 4, "mlp_layers": (8, 8, 4)},
            **{"train_batch_size": ROWS, "eval_batch_size": 8, "train_steps": "20"},
            **{"base_learning_rate": 0.02},
        },
        variants={
            "as data": {"num_users": 0, "num_items": 0, "num_ratings": 0},
            "fake": {"dataset": "fake"},
        },
    ),
    "resnet": Tiny(
        config="configs.resnet50",
        data="tiny_records",
        overrides={
            **{"num_label_classes": 4, "num_train_images": 90, "num_eval_images": 23},
            **{"image_size": 32, "shuffle_buffer_size": 48, "input_streams": 12},
            **{"resnet_depth": 18, "num_filters": 4, "precision": "float32"},
            **{"train_batch_size": ROWS, "eval_batch_size": 8, "train_steps": "20"},
            **{"base_learning_rate": 2.0, "label_smoothing": 0.1},
        },
        variants={
            "fake": {"dataset": "fake"},
            "fast": {"preprocessing": "fast"},
            "repeats": {"repeats": 3},
            # 20 steps: the size changes after 4 and 6.
            "sizes": {"image_sizes": ((0.0, 16), (0.2, 24), (0.3, 32)), "eval_image_size": 40},
            "sizes, fake": {"dataset": "fake", "image_sizes": ((0.0, 16), (0.2, 24))},
        },
    ),
    "ssd": Tiny(
        config="configs.ssd_digits",
        data="tiny_scenes",
        overrides={
            **{"num_train_images": 90, "num_eval_images": 23, "num_classes": 4},
            **{"image_size": 32, "shuffle_buffer_size": 48, "input_streams": 12, "max_boxes": 6},
            **{"num_filters": 4, "precision": "float32", "extra_squeezed": (4,)},
            **{"extra_filters": (8,), "extra_strides": (2,), "extra_paddings": (1,)},
            **{"box_steps": (8, 16), "box_sides": (8, 14, 24), "box_ratios": (2, 2)},
            **{"train_batch_size": ROWS, "eval_batch_size": 8, "train_steps": "20"},
            **{"warmup_steps": "2", "max_samples": 1, "max_detections": 20},
            **{"base_learning_rate": 4e-3},
        },
        variants={},
    ),
    "transformer": Tiny(
        config="configs.transformer",
        data="tiny_sentences",
        overrides={
            **{"num_train_rows": 90, "num_eval_sentences": 23, "vocabulary_size": 27},
            **{"row_length": 12, "eval_lengths": (4, 9), "extra_length": 2, "beam_size": 2},
            **{"shuffle_buffer_size": 48, "input_streams": 12, "dropout": 0.0},
            **{"num_layers": 1, "width": 16, "mlp_width": 16, "num_heads": 2},
            **{"train_batch_size": ROWS, "eval_batch_size": 8, "train_steps": "20"},
            **{"base_learning_rate": 0.03, "warmup_steps": "2", "precision": "float32"},
            **{"learning_rate_schedule": "cosine"},
        },
        variants={},
        shallow={"num_layers": 1},
    ),
}

# (benchmark, variant)
SOURCES = [(name, v) for name, tiny in TINY.items() for v in ("", *tiny.variants)]


@dataclasses.dataclass
class Job:
    """One benchmark with its tiny config; `make` makes it anew."""

    tiny: Tiny
    base: dict[str, Any]
    cache: str

    def config(self, **overrides: Any) -> Any:
        config = importlib.import_module(self.tiny.config).get_config()
        config.update({**self.tiny.overrides, **self.base, **overrides})
        return config.lock()

    def make(self, **overrides: Any) -> Any:
        benchmark = opened(benchmarks.load(self.config(**overrides), self.cache))
        benchmark.set_total_steps(20)
        return benchmark


def make_job(request: Any, name: str, variant: str) -> Job:
    tiny = TINY[name]
    data = {"data_dir": request.getfixturevalue(tiny.data)}
    folder = request.getfixturevalue("tmp_path_factory").mktemp("cache")
    return Job(tiny, {**data, **tiny.variants.get(variant, {})}, str(folder))


@pytest.fixture(scope="module", params=SOURCES, ids=lambda s: "-".join(filter(None, s)))
def source(request):
    """Each way each benchmark gets its data."""
    return make_job(request, *request.param)


@pytest.fixture(scope="module", params=sorted(TINY))
def job(request):
    """Each benchmark."""
    return make_job(request, request.param, "")


def test_every_benchmark_has_a_tiny_config():
    assert sorted(TINY) == benchmarks.names()


def test_an_outside_package_does_not_replace_a_benchmark(tmp_path, monkeypatch):
    for name in ("ssd", "own"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("def make(config, cache_dir): ...")
    paths = benchmarks.modules()
    monkeypatch.setattr(benchmarks, "__path__", [*benchmarks.__path__, str(tmp_path)])
    assert benchmarks.modules() == {**paths, "own": "benchmarks.own"}


# --- The config and the weights of another model.


def foreign_settings(file):
    remarks = [("weights are old", ""), ("width is odd", "width")]
    return None if file == "unknown" else ({"width": 3, "depth": 2}, remarks)


def follow(config, values):
    return {"num_classes": values["width"] + len(config.benchmark)}


EVERY = Model(
    keys=("width", "depth"),
    body_keys=("size",),
    whole_keys=("num_classes",),
    follows=("other",),
    follow=follow,
    foreign_settings=foreign_settings,
)


@pytest.fixture
def modules(monkeypatch):
    """The benchmarks "own", "other" and "plain", the last without a `MODEL`."""
    known = {"own": types.SimpleNamespace(MODEL=EVERY), "plain": object()}
    known["other"] = known["own"]
    monkeypatch.setattr(benchmarks, "module", known.__getitem__)


def adopted(benchmark, model, given=(), whole=False):
    values = {"benchmark": benchmark, "init_from": "a", "width": 1, "num_classes": 7}
    config = ConfigDict(values).lock()
    adopted = benchmarks.adopted_values(config, model, given, whole)
    assert config.to_dict() == values
    return adopted


def test_a_config_takes_the_keys_of_another_librarys_weights(modules):
    remarks = ["weights are old", "width is odd"]
    assert adopted("own", "file") == ({"width": 3, "depth": 2}, remarks)
    assert adopted("own", "file", {"width"}) == ({"depth": 2}, remarks[:1])
    for benchmark, file in (("own", "unknown"), ("plain", "file")):
        with pytest.raises(ConfigError, match=f"init_from=a: {file} is a file, .* {benchmark} can"):
            adopted(benchmark, file)


def test_a_config_takes_the_keys_of_a_checkpoint(modules):
    def manifest(benchmark):
        values = {"benchmark": benchmark, "width": 3, "num_classes": 5}
        return {"benchmark": benchmark, "config": values, "num_train_examples": 1}

    assert adopted("own", manifest("own")) == ({"width": 3}, [])
    assert adopted("own", manifest("own"), whole=True) == ({"width": 3, "num_classes": 5}, [])
    assert adopted("own", manifest("own"), ("num_classes",), whole=True) == ({"width": 3}, [])
    assert adopted("own", manifest("other")) == ({"width": 3, "num_classes": 6}, [])
    assert adopted("own", manifest("plain")) == ({}, [])


@pytest.mark.parametrize(("benchmark", "size"), [("own", 9), ("other", 1)])
def test_some_keys_are_only_taken_from_models_of_the_same_benchmark(benchmark, size, modules):
    """A ResNet has an `image_size` as well, but it is not a detector's."""
    values = {"benchmark": benchmark, "width": 3, "size": 9}
    manifest = {"benchmark": benchmark, "config": values, "num_train_examples": 1}
    config = ConfigDict({"benchmark": "own", "width": 1, "size": 1}).lock()
    adopt_values(config, manifest)
    assert (config.width, config.size) == (3, size)


def test_an_unknown_benchmark_is_refused():
    known = "gnmt, languages, mask_rcnn, ncf, resnet, ssd, transformer"
    with pytest.raises(ConfigError, match=f"^config.benchmark='new' is not one of: {known}$"):
        benchmarks.load(ConfigDict({"benchmark": "new"}), "")


# --- Data.


def test_data_are_known_again(source, tmp_path):
    """Copied data are the same; what a checkpoint keeps of them is JSON."""
    own, metadata = source.make(), None
    copy = Path(shutil.copytree(source.base["data_dir"], tmp_path / "copy"))
    other = opened(benchmarks.load(source.config(data_dir=str(copy)), str(tmp_path)))
    for split in ("train", "eval"):
        meaning, content, _ = identity = own.identity(split)
        assert other.identity(split) == identity
        metadata = metadata or json.loads(json.dumps(own.metadata))
        assert {key: metadata[key] for key in meaning} == json.loads(json.dumps(meaning))
        assert all(isinstance(text, str) for text in content.values())


def joined(batches: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The rows of several batches of one shape."""
    assert len({tuple(sorted(batch)) for batch in batches}) == 1
    return {k: np.concatenate([batch[k] for batch in batches]) for k in batches[0]}


def train_stream(benchmark: Any, num_shards: int, start: int, count: int) -> list[Any]:
    """Batches of all hosts, put together."""
    shards = [
        itertools.islice(benchmark.train_batches(ROWS, shard, num_shards, start), count)
        for shard in range(num_shards)
    ]
    global_batches = [joined(list(batches)) for batches in zip(*shards, strict=True)]
    for batch in global_batches:  # of the clock, not of the data
        assert (batch.pop("host_seconds", np.zeros(ROWS)) >= 0).all()
    return global_batches


def eval_stream(benchmark: Any, size: int, num_shards: int) -> list[Any]:
    shards = [list(benchmark.eval_batches(size, shard, num_shards)) for shard in range(num_shards)]
    for batches in shards:
        assert all(len(x) == size // num_shards for b in batches for x in b.values())
    return [joined(list(batches)) for batches in zip(*shards, strict=True)]


def assert_same(actual: list[Any], expected: list[Any]) -> None:
    assert len(actual) == len(expected) > 0
    for a, b in zip(actual, expected, strict=True):
        assert a.keys() == b.keys()
        for k in a:
            np.testing.assert_array_equal(a[k], b[k])


def described(batch: Any) -> dict[str, Any]:
    return {k: (v.shape, np.dtype(v.dtype)) for k, v in batch.items()}


@pytest.fixture(scope="module")
def stream(source):
    """The first 8 batches of training, put together from two hosts' shares."""
    return train_stream(source.make(), 2, 0, 8)


@pytest.fixture(scope="module")
def evaluated(source):
    """The batches of an evaluation, put together from two hosts' shares."""
    return eval_stream(source.make(), ROWS // 4, 2)


def test_batches_are_as_declared(source, stream, evaluated):
    benchmark = source.make()
    streams = {"train": stream, "eval": evaluated}
    for split, batches in streams.items():
        specs = benchmark.batch_spec(split, len(next(iter(batches[0].values()))))
        for spec in specs:
            assert all(x.shape[0] == len(next(iter(batches[0].values()))) for x in spec.values())
        for batch in batches:
            assert described(batch) in [described(spec) for spec in specs]
    assert "mask" in streams["eval"][0]


def test_hosts_share_one_stream(source, stream):
    benchmark = source.make()
    for num_shards in (1, 3):
        assert_same(train_stream(benchmark, num_shards, 0, 5), stream[:5])


@pytest.mark.parametrize("start", [2, 5])
def test_stream_goes_on_where_it_was_stopped(source, stream, start):
    """In another process: nothing but the step is known. 5 is in the second epoch."""
    assert_same(train_stream(source.make(), 1, start, 8 - start), stream[start:])


def test_evaluation_has_every_example_once(source, evaluated):
    benchmark, size = source.make(), ROWS // 4
    expected = benchmark.num_examples("eval")
    assert expected % size and expected > 3 * size  # there are several batches, one not full
    counts = []
    for num_shards in (1, 2, 3):
        batches = evaluated if num_shards == 2 else eval_stream(benchmark, size, num_shards)
        batches = [dict(batch) for batch in batches]
        kinds = len(benchmark.batch_spec("eval", size))  # the last batch of each may not be full
        assert 0 <= len(batches) - math.ceil(expected / size) < kinds
        masks = [batch.pop("mask") for batch in batches]
        assert set(np.unique(masks)) == {0, 1}
        assert np.sum(masks) == expected
        digests = [
            hashlib.sha256(b"".join(batch[k][i].tobytes() for k in sorted(batch))).digest()
            for batch, mask in zip(batches, masks, strict=True)
            for i in np.flatnonzero(mask)
        ]
        counts.append(collections.Counter(digests))
        if source.config().get("dataset") != "fake":  # that one repeats a batch
            assert max(counts[-1].values()) == 1
    assert counts[0] == counts[1] == counts[2]


def positives(benchmark: Any) -> set[str]:
    """The training examples of an epoch by their places; without those that it draws."""
    ids = {
        i for step in range(benchmark.num_examples("train")) for i in benchmark.train_ids(1, step)
    }
    places = benchmark.describe_examples(sorted(ids))
    return {place for place in places if not place.startswith("a negative")}


def test_parts_of_the_data_are_nested_and_evaluated_on_the_same_examples(job):
    sizes = {key: 0 for key in job.config() if key in ("num_users", "num_items", "num_ratings")}
    parts = {f: job.make(train_fraction=f, **sizes) for f in (0.5, 0.7, 1.0)}
    half, more, every = (positives(part) for part in parts.values())
    assert half <= more <= every
    complete = parts[1.0].num_examples("train")
    for fraction, part in parts.items():
        if "num_users" not in sizes:  # each user has a single rating there, and keeps it
            assert abs(part.num_examples("train") / complete - fraction) < 0.1, fraction
        assert part.num_examples("eval") == parts[1.0].num_examples("eval")
        assert_same(eval_stream(part, 8, 1), eval_stream(parts[1.0], 8, 1))
        amount, unit = part.collected(part.num_examples("train"))
        assert unit and amount > 0
    batches = train_stream(parts[0.5], 1, 0, 3)
    assert_same(train_stream(job.make(train_fraction=0.5, **sizes), 2, 0, 3), batches)


def test_facts_are_plain(source):
    benchmark = source.make()
    assert json.loads(json.dumps(benchmark.metadata)) == benchmark.metadata
    assert benchmark.num_examples("train") > 0
    for split in ("train", "eval"):
        assert benchmark.declared_examples(split) in (0, benchmark.num_examples(split))
    assert all(benchmark.nominal_examples(split) > 0 for split in ("train", "eval"))
    assert isinstance(benchmark.unit, str) and isinstance(benchmark.published, str)
    assert isinstance(benchmark.bn_span, int | str)
    ids = benchmark.train_ids(ROWS, 3)
    (batch,) = train_stream(benchmark, 1, 3, 1)
    assert ids == batch["id"].tolist() and len(benchmark.describe_examples(ids)) == len(ids)
    params = jax.eval_shape(benchmark.init, jax.random.key(0))[0]
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert benchmark.label(name) in benchmark.groups
    assert benchmark.targets and all(math.isfinite(t.value) for t in benchmark.targets)


# --- Compute.


def put(mesh: Mesh, tree: Any, batch: bool = False) -> Any:
    placement = sharding.batch_sharding(mesh) if batch else sharding.replicated(mesh)
    return jax.tree.map(lambda x: jax.device_put(x, placement), tree)


@pytest.fixture(scope="module")
def weights(job):
    """(params, model_state), moved off special values such as a gamma of 0, which hide faults."""
    params, model_state = jax.jit(job.make().init, compiler_options=QUICK)(jax.random.key(0))
    draw = np.random.default_rng(0)

    def moved(x: Any) -> np.ndarray:
        return (np.asarray(x) + draw.uniform(-0.1, 0.1, x.shape)).astype(x.dtype)

    return jax.tree.map(moved, params), jax.tree.map(np.asarray, model_state)


def same_key_everywhere(loss: Any) -> Any:
    """The loss with one key for all devices, whose random numbers depend on the example only."""
    return lambda params, state, batch, rng: loss(params, state, batch, jax.random.key(1))


def of_one_shape(benchmark: Any, count: int) -> list[Any]:
    """The first batches of training that have the shape of the first one."""
    stream = (batch for step in range(50) for batch in train_stream(benchmark, 1, step, 1))
    first = next(stream)
    same = (batch for batch in stream if described(batch) == described(first))
    return [first, *itertools.islice(same, count - 1)]


@pytest.fixture(scope="module")
def on_one_device(job):
    """The gradients of ROWS rows on one device."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), BATCH_AXES)
    overrides = {"bn_span": 0} if "bn_span" in job.config() else {}
    loss = same_key_everywhere(job.make(**overrides).loss)
    gradients = steps.make_gradients(loss, mesh, 1)
    return jax.jit(gradients, compiler_options=QUICK)


@pytest.mark.long
@pytest.mark.parametrize("span", [0, 1, 2])
def test_eight_devices_give_what_one_gives(job, weights, on_one_device, span):
    """A group of devices that share BatchNorm statistics does what one does with all its rows.

    Span 0 is all 8 devices. The reference computes every group alone, on one device.
    """
    if "bn_span" not in job.config() and span:
        pytest.skip("has no BatchNorm")
    overrides = {"bn_span": span} if "bn_span" in job.config() else {}
    benchmark, key = job.make(**overrides), jax.random.key(0)
    mesh, groups = sharding.make(BATCH_AXES, span), 8 // span if span else 1
    batch = joined(of_one_shape(benchmark, groups))
    loss = same_key_everywhere(benchmark.loss)
    compute = jax.jit(steps.make_gradients(loss, mesh, 1), compiler_options=QUICK)

    def on_eight(order: np.ndarray) -> Any:
        rows = {k: v[order] for k, v in batch.items()}
        return compute(*put(mesh, weights), put(mesh, rows, batch=True), key)

    order = np.arange(groups * ROWS)
    actual = on_eight(order)
    alone = [
        on_one_device(*weights, {k: v[part] for k, v in batch.items()}, key)
        for part in order.reshape(groups, ROWS)
    ]
    mean = jax.tree.map(lambda *x: np.mean(np.stack(x).astype(float), axis=0), *alone)
    assert jax.tree.structure(actual) == jax.tree.structure(mean)
    (gradients, sums, state), (want_gradients, want_sums, want_state) = actual, mean
    for name, (value, weight) in sums.items():
        want, want_weight = want_sums[name]
        close = functools.partial(np.testing.assert_allclose, rtol=job.tiny.tolerance)
        close(value * want_weight, want * weight, err_msg=name)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(want_gradients))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5 * largest)
    jax.tree.map(close, (gradients, state), (want_gradients, want_state))

    # Rows that change places between groups change the statistics, unless all share them.
    mixed = on_eight(order.reshape(groups, ROWS).T.ravel())
    change = abs(float(mixed[1]["loss"][0]) / float(sums["loss"][0]) - 1)
    assert change > 1e-4 if groups > 1 else change < 1e-5, change


@pytest.mark.long
def test_loss_falls_on_one_batch(job):
    config, benchmark = job.config(), job.make()
    mesh = sharding.make(BATCH_AXES, benchmark.bn_span)
    plan = plan_of(config, benchmark.num_examples("train"))
    (batch,) = train_stream(benchmark, 1, 0, 1)
    batch = put(mesh, batch, batch=True)
    make = jax.jit(functools.partial(steps.init_state, benchmark.init, plan.step_settings))
    seed = np.uint32(config.seed)
    state = put(mesh, make.lower(seed).compile(QUICK)(seed))
    spec = steps.totals_spec(benchmark.loss, mesh, plan.step_settings, (seed, state, batch))
    totals = jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), spec)
    train_step = steps.make_train_step(benchmark.loss, mesh, plan.step_settings)
    step = train_step.lower(seed, state, totals, batch).compile(QUICK)
    losses = []
    for _ in range(plan.total_steps):
        state, totals, loss = step(seed, state, totals, batch)
        losses.append(float(loss))
    assert len(losses) == 20
    assert np.isfinite(losses).all() and int(totals["bad_step"]) == 0
    assert losses[-1] < 0.7 * losses[0], losses
    golden = job.tiny.golden_losses
    np.testing.assert_allclose(losses[: len(golden)], golden, rtol=1e-4)


def scores(benchmark: Any, predict: Any, batches: list[Any]) -> dict[str, float]:
    """Scores of the rows that are not padding, from a predict step that takes [rows, ...]."""

    def rows() -> Any:
        for batch in batches:
            predictions = {k: np.asarray(v) for k, v in predict(batch).items()}
            real = predictions.pop("mask") == 1
            yield {k: v[real] for k, v in predictions.items()}

    return benchmark.score(rows())


@pytest.mark.long
def test_padding_changes_no_score(job, weights):
    benchmark = job.make()
    mesh = sharding.make(BATCH_AXES, benchmark.bn_span)
    step = steps.make_predict_step(benchmark.predict, mesh)
    placed, programs = put(mesh, weights), {}

    def predict(batch: Any) -> Any:
        arguments = *placed, put(mesh, batch, batch=True)
        shape = str(jax.tree.map(np.shape, batch))
        if shape not in programs:
            programs[shape] = step.lower(*arguments).compile(QUICK)
        return programs[shape](*arguments)

    def garbage(values: np.ndarray, real: np.ndarray) -> np.ndarray:
        worst = {"f": np.nan, "b": True, "i": -7, "u": 201}[values.dtype.kind]
        keep = real.reshape(-1, *[1] * (values.ndim - 1))
        return np.where(keep, values, np.asarray(worst, values.dtype))

    batches = eval_stream(benchmark, 16, 1)
    assert 0 < sum((batch["mask"] == 0).sum() for batch in batches) < 16
    clean = scores(benchmark, predict, batches)
    # A detector's AP of large objects is not defined where the data have none.
    assert all(math.isfinite(clean[target.metric]) for target in benchmark.targets)
    assert {*benchmark.score_names} <= clean.keys()  # config.best_by may name them
    assert {target.metric for target in benchmark.targets} <= {*benchmark.score_names}
    spoilt = [
        {k: v if k == "mask" else garbage(v, batch["mask"] == 1) for k, v in batch.items()}
        for batch in batches
    ]
    np.testing.assert_equal(scores(benchmark, predict, spoilt), clean)
    other = scores(benchmark, predict, eval_stream(benchmark, ROWS, 1))
    assert other == pytest.approx(clean, rel=job.tiny.tolerance, nan_ok=True)


@pytest.mark.long
def test_no_device_computes_other_bits_than_another(job, tmp_path):
    """With dropout, and with statistics that a span of devices would share."""
    config = job.config()
    random = {"bn_span": 4, "dropout": 0.1, "check_devices_every": 1}
    run = open_run(job.config(**{k: v for k, v in random.items() if k in config}), tmp_path)
    plan = plan_of(job.config(), 90)
    state = run.programs.abstract_state(plan)
    nowhere: Any = None
    check = DeviceCheck(run.programs, nowhere, state)
    state = run.programs.initial_state(plan)
    run.benchmark.open("train")
    prefetched = sharding.Feed(run.benchmark.train_batches(ROWS, 0, 1, 0), run.mesh)
    with jax.transfer_guard("disallow"):  # nor does any batch bring a hidden copy to the devices
        for number, batch in zip(range(3), prefetched, strict=False):
            check.before(number, state, batch)


LOWER = """
import functools, importlib, json, sys
sys.modules["tensorflow"] = None  # an import of it raises
import jax
import benchmarks
from benchmarks.base import BATCH_AXES
from engine import sharding, step as steps
from engine.plan import make_plan, read_settings

def described(tree):
    return jax.tree.map(lambda x: (tuple(x.shape), str(x.dtype)), tree)

def lowered(step, *shapes):
    return step.trace(*shapes).lower(lowering_platforms=("cpu", "tpu"))

for name, overrides in json.loads(sys.argv[1]).items():
    config = importlib.import_module(name).get_config()
    config.update(overrides)
    benchmark = benchmarks.load(config.lock(), "gs://no-such-bucket/cache")
    mesh = sharding.make(BATCH_AXES, benchmark.bn_span)
    settings = make_plan(read_settings(config), benchmark, 1_000_000).step_settings
    seed = jax.ShapeDtypeStruct((), "uint32")
    shapes = jax.eval_shape(functools.partial(steps.init_state, benchmark.init, settings), seed)
    state = sharding.abstract(shapes, sharding.replicated(mesh))
    for split, size in (("train", config.train_batch_size), ("eval", config.eval_batch_size)):
        for spec in benchmark.batch_spec(split, size):
            batch = sharding.abstract(spec, sharding.batch_sharding(mesh))
            if split == "train":
                arguments = seed, state, batch
                totals = steps.totals_spec(benchmark.loss, mesh, settings, arguments)
                step = steps.make_train_step(benchmark.loss, mesh, settings)
                info = lowered(step, seed, state, totals, batch).out_info
                assert described(info[:2]) == described((state, totals)), info
            else:
                step = steps.make_predict_step(benchmark.predict, mesh)
                info = lowered(step, state.params, state.model_state, batch).out_info
                assert {x.shape[0] for x in info.values()} == {size}, info
    print(name)
"""


@pytest.mark.long
def test_steps_lower_from_specs_alone():
    """Without data and without TensorFlow, for TPUs too; the state comes out as it went in."""
    jobs = {tiny.config: tiny.shallow for tiny in TINY.values()}
    done = subprocess.run(
        [sys.executable, "-c", LOWER, json.dumps(jobs)],
        env={**os.environ, "PYTHONPATH": str(FIXTURES)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(jobs)
