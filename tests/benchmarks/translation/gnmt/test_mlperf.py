"""GNMT's MLPerf logs: what the official checkers say, and which values they refuse."""

import json
import types
from typing import Any

import pytest
from mlperf_compliance import tags

from benchmarks.translation.gnmt import mlperf
from configs.mlperf_gnmt import RECIPES
from errors import UserError
from tests.engine.test_mlperf import complaints
from tests.mlperf_fixture import mlperf_config, write_run

COUNTS = {"num_train_pairs": 3_442_299}


def lines(folder):
    with open(folder / "mlperf.log") as file:
        return file.read().splitlines()


# By recipe: the first halving, and the steps between two of them.
@pytest.mark.parametrize(
    ("recipe", "remain", "interval"),
    [("v0.7-2048", 4482, 560), ("v0.7-4096", 3300, 300), ("v0.7-8192", 2165, 241)],
)
def test_the_official_checker_accepts_the_log(recipe, remain, interval, tmp_path, clock):
    config = mlperf_config(f"mlperf_gnmt:{recipe}", **COUNTS)
    write_run(config, str(tmp_path), [0.199, 0.237, 0.2411], clock)
    assert complaints(tmp_path / "mlperf.log", "0.7.0") == []
    rows = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines(tmp_path)]
    values = {row["key"]: row["value"] for row in rows}
    assert values["submission_benchmark"] == "gnmt" and values["eval_samples"] == 3003
    assert values["global_batch_size"] == RECIPES[recipe].batch
    assert values["opt_base_learning_rate"] == RECIPES[recipe].rate
    assert values["opt_learning_rate_warmup_steps"] == RECIPES[recipe].warmup
    assert values["opt_learning_rate_remain_steps"] == remain
    assert values["opt_learning_rate_decay_interval"] == interval
    assert values["opt_learning_rate_decay_factor"] == 0.5
    assert values["opt_learning_rate_decay_steps"] == 4
    assert values["max_sequence_length"] == 48
    assert values["opt_learning_rate_alt_decay_func"] is True
    assert values["opt_learning_rate_alt_warmup_func"] is True
    scores = [(r["value"], r["metadata"]["epoch_num"]) for r in rows if r["key"] == "eval_accuracy"]
    assert scores == [(0.199, 1), (0.237, 2), (0.2411, 3)]


def test_v05(tmp_path, clock):
    config = mlperf_config("mlperf_gnmt:v0.5", **COUNTS, mlperf={"format": "v0.5"})
    write_run(config, str(tmp_path), [0.1877, 0.2248], clock)
    text = "\n".join(lines(tmp_path)) + "\n"
    used = {tag for tag in tags.GNMT_TAGS if f" {tag}: " in text or f" {tag}\n" in text}
    assert set(tags.GNMT_TAGS) - used == {"run_clear_caches"}
    assert ":::MLPv0.5.0 gnmt " in text and " eval_target: 21.8\n" in text
    assert 'eval_accuracy: {"epoch": 1, "value": 22.48}' in text
    assert " eval_size: 3003\n" in text and " opt_learning_rate: 0.002\n" in text
    assert 'run_stop: {"success": true}\n' in text
    assert "length_normalization_constant: 5.0\n" in text
    assert f"train_hp_max_sequence_length: {config.bucket_lengths[-1]}\n" in text
    assert config.bucket_lengths[-2] != config.bucket_lengths[-1] != config.max_length


@pytest.mark.parametrize(
    ("drops", "factor", "is_allowed"),
    [
        ("3000, 3300, 3600, 3900", 0.5, True),
        ("3000, 3300, 3601, 3901", 0.5, True),  # rounded to whole steps
        ("3000, 3300, 3602, 3902", 0.5, False),
        ("3000, 3300, 3600", 0.5, False),
        ("3000, 3300, 3600, 3900, 4200", 0.5, False),
        ("3000, 3300, 3600, 3900", 0.4, False),
    ],
)
def test_the_rate_is_halved_four_times(drops, factor, is_allowed):
    recipe = {"learning_rate_decay_steps": drops, "learning_rate_decay_factors": (factor,)}
    recipe |= {"learning_rate_schedule": "step", "learning_rate_decay_epochs": ()}
    run: Any = types.SimpleNamespace(recipe=recipe, steps=5000)
    assert (mlperf._misplaced(run) == "") == is_allowed


def test_two_drops_have_a_distance():
    """In epochs of a run of 5,000 steps over 8 epochs, 625 steps each."""
    recipe = {"learning_rate_schedule": "step", "learning_rate_decay_epochs": (6, 7.5)}
    recipe |= {"learning_rate_decay_steps": "", "schedule_epochs": 8}
    run: Any = types.SimpleNamespace(recipe=recipe, steps=5000)
    assert mlperf._drops(run) == [3750, 4688]
    recipe["learning_rate_decay_epochs"] = (6,)
    with pytest.raises(UserError, match=r"at the steps \[3750\]: .* and so two or more"):
        mlperf._drops(run)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"beam_size": 4}, "config.beam_size=4: the closed division has 5 "),
        ({"adam_beta2": 0.99}, "config.adam_beta2=0.99: the closed division has 0.999"),
        ({"width": 512}, "config.width=512: the closed division has 1024"),
        ({"warmup_shape": "linear"}, "config.warmup_shape='linear' and warmup_from=0.0: the"),
        ({"vocabulary_size": 0}, "config.vocabulary_size=0: a log of MLPerf states"),
        ({"optimizer": "sgd"}, "MLPerf's GNMT has 'adam'"),
        ({"target": 0.2}, "config.target=0.2: the BLEU of MLPerf's gnmt is 0.24"),
        ({"learning_rate_schedule": "cosine"}, "MLPerf's log of GNMT wants 'step'"),
        (
            {"learning_rate_decay_steps": "2 epochs, 3 epochs"},
            "GNMT wants 'step' and the drops as steps",
        ),
        ({"learning_rate_decay_steps": "4000"}, "wants their distance, and so two or more"),
        ({"learning_rate_decay_steps": "30, 40, 50, 70"}, "the closed division halves"),
        ({"learning_rate_decay_epochs": (8, 9, 10)}, "the closed division halves"),
        ({"learning_rate_decay_factors": (0.4,)}, "the closed division halves"),
    ],
)
def test_what_the_rules_forbid(overrides, words, tmp_path, clock):
    config = mlperf_config("mlperf_gnmt:v0.7-2048", **{**COUNTS, **overrides})
    with pytest.raises(UserError) as caught:
        write_run(config, str(tmp_path), [], clock)
    assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_the_open_division_may_have_other_values(tmp_path, clock):
    other = {"beam_size": 4, "learning_rate_decay_steps": "30, 40, 60"}
    chosen = {"mlperf": {"division": "open"}}
    config = mlperf_config("mlperf_gnmt:v0.7-2048", **COUNTS, **other, **chosen)
    write_run(config, str(tmp_path), [0.2411], clock)
    assert complaints(tmp_path / "mlperf.log", "0.7.0") == []
