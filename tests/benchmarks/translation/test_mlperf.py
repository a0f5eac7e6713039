"""The translators' MLPerf logs: what the official checkers say, and which values they refuse."""

import types
from typing import Any

import pytest
from mlperf_compliance import tags

from benchmarks.translation.gnmt import mlperf
from common.errors import UserError
from configs import gnmt, mlperf_gnmt, mlperf_transformer, transformer
from engine.mlperf import declare_examples
from engine.plan import read_settings
from tests.benchmarks.translation import bpe_fixture, sentences_fixture
from tests.engine.test_mlperf import complaints, rows
from tests.helpers.mlperf_fixture import mlperf_config, write_run

ROWS = {"num_train_rows": 566_340, "num_eval_sentences": 3_003, "vocabulary_size": 33_708}
PAIRS = {"num_train_pairs": 3_442_299}
GNMT, TRANSFORMER = ("mlperf_gnmt:v0.7-2048", PAIRS), ("transformer", ROWS)


def checked(folder, config, clock):
    """The values by key in a log that the official checker accepts."""
    write_run(config, str(folder), [0.199, 0.237, 0.2511], clock)
    assert complaints(folder / "mlperf.log", "0.7.0") == []
    logged = rows(folder / "mlperf.log")
    evals = [row for row in logged if row["key"] == "eval_accuracy"]
    scores = [(row["value"], row["metadata"]["epoch_num"]) for row in evals]
    assert scores == [(0.199, 1), (0.237, 2), (0.2511, 3)]
    return {row["key"]: row["value"] for row in logged}


@pytest.mark.parametrize("recipe", ["v0.7-512", "v0.6-2048"])
def test_the_checker_accepts_the_log_of_the_transformer(recipe, tmp_path, clock):
    values = checked(tmp_path, mlperf_config(f"mlperf_transformer:{recipe}", **ROWS), clock)
    _, base, warmup, betas, _ = mlperf_transformer.RECIPES[recipe]
    assert values["opt_base_learning_rate"] == pytest.approx(base)
    assert values["opt_learning_rate_warmup_steps"] == warmup
    assert (values["opt_adam_beta_1"], values["opt_adam_beta_2"]) == betas


# By recipe: the first halving, and the steps between two of them.
@pytest.mark.parametrize(
    ("recipe", "remain", "interval"),
    [("v0.7-2048", 4482, 560), ("v0.7-4096", 3300, 300), ("v0.7-8192", 2165, 241)],
)
def test_the_checker_accepts_the_log_of_gnmt(recipe, remain, interval, tmp_path, clock):
    values = checked(tmp_path, mlperf_config(f"mlperf_gnmt:{recipe}", **PAIRS), clock)
    facts = mlperf_gnmt.RECIPES[recipe]
    expected = {
        **{"submission_benchmark": "gnmt", "eval_samples": 3003, "max_sequence_length": 48},
        **{"global_batch_size": facts.batch, "opt_base_learning_rate": facts.rate},
        "opt_learning_rate_warmup_steps": facts.warmup,
        "opt_learning_rate_remain_steps": remain,
        "opt_learning_rate_decay_interval": interval,
        **{"opt_learning_rate_decay_factor": 0.5, "opt_learning_rate_decay_steps": 4},
        "opt_learning_rate_alt_decay_func": True,
        "opt_learning_rate_alt_warmup_func": True,
    }
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("recipe", "counts", "known", "lines"),
    [
        (
            *("mlperf_gnmt:v0.5", PAIRS, tags.GNMT_TAGS),
            [
                *(" eval_target: 21.8", 'eval_accuracy: {"epoch": 1, "value": 25.11}'),
                *(" eval_size: 3003", " opt_learning_rate: 0.002", 'run_stop: {"success": true}'),
                "length_normalization_constant: 5.0",
            ],
        ),
        (
            *(*TRANSFORMER, tags.TRANSFORMER_TAGS),
            [
                *("eval_target: 25.0", 'eval_accuracy: {"epoch": 1, "value": 25.11}'),
                *("preproc_vocab_size: 33708", "opt_learning_rate: 1.875"),
                *("input_batch_size: 131072", "initializer_gain: 1.0"),
            ],
        ),
    ],
)
def test_v05(recipe, counts, known, lines, tmp_path, clock):
    config = mlperf_config(recipe, **counts, mlperf={"format": "v0.5"})
    write_run(config, str(tmp_path), [0.199, 0.2511], clock)
    text = (tmp_path / "mlperf.log").read_text()
    used = {tag for tag in known if f" {tag}: " in text or f" {tag}\n" in text}
    assert set(known) - used == {"run_clear_caches"}
    assert f":::MLPv0.5.0 {config.benchmark} " in text
    assert (" eval_size: " in text) == (config.benchmark == "gnmt")
    if config.benchmark == "gnmt":
        lines = [*lines, f"train_hp_max_sequence_length: {config.bucket_lengths[-1]}"]
        assert config.bucket_lengths[-2] != config.bucket_lengths[-1] != config.max_length
    assert [line for line in lines if f"{line}\n" not in text] == []


