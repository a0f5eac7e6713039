"""Recipes for a few thousand examples, on two CPU cores: --config=configs/small.py:NAME.

`python -m scripts.prepare DIR` prints the command with the batch and the schedule that fit the
data. Each recipe is the benchmark's own with other values; each value has its reason beside it.
"""

import ml_collections

from configs._named import choose_recipe

_FILE = "configs/small.py"

RECIPES = {}


def get_config(name: str = "") -> ml_collections.ConfigDict:
    """The configuration of one recipe, a key of `RECIPES`.

    Raises:
      UnknownRecipe: there is none of that name; the message lists them.
    """
    return choose_recipe(RECIPES, name, _FILE)()
