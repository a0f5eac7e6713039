"""The Transformer as Google ran it in MLPerf: --config=configs/mlperf_transformer.py:NAME.

All were trained on 566,340 packed rows of WMT English-German to BLEU 0.25. configs/transformer.py
has the numbers of 'v0.7-512', for data of any size. No run here has verified these recipes.
"""

import math

import ml_collections

from configs import transformer
from configs._loop import choose_recipe

# By name: rows in a batch, base rate for any width, warm-up steps, Adam's betas, and the epoch at
# which the published run reached the target.
RECIPES = {
    "v0.6-512": (512, 2.0, 1000, (0.9, 0.98), 3),  # up to 256 cores of v3, which took 2 to 4 epochs
    "v0.6-2048": (2048, 1.3, 550, (0.86, 0.92), 4),  # from 512 cores of v3 on
    "v0.7-512": (512, 1.875, 1107, (0.9, 0.98), 3),  # v4-16
    "v0.7-2048": (2048, 1.9, 831, (0.88, 0.94), 4),  # v4-512
    "v0.7-jax": (2048, 3.309, 664, (0.90866, 0.91987), 4),  # v3-8192, in JAX
}


def get_config(name: str = "") -> ml_collections.ConfigDict:
    """The configuration of one recipe, a key of `RECIPES`."""
    batch, base, warmup, (beta1, beta2), reached = choose_recipe(RECIPES, name, __file__)
    config = transformer.get_config()
    config.num_train_rows = 566_340
    config.num_eval_sentences = 3_003
    config.vocabulary_size = 33_708
    config.train_batch_size = batch
    config.train_steps = f"{reached + 3} epochs"
    config.base_learning_rate = base / math.sqrt(1024)  # the width
    config.warmup_steps = str(warmup)
    config.adam_beta1, config.adam_beta2 = beta1, beta2
    config.steps_per_checkpoint = ""  # every evaluation saves one, which is enough
    return config
