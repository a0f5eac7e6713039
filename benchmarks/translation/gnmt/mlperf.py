"""GNMT in MLPerf: its rules, its data, and what the logs say about a run.

Keys of 'mllog' are those of mlperf-logging's ruleset 0.7.0, the last one that knows this benchmark.
Keys of 'v0.5' are the tags of mlperf_compliance 0.0.10.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.mlperf import Entry, Facts, Run, only_score, row
from errors import ConfigError

SENTENCES = 3_003  # of newstest2014
_VOCABULARY = 32_316  # entries with Google's file: PAD, EOS, unknown words, and 32,313 pieces
_RULES = {
    "width": 1024,
    "num_encoder_layers": 4,
    "num_decoder_layers": 4,
    "dropout": 0.2,
    "label_smoothing": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "beam_size": 5,
    "length_penalty": 0.6,
    "coverage_penalty": 0.1,
}


def _evaluation(scores: Mapping[str, float], form: str) -> Any:
    """BLEU as the log has it: a fraction, and per cent in 'v0.5'."""
    return only_score(scores, form) * (100 if form == "v0.5" else 1)


ENTRY = Entry(
    name="gnmt",
    recipe="configs/mlperf_gnmt.py:v0.7-2048",
    targets={"mllog": {"BLEU": 0.24}, "v0.5": {"BLEU": 0.218}},
    # The number of pairs depends on the rule for their length: a person has to give it.
    declares={
        "num_train_pairs": 0,
        "num_eval_sentences": SENTENCES,
        "vocabulary_size": _VOCABULARY,
    },
    counts={
        "mllog": {"eval_samples": SENTENCES},
        "v0.5": {"preproc_num_eval_examples": SENTENCES, "eval_size": SENTENCES},
    },
    variable="MLP_PATH_GCS_NMT",
    meaning="the folder of train.tok.clean.bpe.32000.*, newstest2014.* and vocab.bpe.32000.*",
    files=(
        ("train.tok.clean.bpe.32000.*", "*packed-train*"),
        ("newstest2014.tok.bpe.32000.*", "*-dev*"),
        ("vocab.*",),
    ),
    runs=10,
    period=1,
    ruleset="0.7.0",
    evaluation=_evaluation,
    success_is_bool=True,
)


def facts(run: Run) -> Facts:
    """What the log of a run says about GNMT.

    Raises:
      ConfigError: the rules of the form or of the closed division forbid a value.
    """
    recipe = run.recipe
    if recipe["optimizer"] != "adam":
        raise ConfigError(f"config.optimizer={recipe['optimizer']!r}: MLPerf's GNMT has 'adam'")
    if not recipe["vocabulary_size"]:
        raise ConfigError("config.vocabulary_size=0: a log of MLPerf states the size; give it")
    rows = _tags(run) if run.form == "v0.5" else _keys(run)
    if run.closed and (breaches := "; ".join(_breaches(run))):
        raise ConfigError(f"{breaches} (or give --config.mlperf.division=open)")
    return Facts(rows)


def _breaches(run: Run) -> Iterator[str]:
    """The values that the closed division forbids, each with the remedy."""
    recipe = run.recipe
    for key, value in _RULES.items():
        if recipe[key] != value:
            yield f"config.{key}={recipe[key]}: the closed division has {value:g}"
    if recipe["warmup_shape"] != "exponential" or recipe["warmup_from"]:
        yield (
            f"config.warmup_shape={recipe['warmup_shape']!r} and warmup_from="
            f"{recipe['warmup_from']}: the closed division has 'exponential' and 0.0, which begins "
            "with a hundredth of the rate"
        )
    if run.form == "mllog" and (wrong := _misplaced(run)):
        yield wrong


def _misplaced(run: Run) -> str:
    """What is wrong with the drops of the learning rate, or ''."""
    drops, factors = _drops(run), tuple(run.recipe["learning_rate_decay_factors"])
    gaps = [after - before for before, after in zip(drops, drops[1:], strict=False)]
    if len(drops) == 4 and max(gaps) - min(gaps) <= 1 and set(factors) == {0.5}:
        return ""
    return (
        f"drops of the learning rate by {factors} at the steps {drops}: the closed division halves "
        "the rate four times, at equal distances; see config.learning_rate_decay_epochs and "
        "learning_rate_decay_factors"
    )


def _drops(run: Run) -> list[int]:
    """The steps at which the rate drops.

    Raises:
      ConfigError: there are fewer than two, or they are neither epochs nor plain steps.
    """
    recipe, text = run.recipe, run.recipe["learning_rate_decay_steps"]
    if recipe["learning_rate_schedule"] != "step":
        raise ConfigError(
            f"config.learning_rate_schedule={recipe['learning_rate_schedule']!r}: MLPerf's log of "
            "GNMT wants 'step'"
        )
    epochs = recipe["learning_rate_decay_epochs"]
    drops = [round(run.steps * epoch / recipe["schedule_epochs"]) for epoch in epochs]
    if text:
        if not re.fullmatch(r"\d+( steps)?(, \d+( steps)?)*", text):
            raise ConfigError(
                f"config.learning_rate_decay_steps={text!r}: MLPerf's log of GNMT wants steps, "
                "such as '3000, 3300, 3600, 3900'"
            )
        drops = [int(step) for step in re.findall(r"\d+", text)]
    if len(drops) < 2:
        raise ConfigError(
            f"drops of the learning rate at the steps {drops}: MLPerf's log of GNMT wants their "
            "distance, and so two or more; see config.learning_rate_decay_epochs"
        )
    return drops


def _keys(run: Run) -> list[Any]:
    """The hyperparameters of 'mllog'."""
    recipe, drops = run.recipe, _drops(run)
    return [
        row("opt_name", "adam"),
        row("opt_base_learning_rate", run.learning_rate.peak),
        row("opt_learning_rate_alt_warmup_func", True),  # exponential
        row("opt_learning_rate_warmup_steps", round(run.learning_rate.warmup_steps)),
        row("opt_learning_rate_alt_decay_func", True),  # halvings
        row("opt_learning_rate_remain_steps", drops[0]),
        row("opt_learning_rate_decay_interval", drops[1] - drops[0]),
        row("opt_learning_rate_decay_factor", recipe["learning_rate_decay_factors"][0]),
        row("opt_learning_rate_decay_steps", len(drops)),
        row("max_sequence_length", recipe["bucket_lengths"][-1], method="discard"),
    ]


def _tags(run: Run) -> list[Any]:
    """The hyperparameters of 'v0.5', in the order of its tags."""
    recipe, pairs = run.recipe, run.examples["train"]
    tags: dict[str, Any] = {
        "run_set_random_seed": recipe["seed"],
        "preproc_vocab_size": {
            "src": recipe["vocabulary_size"],
            "tgt": recipe["vocabulary_size"],
        },
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
        "opt_hp_Adam_beta1": recipe["adam_beta1"],
        "opt_hp_Adam_beta2": recipe["adam_beta2"],
        "opt_hp_Adam_epsilon": recipe["adam_epsilon"],
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
    return [row(key, value) for key, value in tags.items()]