def test_two_drops_have_a_distance():
    """In epochs of a run of 5,000 steps over 8 epochs, 625 steps each."""
    recipe = {"learning_rate_schedule": "step", "learning_rate_decay_epochs": (6, 7.5)}
    recipe |= {"learning_rate_decay_steps": "", "schedule_epochs": 8}
    run: Any = types.SimpleNamespace(recipe=recipe, steps=5000)
    assert mlperf._drops(run) == [3750, 4688]
    recipe["learning_rate_decay_epochs"] = (6,)
    with pytest.raises(UserError, match=r"at the steps \[3750\]: .* two or more"):
        mlperf._drops(run)


@pytest.mark.parametrize(
    ("recipe", "overrides", "words"),
    [
        (GNMT, {"optimizer": "sgd"}, "MLPerf's GNMT has 'adam'"),
        (GNMT, {"target": 0.2}, "config.target=0.2: the BLEU of MLPerf's gnmt is 0.24"),
        (GNMT, {"learning_rate_schedule": "cosine"}, "MLPerf's log of GNMT wants 'step'"),
        (GNMT, {"learning_rate_decay_steps": "2 epochs, 3 epochs"}, "and the drops as steps"),
        (GNMT, {"learning_rate_decay_steps": "4000"}, "needs their distance: give two or more"),
        (TRANSFORMER, {"adam_epsilon": 1e-8}, "'opt_adam_epsilon' failed: opt_adam_epsilon=1e-08"),
        (TRANSFORMER, {"optimizer": "sgd"}, "MLPerf's Transformer has 'adam'"),
        (TRANSFORMER, {"target": 0.2}, "config.target=0.2: the BLEU of MLPerf's transformer"),
    ],
)
def test_what_the_rules_forbid(recipe, overrides, words, tmp_path, clock):
    name, counts = recipe
    config = mlperf_config(name, **{**counts, **overrides})
    with pytest.raises(UserError) as caught:
        write_run(config, str(tmp_path), [], clock)
    assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("recipe", "folder", "key", "entries"),
    [
        (gnmt, bpe_fixture, "num_train_pairs", 13),
        (transformer, sentences_fixture, "num_train_rows", 27),
    ],
)
def test_the_counts_follow_from_the_files_before_the_clock(recipe, folder, key, entries, tmp_path):
    """The data are forgotten: the run opens them again when its clock runs."""
    (data := tmp_path / "data").mkdir()
    folder.make(data)
    config = recipe.get_config()
    sizes = {"train_batch_size": 8, "eval_batch_size": 8, "data_dir": str(data)}
    sizes |= {"row_length": 12} if "row_length" in config else {}
    config.update({**sizes, "mlperf": {"format": "mllog", "org": "nobody"}})
    settings = read_settings(config.lock(), str(tmp_path / "run"))
    declared = declare_examples(settings, evaluating=True)
    counted = {key: 90, "num_eval_sentences": 23, "vocabulary_size": entries}
    assert {name: declared.config[name] for name in counted} == counted
    assert declared.load_benchmark("/nowhere").declared_examples("train") == 90
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        *("data_index", "hosts", "run.lock")
    ]
