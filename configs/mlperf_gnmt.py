"""GNMT as it was run in MLPerf: --config=configs/mlperf_gnmt.py:NAME.

docs/gnmt.md has the published curves. How many pairs the length rule keeps depends on the text, so
that `config.num_train_pairs` is not set here. No run here has verified these recipes.
"""

from typing import NamedTuple

import ml_collections

from configs import gnmt
from configs._loop import choose_recipe


class Recipe(NamedTuple):
    """What differs between the recipes.

    `cores` is how many of Google's devices each clipped its gradient; 0 where the gradient of the
    complete batch was clipped. `drops` are the steps at which the rate is halved; '' halves it at
    equal distances, from two thirds of the run on.
    """

    batch: int
    rate: float
    warmup: int
    epochs: int
    drops: str = ""
    cores: int = 0
    counts_eos: bool = True
    gradient_precision: str = "float32"
    target: float = 0.24


# Google's code halves the rate one interval after the step that it logs as remain_steps, and the
# reference's already at that step.
RECIPES = {
    # Google's v3-8 of 2018.
    "v0.5": Recipe(2048, 0.002, 200, 2, cores=8, counts_eos=False, target=0.218),
    # Google's of 2019 on the v3-32.
    "v0.6-4096": Recipe(4096, 0.0035, 150, 8, "4300, 4600, 4900, 5200", cores=32, counts_eos=False),
    "v0.7-2048": Recipe(2048, 0.002, 200, 4),  # the reference's, run by NVIDIA on a DGX-1
    # Google's v4-16 and v3-1024 of 2020.
    "v0.7-4096": Recipe(
        4096, 0.003, 150, 8, "3300, 3600, 3900, 4200", 16, gradient_precision="bfloat16"
    ),
    "v0.7-8192": Recipe(
        8192, 0.0045, 150, 10, "2165, 2406, 2647, 2888", 1024, gradient_precision="bfloat16"
    ),
}


def get_config(name: str = "") -> ml_collections.ConfigDict:
    """The configuration of one recipe, a key of `RECIPES`."""
    recipe: Recipe = choose_recipe(RECIPES, name, __file__)
    config = gnmt.get_config()
    config.num_eval_sentences = 3_003
    config.vocabulary_size = 32_316
    config.train_batch_size = recipe.batch
    config.train_steps = f"{recipe.epochs} epochs"
    config.base_learning_rate = recipe.rate
    config.warmup_steps = str(recipe.warmup)
    config.learning_rate_decay_steps = recipe.drops
    config.counts_eos = recipe.counts_eos
    config.gradient_precision = recipe.gradient_precision
    config.target = recipe.target
    if recipe.cores:
        config.projection_bias = False
        config.gradient_clip_per_device = True
        # Google's norm is of the sum over a core's pairs, `gradient_clip_norm` of the mean.
        config.gradient_clip_norm = 5.0 * recipe.cores / recipe.batch
    if name == "v0.5":
        # In twelfths of the run; the fourth interval ends with the run.
        config.learning_rate_decay_epochs = (9, 10, 11)
    config.steps_per_checkpoint = ""  # every evaluation saves one, which is enough
    return config
