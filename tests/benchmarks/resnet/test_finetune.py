"""Fine-tuning: frozen parts, new parts, class weights, kept statistics, patience."""

import contextlib
import io
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from sklearn.utils.class_weight import compute_class_weight

import benchmarks
import train
from benchmarks.resnet import ImageClassifier
from benchmarks.resnet.preparation.examples import tf_example
from common.errors import CheckpointError, ConfigError
from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.saver import first_state
from engine.cluster import preemption
from engine.plan import make_plan, read_settings
from engine.stopping import StoppingRule
from tests.conftest import make_programs, make_tiny_config, open_run, opened, plan_of
from tests.helpers.preparation import write_shards
from tests.test_train import (  # noqa: F401 (a fixture)
    assert_same_state,
    fresh_signals,
    rows,
    state_on_disk,
    stop_at_batch,
    timeless,
)

SHORT = {"train_steps": "8", "steps_per_checkpoint": "2", "steps_per_eval": "2"}


@pytest.fixture(scope="module")
def other(tmp_path_factory, tiny_records):
    """The workdir of a model with the same classes: checkpoint 2 with another seed's weights."""
    workdir = str(tmp_path_factory.mktemp("other"))
    benchmark = benchmarks.load(make_tiny_config(tiny_records), workdir)
    draw = np.random.default_rng(0)
    shapes = jax.eval_shape(benchmark.init, jax.random.key(0))

    def drawn(path, x):
        ones = jax.tree_util.keystr(path[-1:], simple=True) in ("scale", "var")
        return jnp.asarray(draw.normal(float(ones), 0.05, x.shape), x.dtype)

    params, model_state = jax.tree_util.tree_map_with_path(drawn, shapes)
    checkpoints = Checkpointer(f"{workdir}/checkpoints", keep=1, best=lambda: None)
    model = {"params": params, "model_state": model_state, "ema": {}}
    checkpoints.save(2, model, {"step": jnp.int32(2)}, manifest={})
    checkpoints.close()
    return workdir


@pytest.fixture(scope="module")
def unbalanced(tmp_path_factory):
    """Records of 3 classes with 20, 5 and 10 training images, and 2 of each to evaluate."""
    folder = tmp_path_factory.mktemp("unbalanced")
    for split, counts in (("train", (20, 5, 10)), ("validation", (2, 2, 2))):
        examples = []
        for label in np.random.default_rng(0).permutation(np.repeat(range(3), counts)):
            file = io.BytesIO()
            Image.new("RGB", (20, 20), (90 * int(label), 50, 50)).save(file, "JPEG")
            row = tf_example(file.getvalue(), int(label) + 1, f"n{label}", "x.JPEG", (20, 20))
            examples.append(row)
        write_shards(str(folder), split, examples, 2)
    return str(folder)


def said(caplog):
    return [record.getMessage() for record in caplog.records]


# --- Parts by name.


@pytest.mark.parametrize("key", ["freeze", "init_without"])
def test_a_part_that_is_none_is_refused_before_anything_is_compiled(
    key, other, tiny_records, tmp_path
):
    config = make_tiny_config(tiny_records, init_from=other, **{key: "stage1, stag2"})
    with pytest.raises(ConfigError, match=rf"config\.{key}: 'stag2' is not a part .*conv_stem"):
        run = open_run(config, tmp_path)
        first_state(run.programs, make_plan(run.settings, run.benchmark, 90))


def test_something_must_be_trained(tiny_records):
    config = make_tiny_config(tiny_records, freeze="conv,bn,head")
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        make_programs(config).abstract_state(plan_of(config, 90))


def test_the_head_has_its_own_rate_and_frozen_parts_none(tiny_records):
    base = make_tiny_config(tiny_records, warmup_epochs=0.0)
    config = make_tiny_config(
        tiny_records, warmup_epochs=0.0, head_learning_rate=10.0, freeze="stage1"
    )
    params = {
        name: {"kernel": np.full((2, 2), 3.0, np.float32), "bias": np.full(2, 3.0, np.float32)}
        for name in ("conv_stem", "stage1_block1", "head")
    }
    gradients = jax.tree.map(np.ones_like, params)

    def changes(config) -> Any:
        optimizer = plan_of(config, 90).step_settings.optimizer
        state = optimizer.init(params)
        return optimizer.update(gradients, state, params)[0]

    got, usual = changes(config), changes(base)
    for kind, decay in (("kernel", 5e-4), ("bias", 0.0)):
        np.testing.assert_allclose(got["head"][kind], 10 * usual["head"][kind], rtol=1e-6)
        np.testing.assert_array_equal(got["conv_stem"][kind], usual["conv_stem"][kind])
        np.testing.assert_array_equal(got["stage1_block1"][kind], 0)
        # Rate 0.4 / 256 * 16 at step 0, Nesterov's momentum 0.9: -0.025 * 1.9 * (1 + decay * 3).
        np.testing.assert_allclose(usual["head"][kind], -0.025 * 1.9 * (1 + 3 * decay), rtol=1e-5)


