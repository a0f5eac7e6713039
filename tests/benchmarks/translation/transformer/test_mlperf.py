"""The Transformer's MLPerf logs: what the official checkers say, and which values they refuse."""

import json

import pytest
from mlperf_compliance import tags

from configs.mlperf_transformer import RECIPES
from errors import UserError
from tests.engine.test_mlperf import complaints
from tests.mlperf_fixture import mlperf_config, write_run

COUNTS = {"num_train_rows": 566_340, "num_eval_sentences": 3_003, "vocabulary_size": 33_708}


def lines(folder):
    with open(folder / "mlperf.log") as file:
        return file.read().splitlines()


@pytest.mark.parametrize("recipe", ["v0.7-512", "v0.6-2048"])
def test_the_official_checker_accepts_the_log(recipe, tmp_path, clock):
    config = mlperf_config(f"mlperf_transformer:{recipe}", **COUNTS)
    write_run(config, str(tmp_path), [0.199, 0.237, 0.2511], clock)
    assert complaints(tmp_path / "mlperf.log", "0.7.0") == []
    rows = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines(tmp_path)]
    values = {row["key"]: row["value"] for row in rows}
    _, base, warmup, betas, _ = RECIPES[recipe]
    assert values["opt_base_learning_rate"] == pytest.approx(base)
    assert values["opt_learning_rate_warmup_steps"] == warmup
    assert (values["opt_adam_beta_1"], values["opt_adam_beta_2"]) == betas
    scores = [(r["value"], r["metadata"]["epoch_num"]) for r in rows if r["key"] == "eval_accuracy"]
    assert scores == [(0.199, 1), (0.237, 2), (0.2511, 3)]


def test_v05(tmp_path, clock):
    config = mlperf_config("transformer", **COUNTS, mlperf={"format": "v0.5"})
    write_run(config, str(tmp_path), [0.199, 0.2511], clock)
    text = "\n".join(lines(tmp_path)) + "\n"
    used = {tag for tag in tags.TRANSFORMER_TAGS if f" {tag}: " in text or f" {tag}\n" in text}
    assert set(tags.TRANSFORMER_TAGS) - used == {"run_clear_caches"}
    assert " eval_size: " not in text
    assert "eval_target: 25.0\n" in text and 'eval_accuracy: {"epoch": 1, "value": 25.11}' in text
    assert "preproc_vocab_size: 33708\n" in text and "opt_learning_rate: 1.875\n" in text
    tokens = config.train_batch_size * config.row_length
    assert f"input_batch_size: {tokens}\n" in text and "initializer_gain: 1.0\n" in text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"beam_size": 5}, "config.beam_size=5: the closed division has 4"),
        ({"adam_epsilon": 1e-8}, "config.adam_epsilon=1e-08: the closed division has 1e-09"),
        ({"width": 512}, "config.width=512: the closed division has 1024"),
        ({"vocabulary_size": 0}, "config.vocabulary_size=0: a log of MLPerf states"),
        ({"optimizer": "sgd"}, "MLPerf's Transformer has 'adam'"),
        ({"target": 0.2}, "config.target=0.2: the BLEU of MLPerf's transformer is 0.25"),
    ],
)
def test_what_the_rules_forbid(overrides, words, tmp_path, clock):
    config = mlperf_config("transformer", **{**COUNTS, **overrides})
    with pytest.raises(UserError, match=words):
        write_run(config, str(tmp_path), [], clock)
