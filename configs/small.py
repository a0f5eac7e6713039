"""Recipes for a few thousand examples, on two CPU cores: --config=configs/small.py:NAME.

`python -m scripts.prepare DIR` prints the command with the batch and the schedule that fit the
data. Each recipe is the benchmark's own with other values; each value has its reason beside it.
"""

import ml_collections

from configs import ncf
from configs._named import choose_recipe

_FILE = "configs/small.py"


def _ncf() -> ml_collections.ConfigDict:
    config = ncf.get_config()
    config.min_ratings = 2  # one to train on, one held out
    config.mlp_layers = (64, 64, 32)  # a wider perceptron knows few ratings by heart
    config.base_learning_rate = 0.001  # half the epochs of 0.0005
    config.moving_average_decay = 0.9995  # the average ranks better than the last weights
    config.train_steps = "40 epochs"  # at most
    config.patience = 6  # the average rises slowly, and not at each evaluation
    config.eval_batch_size = 64  # of few users a batch is not mostly padding
    config.target = 0.0
    config.stop_at_target = False
    config.log_step_count_steps = "1 epoch"
    return config


RECIPES = {
    "ncf": _ncf,
}


def get_config(name: str = "") -> ml_collections.ConfigDict:
    """The configuration of one recipe, a key of `RECIPES`.

    Raises:
      UnknownRecipe: there is none of that name; the message lists them.
    """
    return choose_recipe(RECIPES, name, _FILE)()