# --- Statistics of BatchNorm.


@pytest.mark.parametrize(
    ("chosen", "declared", "batch", "keeps"),
    [
        *(("auto", 1999, 256, True), ("auto", 2000, 256, False), ("auto", 2000, 64, True)),
        *(("batch", 100, 16, False), ("frozen", 10**6, 256, True)),
    ],
)
def test_few_images_keep_the_statistics(chosen, declared, batch, keeps, tmp_path):
    """On the 8 devices of the tests, a batch of 64 gives each one 8 images, and 256 gives 32."""
    overrides = {"dataset": "fake", "num_train_images": declared, "num_eval_images": 8}
    config = make_tiny_config("", bn_statistics=chosen, train_batch_size=batch, **overrides)
    programs = make_programs(config, tmp_path)
    benchmark: Any = programs.benchmark
    assert benchmark.keeps_statistics(programs.norm_examples) == keeps
    refused = pytest.raises(ConfigError, match="init_from=hf-hub:timm/resnet18.a1_in1k ")
    with contextlib.nullcontext() if chosen == "batch" else refused:
        benchmark.check_random_start(programs.norm_examples)


class Stub:
    """A model whose logits are its images' first values; in training it counts its batches."""

    def apply(self, variables, inputs, train, seeds=None, mutable=()):
        logits = inputs[:, 0, :3, 0]
        return (logits, {"batch_stats": variables["batch_stats"] + 1}) if train else logits


@pytest.mark.parametrize("chosen", ["batch", "frozen"])
def test_kept_statistics_do_not_change(chosen, tmp_path):
    overrides = {"dataset": "fake", "num_train_images": 16, "num_eval_images": 8}
    config = make_tiny_config("", bn_statistics=chosen, num_label_classes=3, **overrides)
    benchmark: Any = benchmarks.load(config, str(tmp_path))
    vars(benchmark)["model"] = Stub()
    batch = next(benchmark.train_batches(8, 0, 1, 0))
    _, _, after = benchmark.loss({}, {"batch_stats": 5}, batch, None)
    assert after == {"batch_stats": 5 if chosen == "frozen" else 6}


@pytest.mark.parametrize(
    ("key", "value"), [("bn_statistics", "auto"), ("bn_statistics", "frozen"), ("freeze", "stem")]
)
def test_what_is_kept_needs_a_model(key, value, tiny_records, tmp_path):
    config = make_tiny_config(tiny_records, **{key: value})
    with pytest.raises(ConfigError, match=f"{key}='{value}' .*config.init_from"):
        train.train_and_evaluate(read_settings(config, str(tmp_path)))


# --- Class weights.


def test_class_weights_are_scikit_learns(unbalanced, tmp_path):
    config = make_tiny_config(unbalanced, class_weights="auto", num_label_classes=3)
    benchmark = opened(benchmarks.load(config, str(tmp_path)))
    labels = np.repeat(range(3), (20, 5, 10))
    weights = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    batch = next(benchmark.train_batches(16, 0, 1, 0))
    np.testing.assert_allclose(batch["weight"], weights[batch["label"]], rtol=1e-6)
    assert {k: v.shape for k, v in benchmark.batch_spec("train", 16)[0].items()} == {
        k: v.shape for k, v in batch.items() if k != "host_seconds"
    }
    assert "weight" not in benchmark.batch_spec("eval", 16)[0]
    np.testing.assert_allclose(np.mean(weights[labels]), 1)


def test_the_loss_is_weighted_and_the_accuracy_is_not(unbalanced, tmp_path):
    overrides = {"class_weights": "auto", "num_label_classes": 3, "label_smoothing": 0.0}
    config = make_tiny_config(unbalanced, **overrides)
    benchmark: Any = opened(benchmarks.load(config, str(tmp_path)))
    vars(benchmark)["model"] = Stub()
    batch = next(benchmark.train_batches(16, 0, 1, 0))
    terms, metrics, _ = benchmark.loss({}, {"batch_stats": 0}, batch, None)
    mean, deviation = np.array([123.675, 116.28, 103.53]), np.array([58.395, 57.12, 57.375])
    images = np.where(
        batch["flip"][:, None, None, None], batch["image"][:, :, ::-1], batch["image"]
    )
    logits = ((images - mean) / deviation)[:, 0, :3, 0]
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    losses = -np.log(shares[np.arange(16), batch["label"]])
    weights = np.array([35 / (3 * n) for n in (20, 5, 10)])[batch["label"]]
    total, count = terms["cross_entropy"]
    np.testing.assert_allclose(total, np.sum(weights * losses), rtol=1e-4)
    hits, number = metrics["top_1_accuracy"]
    assert (float(hits), float(number), float(count)) == (
        *(float(np.sum(np.argmax(logits, 1) == batch["label"])), 16.0, 16.0),
    )


