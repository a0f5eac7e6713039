"""Gives the config of a run the keys of another model, whose weights the run uses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import benchmarks


def restored(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the config in a checkpoint's manifest, so that `load` needs no data for it.

    A benchmark's module may have `restored(values, manifest)`, which returns the values with those
    keys added that were unknown when the checkpoint was written.

    Raises:
      ConfigError: the benchmark is unknown here.
    """
    complete = getattr(benchmarks.module(manifest["benchmark"]), "restored", None)
    values = dict(manifest["config"])
    return complete(values, manifest) if complete else values


def settle(
    config: Any, model: Mapping[str, Any] | str, fixed: Collection[str], whole: bool
) -> list[str]:
    """Gives the config the keys of another model, whose weights the run uses.

    A benchmark's module lists these keys in `MODEL_KEYS`, and in `WHOLE_KEYS` those that only
    belong to a model that is used as it is, such as the number of its classes. `FOLLOWS` names
    other benchmarks whose models it begins with; `check_followed(config, values)` refuses those
    that do not fit, and returns remarks on the others.

    Args:
      config: changed in place.
      model: the manifest of a checkpoint, or a path whose weights may be another library's. Then
        the module's `foreign_settings(path)` returns (values of keys, remarks), or None.
      fixed: keys that the person has given, which stay.
      whole: whether the model is used as it is.

    Returns:
      One line for each key that has changed, and the remarks.

    Raises:
      ConfigError: the benchmark is unknown, or it cannot begin with this model.
      DataError: the foreign weights cannot be used.
    """
    room, remarks, values = benchmarks.module(config.benchmark), [], {}
    whole_keys = getattr(room, "WHOLE_KEYS", ())
    if isinstance(model, str):
        read = getattr(room, "foreign_settings", lambda path: None)
        values, remarks = read(model) or ({}, [])
    elif model["benchmark"] in (config.benchmark, *getattr(room, "FOLLOWS", ())):
        own = model["config"]
        values = restored(model) | {key: own[key] for key in whole_keys if key in own}
        if model["benchmark"] != config.benchmark:
            remarks = [(line, "") for line in room.check_followed(config, values)]
    keys = (*getattr(room, "MODEL_KEYS", ()), *(whole_keys if whole else ()))
    notes = []
    for key in keys:
        if key in values and key not in fixed and values[key] != config.get(key):
            before = f" instead of {config[key]!r}" if key in config else ""
            notes.append(f"config.{key}={values[key]!r}{before}, as the weights want it")
            with config.unlocked():
                config[key] = values[key]
    return notes + [remark for remark, key in remarks if key not in fixed]
