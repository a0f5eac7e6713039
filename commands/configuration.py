"""Resolves the configuration: one function from the command line to the settings of a run."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import benchmarks
from commands import MODES
from commands.recipe import Recipe
from common import foreign, keys
from common.errors import CheckpointError, ConfigError, some
from engine import locations
from engine.checkpoint import manifest as manifests
from engine.checkpoint import model_source
from engine.plan import Settings, read_settings
from engine.report.history import History

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

    # The weights to begin with, and the number of steps.
    if workdir:
        config.init_from = model_source.init_from(folders)
    previous = model_source.peek(workdir) if workdir and mode != "import" else None
    evaluates = mode in ("eval", "report")
    notes = _take_steps(config, workdir, previous, recipe.given) if config.get("steps_of") else []
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
        if mode == "import":
            config.data_dir = config.data_dir or foreign.vocabulary_folder(file)
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


def _take_steps(
    config: Any, workdir: str, previous: Mapping[str, Any] | None, given: Collection[str]
) -> list[str]:
    """Gives `train_steps` the step of the best evaluation of the run in `steps_of`; returns notes.

    A run that has begun keeps its number: `previous` is the manifest of its newest checkpoint.
    UserError if the steps of that run cannot be taken.
    """
    asked = f"--config.steps_of={config.steps_of}"
    source = locations.check_results_folder(config.steps_of, "--config.steps_of").rstrip("/")
    if "train_steps" in given:
        raise ConfigError(f"{asked} and --config.train_steps={config.train_steps}: give one alone")
    if source == workdir.rstrip("/"):
        raise ConfigError(f"{asked} is the workdir of this run: give that of an evaluated one")
    config.steps_of, kind = source, type(config.train_steps)
    if previous and previous["config"].get("steps_of") == source:
        config.train_steps = kind(previous["config"]["train_steps"])
        return [f"config.train_steps={config.train_steps}, as in the checkpoint of this run"]
    if not (other := model_source.peek(source)):
        raise CheckpointError(f"{asked} holds no checkpoint of a run: give another workdir")
    then = other["config"]
    for key in ("benchmark", "train_batch_size"):
        if then[key] != config[key]:
            raise ConfigError(
                f"{asked} is a run with config.{key}={then[key]!r}, not {config[key]!r}, so its "
                "steps mean something else: give another workdir, or config.train_steps instead"
            )
    history = History(source, writes=False)
    history.restore(other.get("evaluations", []))
    metric, scores = config.best_by or other.get("target_metric", ""), history.scores()
    if (best := history.best(metric)) is None:
        known = some(name for row in [*scores.values()][-1:] for name in row) or "none"
        raise CheckpointError(f"{asked} has no evaluation with {metric!r}; its scores are: {known}")
    config.train_steps = kind(best)
    what = f"{source} ({metric} {scores[best][metric]:.4f})"
    notes = [f"config.train_steps={best}, the step of the best evaluation of {what}"]
    if best == max(scores):
        notes.append("that evaluation is the last one there: more steps might bring a better one")
    new = {**config.to_dict(), **{key: then.get(key) for key in ("steps_of", "train_steps")}}
    if lines := manifests.changes({"config": then}, {"config": new}):
        notes.append(f"unlike {source}: {'; '.join(lines)}")
    return notes