@pytest.mark.parametrize("missing", [1, 3])
def test_an_empty_class_is_refused_by_name(missing, unbalanced, tmp_path):
    config = make_tiny_config(unbalanced, class_weights="auto", num_label_classes=3 + missing)
    names = ", ".join(f"class {3 + i}" for i in range(missing))
    with pytest.raises(ConfigError, match=rf"{missing} \({names}\) of {3 + missing} classes"):
        train.train_and_evaluate(read_settings(config, str(tmp_path)))


def test_kept_statistics_and_class_weights_are_told(unbalanced, tmp_path):
    overrides = {"bn_statistics": "auto", "class_weights": "auto", "num_label_classes": 3}
    benchmark = benchmarks.load(make_tiny_config(unbalanced, **overrides), str(tmp_path))
    benchmark.open("train")
    statistics, weights = benchmark.run_notes(16, evaluating=True)
    assert statistics == "BatchNorm keeps the statistics of config.init_from"
    assert weights == "the loss weighs classes from 0.583 (n0) to 2.33 (n1)"


# --- A run with all of it.


def tuned(records, other, **overrides):
    keys = {"freeze": "stem, stage1", "class_weights": "auto", "bn_statistics": "frozen"}
    keys |= {"init_without": "head", "head_learning_rate": 5.0, "moving_average_decay": 0.9}
    return make_tiny_config(records, init_from=other, **{**SHORT, **keys, **overrides})


@pytest.mark.slow
def test_a_stopped_run_resumes_bit_for_bit(other, tiny_records, tmp_path, monkeypatch, caplog):
    """With patience, frozen parts, class weights, kept statistics, two rates and an average."""
    monkeypatch.setattr(ImageClassifier, "score", lambda self, rows: {"top_1_accuracy": 0.25})
    config = tuned(tiny_records, other, patience=2)
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    with caplog.at_level(logging.INFO, logger="tpu_suite"):
        scores = train.train_and_evaluate(read_settings(config, whole))
    assert any(line.startswith("frozen: ") for line in said(caplog))
    assert any("2 new (params/head/bias, params/head/kernel), 2 left" in x for x in said(caplog))
    (end,) = [line for line in said(caplog) if line.startswith("finished: step 6 of 8")]
    assert end.endswith("; stopped because 2 evaluations brought no better top 1 accuracy")

    with monkeypatch.context() as patch:
        stop_at_batch(patch, "train_batches", 4)
        with pytest.raises(preemption.Preempted):
            train.train_and_evaluate(read_settings(config, cut))
    monkeypatch.setattr(preemption, "_requested", None)
    assert train.train_and_evaluate(read_settings(config, cut)) == scores
    after = state_on_disk(whole, 6)
    assert_same_state(after, state_on_disk(cut, 6))
    assert timeless(rows(whole)) == timeless(rows(cut))
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="tpu_suite"):
        assert train.train_and_evaluate(read_settings(config, cut)) == scores
    assert any(line.startswith("already finished: step 6 of 8") for line in said(caplog))

    for name, value in state_on_disk(other, 2).items():
        if "['params']" in name or "['model_state']" in name:
            frozen = any(part in name for part in ("stem", "stage1", "model_state"))
            assert np.array_equal(after[name], value) == frozen, name
    assert not [name for name in after if "opt_state" in name and "stage1" in name]
    with pytest.raises(CheckpointError, match="holds another model than the config describes"):
        train.train_and_evaluate(read_settings(tuned(tiny_records, other, freeze="stem"), whole))


# --- Patience.


@pytest.mark.parametrize(
    ("scores", "stuck"),
    [
        ([0.1, 0.2, 0.3], []),
        ([0.3, 0.2, 0.3], [3]),
        ([0.3, 0.2, 0.4, 0.4, 0.1], [5]),
        ([np.nan, np.nan], [2]),
        ([np.nan, 0.1, np.nan, 0.1], [4]),
    ],
)
def test_patience_counts_evaluations_without_a_better_score(scores, stuck, tiny_records, tmp_path):
    from engine.report.writers import Reporter

    config = make_tiny_config(tiny_records, patience=2, steps_per_eval="1")
    run = open_run(config, tmp_path)
    reporter = Reporter(str(tmp_path))
    stopping = StoppingRule(run, plan_of(config, 90), reporter, True)
    stopped = []
    for step, score in enumerate(scores, 1):
        reporter.history.add({"split": "eval", "step": step, "top_1_accuracy": score})
        stopped += [step] * stopping.is_over(step)
    assert stopped == stuck


@pytest.mark.parametrize(
    ("evaluating", "every", "message"),
    [
        (False, "2", "config.patience=3 .*--mode=train"),
        (True, "", "config.steps_per_eval=''"),
        (True, "8", "config.steps_per_eval='8'"),
    ],
)
def test_patience_needs_evaluations(evaluating, every, message, tiny_records, tmp_path):
    config = make_tiny_config(tiny_records, **{**SHORT, "steps_per_eval": every}, patience=3)
    with pytest.raises(ConfigError, match=message):
        train.train_and_evaluate(read_settings(config, str(tmp_path)), evaluating)
