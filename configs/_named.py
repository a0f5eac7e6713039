"""Recipes that a config file has under names: --config=FILE:NAME."""

from collections.abc import Mapping
from typing import Any


class UnknownRecipe(KeyError):
    """There is no such recipe; the message is one line."""

    def __str__(self) -> str:
        return self.args[0]  # KeyError shows a repr


def choose_recipe(recipes: Mapping[str, Any], name: str, file: str) -> Any:
    """The recipe of a name; `file` is that of the recipes, for the message.

    Raises:
      UnknownRecipe: there is none of that name; the message lists them.
    """
    if name not in recipes:
        raise UnknownRecipe(
            f"--config={file}:{name}: there is no such recipe; give --config={file}:NAME, where "
            f"NAME is one of {', '.join(recipes)}"
        )
    return recipes[name]
