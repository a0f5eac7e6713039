"""GNMT in MLPerf: its rules, its data, and what the logs say about a run.

Keys of 'mllog' come from mlperf-logging's ruleset 0.7.0, the last one that knows this benchmark.
Keys of 'v0.5' are the tags of mlperf_compliance 0.0.10.
"""

from typing import Any

from benchmarks.mlperf import Entry, Facts, Run, adam_tags, check_optimizer, drop_steps
from benchmarks.translation.evaluation import logged_bleu
from benchmarks.translation.gnmt import WMT
from common.errors import ConfigError

ENTRY = Entry(
    name="gnmt",
    recipe="configs/mlperf_gnmt.py:v0.7-2048",
    targets={"mllog": {"BLEU": 0.24}, "v0.5": {"BLEU": 0.218}},
    # The number of pairs depends on the rule for their length.
    declares={"num_train_pairs": 0, "num_eval_sentences": WMT["eval"], "vocabulary_size": 0},
    variable="MLP_PATH_GCS_NMT",
    meaning="the folder of train.tok.clean.bpe.32000.*, newstest2014.* and vocab.bpe.32000.*",
    files=(
        ("train.tok.clean.bpe.32000.*", "*packed-train*"),
        ("newstest2014.tok.bpe.32000.*", "*-dev*"),
        ("vocab.*",),
    ),
    runs=10,
    ruleset="0.7.0",
    evaluation=logged_bleu,
    success_is_bool=True,
)


def facts(run: Run) -> Facts:
    """What the log of a run says about GNMT; ConfigError if the run breaks MLPerf's rules."""
    check_optimizer(run, "GNMT", "adam")
    values = _tags(run) if run.form == "v0.5" else _keys(run)
    return Facts(values, {"max_sequence_length": {"method": "discard"}})  # of longer sentences


def _drops(run: Run) -> list[int]:
    """The steps at which the learning rate drops; ConfigError if there are fewer than two."""
    recipe = run.recipe
    if recipe["learning_rate_decay_steps"] or recipe["learning_rate_schedule"] != "step":
        drops = drop_steps(run, "GNMT")
    else:
        epochs = recipe["learning_rate_decay_epochs"]
        drops = [round(run.steps * epoch / recipe["schedule_epochs"]) for epoch in epochs]
    if len(drops) < 2:
        raise ConfigError(
            f"drops of the learning rate at the steps {drops}: MLPerf's log of GNMT needs their "
            "distance: give two or more; see config.learning_rate_decay_epochs"
        )
    return drops


def _keys(run: Run) -> dict[str, Any]:
    """The hyperparameters of 'mllog'."""
    recipe, drops = run.recipe, _drops(run)
    return {
        "opt_name": "adam",
        "opt_base_learning_rate": run.learning_rate.peak,
        "opt_learning_rate_alt_warmup_func": True,  # exponential
        "opt_learning_rate_warmup_steps": round(run.learning_rate.warmup_steps),
        "opt_learning_rate_alt_decay_func": True,  # halvings
        "opt_learning_rate_remain_steps": drops[0],
        "opt_learning_rate_decay_interval": drops[1] - drops[0],
        "opt_learning_rate_decay_factor": recipe["learning_rate_decay_factors"][0],
        "opt_learning_rate_decay_steps": len(drops),
        "max_sequence_length": recipe["bucket_lengths"][-1],
    }


def _tags(run: Run) -> dict[str, Any]:
    """The hyperparameters of 'v0.5', in the order of its tags."""
    recipe, pairs = run.recipe, run.examples["train"]
    return {
        "run_set_random_seed": recipe["seed"],
        "preproc_vocab_size": dict.fromkeys(("src", "tgt"), recipe["vocabulary_size"]),
        "preproc_tokenize_training": None,
        "preproc_tokenize_eval": None,
        "preproc_num_train_examples": pairs,
        "preproc_num_eval_examples": run.examples["eval"],
        "input_size": pairs,
        "input_batch_size": recipe["train_batch_size"],
        "input_order": None,
        "input_shard": pairs,  # all pairs are shuffled together
        "opt_name": "adam",
        "opt_learning_rate": run.learning_rate.peak,
        "opt_learning_rate_warmup_steps": round(run.learning_rate.warmup_steps),
        **adam_tags(run),
        "train_checkpoint": None,
        "train_hp_max_sequence_length": recipe["bucket_lengths"][-1],
        "eval_target": 100 * recipe["target"],
        "eval_hp_beam_size": recipe["beam_size"],
        "eval_hp_max_sequence_length": recipe["max_length"],
        "eval_hp_length_normalization_constant": 5.0,
        "eval_hp_length_normalization_factor": recipe["length_penalty"],
        "eval_hp_coverage_penalty_factor": recipe["coverage_penalty"],
        "model_hp_loss_fn": "Cross Entropy with label smoothing",
        "model_hp_loss_smoothing": recipe["label_smoothing"],
        "model_hp_num_layers": {
            "encoder": recipe["num_encoder_layers"],
            "decoder": recipe["num_decoder_layers"],
        },
        "model_hp_hidden_size": recipe["width"],
        "model_hp_dropout": recipe["dropout"],
    }
