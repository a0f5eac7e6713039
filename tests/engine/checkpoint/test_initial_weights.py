"""config.init_from: a run begins with the weights of another model."""

import json
import logging
import pathlib

import jax
import numpy as np
import pytest

import train
from common.errors import CheckpointError
from engine.checkpoint import model_source
from engine.checkpoint.saver import first_state
from engine.plan import make_plan, read_settings
from engine.run import Run
from tests.conftest import make_tiny_config
from tests.test_train import fresh_signals, rows, state_on_disk  # noqa: F401 (a fixture)

SHORT = {"train_steps": "4", "steps_per_checkpoint": "2", "steps_per_eval": "4"}


@pytest.fixture(scope="module")
def other(tmp_path_factory, tiny_records):
    """The workdir of a model with 5 classes."""
    workdir = str(tmp_path_factory.mktemp("other"))
    config = make_tiny_config(tiny_records, **SHORT, num_label_classes=5)
    train.train_and_evaluate(read_settings(config, workdir))
    return workdir


def settings(records, workdir, source, **overrides):
    config = make_tiny_config(records, **{**SHORT, "init_from": source, **overrides})
    return read_settings(config, str(workdir))


def begun(job):
    """The state that a run begins with, and what it says of it."""
    run = Run.open(job)
    return first_state(run.programs, make_plan(job, run.benchmark, 90))[0]


@pytest.mark.long
def test_a_backbone_is_taken_and_the_head_is_new(other, tiny_records, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="tpu_suite"):
        state = begun(settings(tiny_records, tmp_path, other))
    saved = state_on_disk(other, 4)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        name = f"['model']['params']{jax.tree_util.keystr(path)}"
        if "head" in name:
            assert leaf.shape[-1] == 4
        else:
            np.testing.assert_array_equal(leaf, saved[name])
    name = "['model']['model_state']['batch_stats']['bn_stem']['mean']"
    np.testing.assert_array_equal(state.model_state["batch_stats"]["bn_stem"]["mean"], saved[name])
    assert all(not np.any(x) for x in jax.tree.leaves(state.opt_state) if x.ndim)
    assert "2 new (params/head/bias, params/head/kernel)" in caplog.text
    assert "2 left (params/head/bias, params/head/kernel)" in caplog.text
    listing = (tmp_path / "init_from.txt").read_text().splitlines()
    assert "new\tparams/head/kernel" in listing and "taken\tparams/conv_stem/kernel" in listing


def test_a_step_may_be_named(other):
    two, newest = (model_source.load(f"{other}{end}") for end in ("/checkpoints/2", "/"))
    assert two.source.endswith("checkpoints/2") and newest.source.endswith("checkpoints/4")
    assert not np.array_equal(two.params["head"]["kernel"], newest.params["head"]["kernel"])


@pytest.mark.long
def test_averaged_weights_are_taken_where_there_are_some(tiny_records, tmp_path):
    config = make_tiny_config(tiny_records, **SHORT, moving_average_decay=0.9)
    train.train_and_evaluate(read_settings(config, str(tmp_path)))
    weights = model_source.load(str(tmp_path))
    average = state_on_disk(str(tmp_path), 4)["['model']['ema']['params']['head']['bias']"]
    np.testing.assert_array_equal(weights.params["head"]["bias"], average)


@pytest.mark.long
def test_the_run_trains_on_and_its_manifest_says_so(other, tiny_records, tmp_path, caplog):
    """A resumed run does not read the other model again."""
    job = settings(tiny_records, tmp_path, other)
    train.train_and_evaluate(job)
    manifest = json.loads((tmp_path / "checkpoints/4/manifest/metadata").read_text())
    assert manifest["init_from"] == f"{other}/checkpoints/4"
    later = settings(tiny_records, tmp_path, "/gone", train_steps="6")
    caplog.clear()
    train.train_and_evaluate(later)
    assert max(row["step"] for row in rows(str(tmp_path))) == 6
    manifest = json.loads((tmp_path / "checkpoints/6/manifest/metadata").read_text())
    assert manifest["init_from"] == f"{other}/checkpoints/4"


def test_a_recipe_that_expects_weights_says_that_there_are_none(tiny_records, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="tpu_suite"):
        begun(settings(tiny_records, tmp_path / "a", "", init_env="MLP_GCS_RESNET_CHECKPOINT"))
        begun(settings(tiny_records, tmp_path / "b", ""))
    (note,) = [text for text in caplog.messages if "NOTE" in text]
    assert "begin at random" in note and "nor $MLP_GCS_RESNET_CHECKPOINT names" in note


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere", "there is no"),
        ("OTHER/checkpoints/3", "has the checkpoints [2, 4]"),
        ("EMPTY", "has no complete checkpoint"),
    ],
)
def test_what_is_no_checkpoint_is_refused(source, words, other, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    path = source.replace("OTHER", other).replace("EMPTY", str(tmp_path))
    with pytest.raises(CheckpointError, match=f"^config.init_from={path}: ") as refused:
        model_source.initial_weights(path, lambda file: None)
    assert words in str(refused.value)


@pytest.mark.long
def test_another_architecture_is_refused(other, tiny_records, tmp_path):
    with pytest.raises(CheckpointError, match="none of its .* arrays has the name and the shape"):
        begun(settings(tiny_records, tmp_path, other, num_filters=8))
    assert not (pathlib.Path(tmp_path) / "init_from.txt").exists()
