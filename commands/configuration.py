"""Resolves the configuration: one function from the command line to the settings of a run."""

import logging
from collections.abc import Mapping
from typing import Any

import benchmarks
from commands import MODES
from commands.recipe import Recipe
from common import foreign, keys
from engine import locations
from engine.checkpoint import model_source
from engine.plan import Settings, read_settings

_log = logging.getLogger("tpu_suite")


def resolve(recipe: Recipe | None, mode: str, workdir: str) -> Settings:
    """The settings of a run, which nothing changes afterwards.

    Args:
      recipe: has the values of the command line; None: the checkpoint in the workdir has them.
      mode: a key of `commands.MODES`.
      workdir: the folder for results; "" for a mode without one.
    """
    if recipe is None:
        return model_source.settings(workdir)
    # The recipe. One that lacks keys is refused before they are used.
    read_settings(recipe.config)
    folders = keys.read_config(locations.Keys, recipe.config)
    config: Any = recipe.config.copy_and_resolve_references().unlock()

    # The data.
    if MODES[mode].reads_data and benchmarks.needs_data_dir(config):
        config.data_dir = locations.data_dir(folders)

    # The weights to begin with.
    if workdir:
        config.init_from = model_source.init_from(folders)
    previous = model_source.peek(workdir) if workdir and mode != "import" else None
    evaluates = mode in ("eval", "report")
    notes = []
    if previous and not previous.get("step") and not evaluates:
        config.init_from = f"{workdir}/checkpoints/0"
        notes.append("the workdir holds an imported model, with whose weights the run begins")

    # The model whose weights the run uses: of its workdir if it is evaluated, or if it has begun
    # with another model's weights; else of `init_from`. An evaluation and an import use it whole.
    model: Mapping[str, Any] | str | None = None
    whole = mode == "import"
    if previous and (evaluates or config.init_from or previous["config"].get("init_from")):
        model, whole = previous, evaluates
    elif config.init_from:
        flag = "--config.init_from"
        path = locations.check_path(config.init_from, flag, foreign.NAMES)
        file = foreign.find(path, flag)
        model = file or (None if mode == "import" else model_source.peek(path))
    if model:
        values, remarks = benchmarks.adopted_values(config, model, recipe.given, whole)
        for key, value in values.items():
            instead = f" instead of {config[key]!r}" if key in config else ""
            notes.append(f"config.{key}={value!r}{instead}, as the weights want it")
        config.update(values)
        notes += remarks
    for note in notes:
        _log.info("NOTE %s", note)

    # All keys are checked; a checkpoint's manifest says what differs from the recipe's file.
    own, final = recipe.own, keys.flat(config)
    changes = {key: [own.get(key), final[key]] for key in final if own.get(key) != final[key]}
    return read_settings(config.lock(), workdir, {"file": recipe.file, "changes": changes})
