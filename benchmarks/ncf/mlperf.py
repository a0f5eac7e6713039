"""NCF in MLPerf v0.5: its rules, its data, and what the log says about a run.

The keys are the tags of mlperf_compliance 0.0.10. No later log knows NCF.
"""

from typing import Any

from benchmarks.mlperf import Entry, Facts, Run, adam_tags, check_optimizer
from benchmarks.ncf.ratings import ML_20M, TARGET
from common.errors import ConfigError

ENTRY = Entry(
    name="ncf",
    recipe="configs/ncf.py",
    targets={"v0.5": {"hr_at_10": TARGET}},
    declares=ML_20M,
    variable="MLP_PATH_GCS_NCF",
    meaning="the folder of MovieLens' ml-20m, with ratings.csv or ml-20m.zip",
    files=(
        (
            "ratings.csv",
            "ml-20m/ratings.csv",
            "ml-20m.zip",
            "ratings.dat",
            "ml-1m/ratings.dat",
            "train-ratings.csv",
            "test-ratings.csv",
        ),
    ),
    runs=100,  # MLPerf scored the first 50 that converged
)


def facts(run: Run) -> Facts:
    """What the log of a run says about NCF."""
    recipe = run.recipe
    check_optimizer(run, "NCF", "adam")
    if (held_out := recipe.get("eval_holdout", "latest")) != "latest":
        raise ConfigError(f"config.eval_holdout={held_out!r}: MLPerf's NCF has 'latest' only")
    if recipe["eval_negatives"] == "all":
        raise ConfigError("config.eval_negatives='all': MLPerf's NCF ranks among 999 drawn items")
    values: dict[str, Any] = {
        "input_batch_size": recipe["train_batch_size"],
        "preproc_hp_min_ratings": recipe["min_ratings"],
        "preproc_hp_num_eval": recipe["eval_negatives"],
        "preproc_hp_sample_eval_replacement": True,
        "input_size": run.examples["train"],
        "input_order": None,
        "input_hp_num_neg": recipe["train_negatives"],
        "input_hp_sample_train_replacement": True,
        "input_step_train_neg_gen": None,
        "input_step_eval_neg_gen": None,
        "eval_target": recipe["target"],
        "eval_hp_num_users": run.examples["eval"],
        "eval_hp_num_neg": recipe["eval_negatives"],
        "opt_name": recipe["optimizer"],
        "opt_learning_rate": run.learning_rate.peak,
        **adam_tags(run),
        "model_hp_loss_fn": "binary_cross_entropy",
        "model_hp_mf_dim": recipe["gmf_dim"],
        "model_hp_mlp_layer_sizes": list(recipe["mlp_layers"]),
    }
    return Facts(values)
