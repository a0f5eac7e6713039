"""The Transformer in MLPerf: its rules, its data, and what the logs say about a run.

Keys of 'mllog' come from mlperf-logging's ruleset 0.7.0, the last one that knows this benchmark.
Keys of 'v0.5' are the tags of mlperf_compliance 0.0.10.
"""

import math
from typing import Any

from benchmarks.mlperf import Entry, Facts, Run, adam_tags, check_optimizer
from benchmarks.translation.evaluation import logged_bleu
from benchmarks.translation.transformer import WMT

ENTRY = Entry(
    name="transformer",
    recipe="configs/transformer.py",
    targets={"mllog": {"BLEU": 0.25}, "v0.5": {"BLEU": 0.25}},
    # The number of rows is the packer's, and the vocabulary's size its maker's.
    declares={"num_train_rows": 0, "num_eval_sentences": WMT["eval"], "vocabulary_size": 0},
    variable="MLP_PATH_GCS_TRANSFORMER",
    meaning="the folder of the packed WMT records, their vocabulary and the newstest2014 records",
    files=(
        ("*packed-train*", "wmt32k-encoded-train-*"),
        ("*-dev*", "wmt32k-encoded-dev*"),
        ("vocab.*",),
    ),
    runs=10,
    ruleset="0.7.0",
    evaluation=logged_bleu,
    logs_eval_size=False,
)


def facts(run: Run) -> Facts:
    """What the log of a run says about the Transformer; ConfigError if its optimizer is another."""
    check_optimizer(run, "Transformer", "adam")
    values = _tags(run) if run.form == "v0.5" else _keys(run)
    return Facts(values, {"max_sequence_length": {"method": "discard"}})  # of longer sentences


def _base_rate(run: Run) -> float:
    """The learning rate as the references count it, without width ** -0.5."""
    return run.recipe["base_learning_rate"] * math.sqrt(run.recipe["width"])


def _keys(run: Run) -> dict[str, Any]:
    """The hyperparameters of 'mllog'."""
    recipe = run.recipe
    return {
        "opt_name": "adam",
        "opt_base_learning_rate": _base_rate(run),
        "opt_learning_rate_warmup_steps": round(run.learning_rate.warmup_steps),
        "opt_adam_beta_1": recipe["adam_beta1"],
        "opt_adam_beta_2": recipe["adam_beta2"],
        "opt_adam_epsilon": recipe["adam_epsilon"],
        "max_sequence_length": recipe["row_length"],
    }


def _tags(run: Run) -> dict[str, Any]:
    """The hyperparameters of 'v0.5', in the order of its tags."""
    recipe, width = run.recipe, run.recipe["width"]
    size, dropout = recipe["vocabulary_size"], recipe["dropout"]
    return {
        "run_set_random_seed": recipe["seed"],
        "preproc_num_train_examples": run.examples["train"],
        "preproc_num_eval_examples": run.examples["eval"],
        "preproc_tokenize_training": None,
        "preproc_tokenize_eval": None,
        "preproc_vocab_size": size,
        "input_batch_size": recipe["train_batch_size"] * recipe["row_length"],
        "input_max_length": recipe["row_length"],
        "input_order": None,
        "input_shard": recipe["shuffle_buffer_size"],
        "opt_name": "adam",
        "opt_learning_rate": _base_rate(run),
        "opt_learning_rate_warmup_steps": round(run.learning_rate.warmup_steps),
        **adam_tags(run),
        "eval_target": 100 * recipe["target"],
        "model_hp_initializer_gain": 1.0,
        "model_hp_vocab_size": size,
        "model_hp_hidden_layers": recipe["num_layers"],
        "model_hp_embedding_shared_weights": {"vocab_size": size, "hidden_size": width},
        "model_hp_attention_dense": {"hidden_size": width, "use_bias": False},
        "model_hp_attention_dropout": dropout,
        "model_hp_ffn_output_dense": {"hidden_size": width, "use_bias": True},
        "model_hp_ffn_filter_dense": {
            "filter_size": recipe["mlp_width"],
            "use_bias": True,
            "activation": "relu",
        },
        "model_hp_relu_dropout": dropout,
        "model_hp_layer_postprocess_dropout": dropout,
        "model_hp_norm": {"hidden_size": width},
        "model_hp_sequence_beam_search": {
            "vocab_size": size,
            "beam_size": recipe["beam_size"],
            "alpha": recipe["length_penalty"],
            "extra_decode_length": recipe["extra_length"],
        },
    }
