"""Training images of several sizes, evaluation at another size."""

import itertools
import shutil
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import benchmarks
import train
from benchmarks.resnet import settings
from commands import preflight
from common.errors import ConfigError
from common.keys import read_config
from engine.forecast import estimates
from engine.plan import read_settings
from tests.benchmarks.resnet import networks
from tests.benchmarks.resnet.test_resnet import drawn
from tests.conftest import make_tiny_config, opened
from tests.engine.forecast.test_estimates import TRAIN, V3
from tests.test_train import assert_same_state, state_on_disk

STAGES = ((0.0, 8), (0.4, 16), (0.8, 12))
SIDES = [8] * 5 + [16] * 5 + [12] * 2  # of 12 steps: 4.8 and 9.6 are rounded


def load(folder: str, **overrides: Any) -> Any:
    benchmark = benchmarks.load(make_tiny_config(folder, **overrides).lock(), "")
    benchmark.set_total_steps(12)
    return benchmark


def batches(folder: str, **keys: Any) -> list[dict[str, Any]]:
    """Those of all 12 steps."""
    stream = opened(load(folder, **keys), "train").train_batches(16, 0, 1, 0)
    return [
        {k: v for k, v in batch.items() if k != "host_seconds"}
        for batch in itertools.islice(stream, 12)
    ]


def test_the_plan_comes_first():
    config = make_tiny_config("", image_sizes=STAGES)
    benchmark: Any = benchmarks.load(config.lock(), "")
    with pytest.raises(RuntimeError, match="its length must be planned first"):
        _ = benchmark.sizes
    plain: Any = benchmarks.load(make_tiny_config("").lock(), "")
    assert plain.sizes is None and plain.stages() == ()
    benchmark.set_total_steps(12)
    assert [(stage.name, stage.steps) for stage in benchmark.stages()] == [
        *(("8 pixels", 5), ("16 pixels", 5), ("12 pixels", 2))
    ]


