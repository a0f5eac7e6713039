"""SSD's MLPerf logs: what the official checkers say, and which recipes are refused."""

from typing import Any

import numpy as np
import pytest
from mlperf_compliance import tags

from common.errors import UserError
from configs import mlperf_ssd, ssd
from engine.cadence import Every
from tests.conftest import plan_of
from tests.engine.test_mlperf import complaints, rows
from tests.helpers.mlperf_fixture import mlperf_config, write_run

COUNTS = {"num_train_images": 117_266, "num_eval_images": 5_000}


@pytest.mark.parametrize("recipe", ["1024", "4096", "v0.7-1024"])
def test_the_official_checkers_accept_the_log(recipe, tmp_path, clock):
    config = mlperf_config(f"mlperf_ssd:{recipe}", **COUNTS)
    write_run(config, str(tmp_path), [0.17, 0.231], clock)
    for ruleset in ("0.7.0", "1.0.0", "1.1.0"):
        assert complaints(tmp_path / "mlperf.log", ruleset) == []
    logged = rows(tmp_path / "mlperf.log")
    values = {row["key"]: row["value"] for row in logged}
    peak = {"1024": 0.08, "4096": 0.32, "v0.7-1024": 0.0992}[recipe]
    assert values["opt_base_learning_rate"] == pytest.approx(peak)
    assert [row["metadata"]["epoch_num"] for row in logged if row["key"] == "eval_accuracy"] == [
        40,
        50,
    ]


def test_v05(tmp_path, clock):
    config = mlperf_config("ssd", **COUNTS, num_classes=80, mlperf={"format": "v0.5"})
    write_run(config, str(tmp_path), [0.141, 0.181, 0.2121], clock)
    text = (tmp_path / "mlperf.log").read_text()
    missing = {tag for tag in tags.SSD_TAGS if f" {tag}: " not in text and f" {tag}\n" not in text}
    # The loop evaluates the benchmark once per evaluation, which eval_accuracy says.
    assert missing == {"run_clear_caches", "eval_iteration_accuracy"}
    assert "num_default_boxes: 8732" in text and "feature_sizes: [38, 19, 10, 5, 3, 1]" in text
    assert "opt_learning_rate: 0.08\n" in text and 'run_stop: {"success": true}' in text


def test_the_recipe_of_2018_has_googles_schedule():
    """Base 2.5e-3 per 32 images; warm-up of 3, drops at 160k and 200k steps of 32 images."""
    rate: Any = plan_of(ssd.get_config().lock(), 117_266).learning_rate
    assert rate.warmup_steps == 352  # 360,000 images
    steps = np.array([0, 176, 352, 4_999, 5_000, 6_249, 6_250, 7_499])  # 5,120,000 and 6,400,000
    expected = [0, 0.04, 0.08, 0.08, 0.008, 0.008, 0.0008, 0.0008]
    np.testing.assert_allclose(rate(steps), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "warmup", "peak", "drops", "last"),
    [  # the drops in images
        ("1024", 300, 0.08, (40 * 117_266, 50 * 117_266), 80),
        ("1536", 200, 0.12, (44 * 117_266, 55 * 117_266), 80),
        ("2048", 1489, 0.29248, (60 * 117_266, 75 * 117_266), 80),
        ("4096", 1145, 0.32, (80 * 117_266, 100 * 117_266), 105),
        ("v0.6", 585, 0.096, (42.6667 * 120_000, 53.3333 * 120_000), 80),
        ("v0.7-4096", 750, 0.1536, (64 * 117_266, 80 * 117_266), 95),
    ],
)
def test_every_drop_of_a_recipe_happens(name, warmup, peak, drops, last):
    config: Any = mlperf_ssd.get_config(name)
    plan = plan_of(config.lock(), 117_266)
    size = config.train_batch_size
    assert plan.total_steps == round(last * 117_266 / size)
    for factor, images in zip((0.1, 0.01), drops, strict=True):
        before, after = plan.learning_rate(np.array([images // size - 2, images // size + 2]))
        assert [before, after] == pytest.approx([10 * factor * peak, factor * peak], rel=1e-5)
    assert plan.learning_rate(np.int32(warmup)) == pytest.approx(peak, rel=1e-5)
    assert drops[1] // size + 2 < plan.total_steps
    saves = Every.parse(
        config.steps_per_checkpoint, batch_size=size, num_examples=117_266, name="s"
    )
    assert saves.next_after(0) == round(5 * 117_266 / size)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"max_samples": 7}, "'max_samples' failed: max_samples=7 failed test: v"),
        ({"learning_rate_decay_epochs": (42.7, 53.3)}, "'opt_learning_rate_decay_boundary_epochs'"),
        ({"optimizer": "adam"}, "MLPerf's SSD has 'sgd' only"),
    ],
)
def test_what_the_rules_forbid(overrides, words, tmp_path, clock):
    config = mlperf_config("mlperf_ssd:1024", **{**COUNTS, **overrides})
    with pytest.raises(UserError) as caught:
        write_run(config, str(tmp_path), [], clock)
    assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1
