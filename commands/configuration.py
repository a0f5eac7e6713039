"""Resolves the configuration: one function from the command line to the settings of a run."""

from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

import benchmarks
from commands import MODES
from common import keys
from engine import locations
from engine.checkpoint import model_source
from engine.plan import Settings, read_settings
from engine.recipe import Recipe

_EVALUATES = ("eval", "report")  # modes that use the model of the workdir unchanged


def resolve(
    recipe: Recipe | None, mode: str, workdir: str, say: Callable[[str], None] = print
) -> Settings:
    """The settings of a run. Nothing changes them afterwards.

    Args:
      recipe: the recipe with the values of the command line; None: the workdir's run has them.
      mode: a key of `commands.MODES`.
      workdir: the folder for results; "" for a mode without one.
      say: prints a line for the user: where data and weights are from, and notes.

    Raises:
      UserError: a value cannot work, or the model whose weights the run uses does not fit.
    """
    if recipe is None:
        return model_source.settings(workdir)
    # The recipe. One that lacks keys is refused before they are used.
    config = recipe.config
    read_settings(config)
    folders = keys.read_config(locations.Keys, config)

    # The data.
    if MODES[mode].reads_data and benchmarks.needs_data_dir(config):
        config = _changed(config, {"data_dir": locations.data_dir(folders, say)})

    # The weights to begin with.
    notes = []
    init_from = model_source.init_from(folders, say) if workdir else folders.init_from
    previous = model_source.peek(workdir) if workdir and mode != "import" else None
    if previous and not previous.get("step") and mode not in _EVALUATES:
        init_from = f"{workdir}/checkpoints/0"
        notes.append("the workdir holds an imported model, with whose weights the run begins")
    config = _changed(config, {"init_from": init_from})

    # The values of the model whose weights the run uses.
    if model := _model(init_from, previous, mode):
        whole = mode == "import" or (mode in _EVALUATES and model is previous)
        values, remarks = benchmarks.adopted_values(config, model, recipe.given, whole)
        for key, value in values.items():
            instead = f" instead of {config[key]!r}" if key in config else ""
            notes.append(f"config.{key}={value!r}{instead}, as the weights want it")
        config = _changed(config, values)
        notes += remarks
    for note in notes:
        say(f"NOTE {note}")

    # All keys are checked, and what is not the recipe's own is noted for the manifest.
    changes = {
        key: [recipe.own.get(key), value]
        for key, value in keys.flat(config).items()
        if recipe.own.get(key) != value
    }
    return read_settings(config.lock(), workdir, {"file": recipe.file, "changes": changes})


def _model(
    init_from: str, previous: Mapping[str, Any] | None, mode: str
) -> Mapping[str, Any] | str | None:
    """The model whose values a run takes: a manifest, or a file of another library's weights.

    A run that is evaluated, or that began with another model's weights, has the model `previous` of
    its workdir; other runs have the one in `init_from`, if it can be read.
    """
    if previous and (mode in _EVALUATES or init_from or previous["config"].get("init_from")):
        return previous
    if not init_from:
        return None
    path, file = model_source.find(init_from, "--config.init_from")
    return file or (None if mode == "import" else model_source.peek(path))


def _changed(config: ConfigDict, values: Mapping[str, Any]) -> ConfigDict:
    """A copy of a config with other values."""
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.update(values)
    return config