def test_bytes_that_a_host_holds(monkeypatch):
    def held(split: str, **keys: Any) -> Any:
        benchmark = load("", **keys)
        monkeypatch.setattr(benchmark, "num_examples", {"train": 90}.__getitem__)
        monkeypatch.setattr(benchmark, "held_bytes", lambda num_shards: 1000 // num_shards)
        return benchmark.host_bytes(split, 24, 3)

    batches, records = 8 * 24 * 16 * 16 * 3 // 3, {("shuffle_buffer_size",): 333}
    assert held("eval") == {("eval_batch_size", "image_size"): batches}
    sized = {("eval_batch_size", "eval_image_size"): 8 * 8 * 20 * 20 * 3}
    assert held("eval", eval_image_size=20) == sized
    assert held("train") == {("train_batch_size", "image_size"): batches} | records
    key = ("train_batch_size", "image_sizes")
    assert held("train", image_sizes=STAGES) == {key: batches} | records


def test_sizes_that_cannot_work():
    def read(**keys: Any) -> settings.Settings:
        counts = {"num_train_images": 1, "num_eval_images": 1}
        return read_config(settings.Settings, make_tiny_config("", **counts, **keys))

    assert read() and read(space_to_depth=True) and read(dataset="fake")
    odd = {"image_sizes": ((0, 8), (0.5, 17)), "image_size": 18, "eval_image_size": 15}
    even = "must be even for space_to_depth"
    message = rf"config\.eval_image_size=15: {even}; config\.image_sizes=.*17\)\): {even}$"
    with pytest.raises(ConfigError, match=message):
        read(space_to_depth=True, **odd)


def test_a_group_refuses_its_values_alone():
    with pytest.raises(ConfigError, match=r"^config\.resnet_depth=51: use one of 10, 18, "):
        networks.keys(resnet_depth=51)
    with pytest.raises(ConfigError, match="^config.augmentation='flip': use 'light', "):
        settings.Regularisation(augmentation="flip")
    with pytest.raises(ConfigError, match="^config.preprocessing='slow': use .*; config.image_s"):
        keys: Any = {"crop_area_min": 0.1, "random_flip": True, "image_sizes": [(0.5, 8)]}
        settings.Preprocessing(image_size=8, preprocessing="slow", **keys)


def assert_equal(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_batch_is_that_of_a_run_of_its_size(tiny_records, mode):
    staged = batches(tiny_records, image_sizes=STAGES, preprocessing=mode)
    assert [batch["image"].shape[1:] for batch in staged] == [(s, s, 3) for s in SIDES]
    for side in (8, 12, 16):
        plain = batches(tiny_records, image_size=side, preprocessing=mode)
        for step in np.flatnonzero(np.equal(SIDES, side)):
            assert_equal(staged[step], plain[step])


@pytest.mark.long
def test_a_run_resumes_bit_for_bit_across_a_change_of_size(tiny_records, tmp_path, caplog):
    """From step 3, while images have 8 pixels; after step 6 they have 16."""
    caplog.set_level("INFO", "tpu_suite")

    def run(workdir: Path) -> dict[str, Any]:
        keys = {"image_sizes": ((0.0, 8), (0.5, 16)), "keep_checkpoints": 9}
        settings = read_settings(make_tiny_config(tiny_records, **keys), str(workdir))
        train.train_and_evaluate(settings, evaluating=False)
        return state_on_disk(str(workdir), 12)

    expected = run(tmp_path / "whole")
    workdir = shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for step in (6, 9, 12):
        shutil.rmtree(workdir / "checkpoints" / str(step))
    assert_same_state(run(workdir), expected)
    assert "resuming at step 3 from" in caplog.text
    assert "training images have 8 pixels, 16 from step 7" in caplog.text


def test_evaluation_has_its_own_size_and_mean_of_mirror_images(tiny_records):
    keys = {"image_size": 16, "precision": "float32"}
    plain = opened(load(tiny_records, **keys))
    other = opened(load(tiny_records, eval_image_size=24, **keys))
    both = opened(load(tiny_records, eval_image_size=24, eval_flip=True, **keys))
    assert plain.input_spec.size == 16 and other.input_spec.size == 24
    assert other.metadata["input_spec"]["size"] == 24
    assert other.batch_spec("eval", 8)[0]["image"].shape == (8, 24, 24, 3)
    assert other.batch_spec("train", 8)[0]["image"].shape == (8, 16, 16, 3)
    batch = next(other.eval_batches(8, 0, 1))
    alone = opened(load(tiny_records, image_size=24, precision="float32"))
    np.testing.assert_array_equal(batch["image"], next(alone.eval_batches(8, 0, 1))["image"])
    weights, images = drawn(other), batch["image"]
    classify = jax.jit(other.classify)
    one, mirrored = (classify(*weights, x) for x in (images, images[:, :, ::-1]))
    got = jax.jit(both.classify)(*weights, images)
    for name in ("logits", "features"):
        mean = (np.asarray(one[name], float) + np.asarray(mirrored[name], float)) / 2
        assert np.abs(one[name] - mirrored[name]).max() > 0.01
        np.testing.assert_allclose(got[name], mean, rtol=1e-4, atol=1e-5)
    exported = both.uses.portable(*jax.tree.map(np.asarray, weights))
    assert exported.spec.size == 24
    np.testing.assert_allclose(exported.logits(images), one["logits"], rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_preflight_forecasts_each_stage(monkeypatch):
    monkeypatch.setattr(preflight, "compile_program", lambda *_: TRAIN)
    slice_ = types.SimpleNamespace(devices=jax.devices())
    monkeypatch.setattr(preflight.topologies, "get_topology_desc", lambda *_, **__: slice_)
    config = make_tiny_config("", image_sizes=STAGES, num_train_images=90, num_eval_images=23)
    outcome = preflight.compiled(read_settings(config), V3, ("train", "predict"), print)
    assert outcome.error == "" and outcome.job
    assert [(s.name, s.steps) for s in outcome.stages] == [
        *(("8 pixels", 5), ("16 pixels", 5)),
        ("12 pixels", 2),
    ]
    flops = outcome.job.forward_flops
    alone = []
    for side in (8, 16, 12):
        config = make_tiny_config("", image_size=side, num_train_images=90, num_eval_images=23)
        alone.append(preflight._forward_flops(benchmarks.load(config, "")))
    assert flops == pytest.approx((5 * alone[0] + 5 * alone[1] + 2 * alone[2]) / 12, abs=1)
    row = estimates.row(outcome)
    assert len(row["stages"]) == len(row["input"]["stages"]) == 3
    small, large, _ = (stage["prepared"] for stage in row["input"]["stages"])
    assert small["exact"] > large["exact"] and small["fast"] > small["exact"]
