"""Gives the config of a run the keys of another model, whose weights the run uses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import benchmarks
from errors import CheckpointError, ConfigError
from ops import foreign


def restored(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the config in a checkpoint's manifest, so that `load` needs no data for it.

    A benchmark's module may have `restored(values, manifest)`, which returns the values with those
    keys added that were unknown when the checkpoint was written.

    Raises:
      CheckpointError: the manifest is damaged.
      ConfigError: the benchmark is unknown here.
    """
    if absent := {"benchmark", "config", "num_train_examples"} - manifest.keys():
        raise CheckpointError(f"the checkpoint's manifest is damaged: no {min(absent)}")
    complete = getattr(benchmarks.module(manifest["benchmark"]), "restored", None)
    values = dict(manifest["config"])
    try:
        return complete(values, manifest) if complete else values
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's manifest is damaged: {error!r}") from error


def is_older(manifest: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's benchmark has keys since then, so that `restored` adds some."""
    return not restored(manifest).keys() <= manifest["config"].keys()


def settle(
    config: Any,
    model: Mapping[str, Any] | str,
    fixed: Collection[str],
    whole: bool,
    has_recipe: bool = True,
) -> list[str]:
    """Gives the config the keys of another model, whose weights the run uses.

    A benchmark's module lists these keys in `MODEL_KEYS`, and in `WHOLE_KEYS` those that only
    belong to a model that is used as it is, such as the number of its classes. `FOLLOWS` names
    other benchmarks whose models it begins with; `check_followed(config, values)` refuses those
    that do not fit, and returns remarks on the others. `BODY_KEYS` are taken from the benchmark's
    own models, but not from those, which may have keys of the same names.

    Args:
      config: changed in place.
      model: the manifest of a checkpoint, or a path whose weights may be another library's. Then
        the module's `foreign_settings(path)` returns (values of keys, remarks), or None.
      fixed: keys that the person has given, which stay.
      whole: whether the model is used as it is.
      has_recipe: whether the person has given a recipe, whose keys may differ.

    Returns:
      One line for each key of the recipe that has changed, and the remarks.

    Raises:
      ConfigError: the benchmark is unknown, or it cannot begin with this model.
      DataError: the foreign weights cannot be used.
    """
    room, remarks, values = benchmarks.module(config.benchmark), [], {}
    whole_keys, is_own = getattr(room, "WHOLE_KEYS", ()), True
    if isinstance(model, str):
        values, remarks, is_own = _foreign(room, config, model)
    elif model["benchmark"] in (config.benchmark, *getattr(room, "FOLLOWS", ())):
        own = model["config"]
        values = restored(model) | {key: own[key] for key in whole_keys if key in own}
        is_own = model["benchmark"] == config.benchmark
        if not is_own:
            remarks = [(line, "") for line in room.check_followed(config, values)]
    body_keys = getattr(room, "BODY_KEYS", ()) if is_own else ()
    keys = (*getattr(room, "MODEL_KEYS", ()), *body_keys, *(whole_keys if whole else ()))
    notes = []
    for key in keys:
        if key not in values or key in fixed:
            continue
        value, before = values[key], config.get(key)
        value = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        if value != before:
            instead = f" instead of {before!r}" if key in config else ""
            notes.append(f"config.{key}={value!r}{instead}, as the weights want it")
            with config.unlocked():
                config[key] = value
    notes = notes if has_recipe else []
    return notes + [remark for remark, key in remarks if key not in fixed]


def _foreign(
    room: Any, config: Any, path: str
) -> tuple[Mapping[str, Any], list[tuple[str, str]], bool]:
    """(values, remarks, whether they are of the room's own model) of another library's weights.

    Else they are of a model that the room follows; empty if `path` is no file of weights.
    """
    none = lambda path: None  # noqa: E731
    if found := getattr(room, "foreign_settings", none)(path):
        return *found, True
    for name in getattr(room, "FOLLOWS", ()):
        if found := getattr(benchmarks.module(name), "foreign_settings", none)(path):
            values, remarks = found
            remarks = [(line, key) for line, key in remarks if not key or key in config]
            followed = [(line, "") for line in room.check_followed(config, values)]
            return values, remarks + followed, False
    if file := foreign.find(path):
        raise ConfigError(
            f"config.init_from={path}: {foreign.describe(file)}, with which the benchmark "
            f"{config.benchmark} cannot begin; give a workdir of its own that has checkpoints"
        )
    return {}, [], False
