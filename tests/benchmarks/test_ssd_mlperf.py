"""SSD's MLPerf logs: what the official checkers say about them, and which recipes they refuse."""

import json
import time

import pytest
from mlperf_compliance import tags

from errors import UserError
from tests.engine.test_mlperf import complaints
from tests.mlperf_fixture import Clock, mlperf_config, write_run

COUNTS = {"num_train_images": 117_266, "num_eval_images": 5_000}


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    return clock


@pytest.mark.parametrize("recipe", ["1024", "4096", "v0.7-1024"])
def test_the_official_checkers_accept_the_log(recipe, tmp_path, clock):
    config = mlperf_config(f"mlperf_ssd:{recipe}", **COUNTS)
    write_run(config, str(tmp_path), [0.17, 0.231], clock)
    for ruleset in ("0.7.0", "1.0.0", "1.1.0"):
        assert complaints(tmp_path / "mlperf.log", ruleset) == []
    with open(tmp_path / "mlperf.log") as file:
        rows = [json.loads(line.removeprefix(":::MLLOG ")) for line in file]
    values = {row["key"]: row["value"] for row in rows}
    peak = {"1024": 0.08, "4096": 0.32, "v0.7-1024": 0.0992}[recipe]
    assert values["opt_base_learning_rate"] == pytest.approx(peak)
    assert [row["metadata"]["epoch_num"] for row in rows if row["key"] == "eval_accuracy"] == [
        40,
        50,
    ]


def test_v05(tmp_path, clock):
    config = mlperf_config("ssd", **COUNTS, num_classes=80, mlperf={"format": "v0.5"})
    write_run(config, str(tmp_path), [0.141, 0.181, 0.2121], clock)
    with open(tmp_path / "mlperf.log") as file:
        text = file.read()
    missing = {tag for tag in tags.SSD_TAGS if f" {tag}: " not in text and f" {tag}\n" not in text}
    # The loop evaluates the benchmark once per evaluation, which eval_accuracy says.
    assert missing == {"run_clear_caches", "eval_iteration_accuracy"}
    assert "num_default_boxes: 8732" in text and "feature_sizes: [38, 19, 10, 5, 3, 1]" in text
    assert "opt_learning_rate: 0.08\n" in text and 'run_stop: {"success": true}' in text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"max_samples": 7}, "config.max_samples=7: the closed division has 1 or 50"),
        ({"learning_rate_decay_epochs": (42.7, 53.3)}, "40 and 50 epochs"),
        ({"optimizer": "adam"}, "MLPerf's SSD has 'sgd' only"),
    ],
)
def test_what_the_rules_forbid(overrides, words, tmp_path, clock):
    config = mlperf_config("mlperf_ssd:1024", **{**COUNTS, **overrides})
    with pytest.raises(UserError, match=words):
        write_run(config, str(tmp_path), [], clock)
