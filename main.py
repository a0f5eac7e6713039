"""Trains and evaluates: python main.py --config=configs/resnet50.py --workdir=DIR."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib.metadata
import inspect
import logging
import os
import platform
import runpy
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import config_flags

import keys
from engine import environment, paths
from engine.aot import topology
from errors import ConfigError, UserError, one_line

environment.set_defaults()

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Recipe: a file in configs/. Override a key with --config.KEY=VALUE."
)
_WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Folder, local or gs://, for everything the run writes. Default: $TPU_MODEL_DIR, else "
    "$PS_MODEL_PATH, else $MLP_GCS_MODEL_DIR.",
)
_MODE = flags.DEFINE_enum(
    "mode",
    "train_and_eval",
    [
        *("train_and_eval", "train", "eval", "probe", "import", "export", "report"),
        *("doctor", "preflight"),
    ],
    "probe: classify with the features of config.init_from, without training. import: write the "
    "weights of another library, --config.init_from=FILE, as a checkpoint. export: write the "
    "trained model for other programs. report: write a page about the run, "
    "WORKDIR/report/report.html. Both need no --config. "
    "doctor: look for what would stop the run, and say the remedy. preflight: compile the steps "
    "for TPUs that are not here, and say whether they fit and how fast they would be.",
)
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", "latest", "With --mode=eval, export or report: latest, best or a step."
)
_COMPARE = flags.DEFINE_string(
    "compare", "", "With --mode=report: the workdir of another run to show beside this one."
)
_WATCH = flags.DEFINE_bool(
    "watch", False, "With --mode=eval: also evaluate new checkpoints as they appear."
)
_JSON = flags.DEFINE_bool("json", False, "With --mode=doctor or preflight: print JSON.")
_TPU = flags.DEFINE_string(
    "tpu", "", "With --mode=preflight: slices such as v5e:4x4 or v3-32, with commas; or all."
)
_LARGEST_BATCH = flags.DEFINE_bool(
    "largest_batch",
    False,
    "With --mode=preflight: where the batch does not fit, find one that does.",
)
_PRICE = flags.DEFINE_float(
    "chip_hour_price",
    None,
    "With --mode=preflight: US dollars for an hour of one chip; Google's list price by default.",
    lower_bound=0.0,
)
_FORMAT = flags.DEFINE_string(
    "format",
    "savedmodel,stablehlo",
    "With --mode=export: one or more of hf, onnx, savedmodel, stablehlo, tflite, int8.",
)
_OUT = flags.DEFINE_string(
    "out", "", "With --mode=export: folder, local or gs://. Default: WORKDIR/export."
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir", "", "With --mode=export --format=int8: the data, if not where the run had them."
)
_ALLOW_MISMATCH = flags.DEFINE_bool(
    "allow_mismatch",
    False,
    "With --mode=export --format=hf: write a model that PyTorch computes differently.",
)
_REPLAY = flags.DEFINE_integer(
    "replay", 0, "Train up to this step once more, look closely at it and save nothing."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", "", "host:port of process 0, where a run of several processes is no TPU slice."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", 0, "With --coordinator: how many.")
_PROCESS_ID = flags.DEFINE_integer("process_id", -1, "With --coordinator: which one, from 0.")
_EVAL_TIMEOUT = flags.DEFINE_float(
    "eval_timeout", 3600.0, "With --watch: stop after this many seconds without a new checkpoint."
)


# Modes that take the config of the workdir's checkpoint where --config gives none.
_WITHOUT_CONFIG = ("export", "report")


@dataclasses.dataclass(frozen=True)
class Locations:
    """The config's keys that name folders, or the variables that name them."""

    data_dir: str
    data_env: str
    init_from: str
    init_env: str


def _note(text: str) -> None:
    if not (_JSON.present and _JSON.value):  # that output is for programs
        print(text)


def resolve_workdir(flag: str | None) -> str:
    """The folder for results: the flag, else the environment.

    Raises:
      ConfigError: neither names a folder, or the folder cannot hold results.
    """
    for name, value in (
        ("--workdir", flag),
        ("$TPU_MODEL_DIR", os.environ.get("TPU_MODEL_DIR")),
        ("$PS_MODEL_PATH", os.environ.get("PS_MODEL_PATH")),
        ("$MLP_GCS_MODEL_DIR", os.environ.get("MLP_GCS_MODEL_DIR")),
    ):
        if value:
            _note(f"workdir: {value} (from {name})")
            return paths.check_writable(value, name)
    raise ConfigError("where should results go? Give --workdir=DIR or set TPU_MODEL_DIR")


def resolve_data_dir(config: Any) -> str:
    """The folder of the data: the config, else the environment, else the recipe's fallback.

    Raises:
      ConfigError: none of them names a folder, or the folder cannot be one.
    """
    from etils import epath

    if config.data_dir:
        _note(f"data: {config.data_dir} (from --config.data_dir or the recipe)")
        return paths.check(config.data_dir, "--config.data_dir")
    staged = os.environ.get("TPU_MODEL_DIR", "").rstrip("/") + "/input_data"
    if folder := os.environ.get(config.data_env):
        _note(f"data: {folder} (from ${config.data_env})")
        return paths.check(folder, f"${config.data_env}")
    if staged != "/input_data" and epath.Path(staged).exists():
        _note(f"data: {staged} (from $TPU_MODEL_DIR)")
        return staged
    if not config.get("data_fallback"):
        raise ConfigError(
            f"where are the data? Give --config.data_dir=DIR or set {config.data_env}"
        )
    _note(
        f"data: {config.data_fallback}: WARNING: these are random images, accuracy will mean "
        f"nothing. Set --config.data_dir or ${config.data_env} to train on your own"
    )
    return config.data_fallback


def _resolve_init(init_from: str, variable: str) -> str:
    """The model whose weights the run begins with: the config, else the environment, else none."""
    if init_from or not (path := os.environ.get(variable, "")):
        return paths.check(init_from, "--config.init_from")
    _note(f"initial weights: {path} (from ${variable})")
    return paths.check(path, f"${variable}")


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses flags; a mistake ends the program with one line."""
    try:
        rest = flags.FLAGS(argv)
        if _CONFIG.value is not None and _MODE.value == "export":
            raise ValueError("--mode=export takes no --config: the workdir has it")
        if _CONFIG.value is None and _MODE.value not in _WITHOUT_CONFIG:
            raise ValueError("which recipe? Give --config=configs/resnet50.py (or another there)")
        # The first use of a value loads the file.
        if _CONFIG.value is not None and "benchmark" not in _CONFIG.value:
            raise ValueError("--config names no recipe: the file sets no config.benchmark")
        _check_modes()
        if len(rest) > 1:
            raise ValueError(f"unexpected argument {rest[1]!r}: values are given as --NAME=VALUE")
        return rest
    except Exception as error:  # flags, the recipe's own code, the checks of this file
        sys.exit(f"ERROR: {_explain(argv, error)}")


def _check_modes() -> None:
    """Refuses flags that the mode would ignore."""
    if _REPLAY.present and (_REPLAY.value < 1 or _MODE.present):
        raise ValueError(
            f"--replay={_REPLAY.value}: must be a step, from 1, and goes without --mode"
        )
    only = {"watch": "eval", "checkpoint": "eval or --mode=export or --mode=report"}
    only |= {"eval_timeout": "eval", "compare": "report"}
    only |= dict.fromkeys(("format", "out", "data_dir", "allow_mismatch"), "export")
    only |= dict.fromkeys(("tpu", "largest_batch", "chip_hour_price"), "preflight")
    only |= {"json": "doctor or --mode=preflight"}
    for flag, mode in only.items():
        if flags.FLAGS[flag].present and _MODE.value not in mode.split(" or --mode="):
            raise ValueError(f"--{flag} goes with --mode={mode}, not with --mode={_MODE.value}")
    if _MODE.value == "preflight":
        topology.parse(_TPU.value)
    if _EVAL_TIMEOUT.value <= 0:
        raise ValueError(f"--eval_timeout={_EVAL_TIMEOUT.value}: must be more than 0 seconds")


def _explain(argv: Sequence[str], error: Exception) -> str:
    """What was wrong with the command line, in one line."""
    file = next((a.partition("=")[2] for a in argv if a.startswith("--config=")), "")
    path, _, argument = file.partition(":")
    if file and not os.path.isfile(path):
        folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "configs")
        recipes = sorted(p for p in os.listdir(folder) if p.endswith(".py") and p[0] != "_")
        return f"--config={file}: there is no such file; configs/ has {', '.join(recipes)}"
    if file:
        try:
            known = list(keys.flat(_load_recipe(file, path, argument)))
        except ConfigError as wrong:
            return str(wrong)
        for arg in argv:
            key = arg.split("=")[0].removeprefix("--config.")
            if arg.startswith("--config.") and key not in known:
                near = difflib.get_close_matches(key, known, 1)
                meant = f"did you mean {near[0]}?" if near else f"it has: {', '.join(known)}"
                return f"{path} has no key {key!r}; {meant}"
    return " ".join(str(error).split())


def _load_recipe(file: str, path: str, argument: str) -> Any:
    """The config of a recipe's file.

    Raises:
      ConfigError: the file is no recipe, or its code fails.
    """
    try:
        get_config = runpy.run_path(path).get("get_config")
        if get_config is None:
            raise ConfigError(f"{path} has no function get_config(); configs/ has examples")
        if argument and not inspect.signature(get_config).parameters:
            raise ConfigError(f"--config={file}: this recipe takes no name; use --config={path}")
        config = get_config(argument) if argument else get_config()
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
    except ConfigError:
        raise
    except Exception as error:  # whatever the file's code raises
        if (text := one_line(error)).startswith("--config="):  # the recipe's own refusal
            raise ConfigError(text) from error
        frames = traceback.extract_tb(error.__traceback__)
        line = [frame.lineno for frame in frames if frame.filename == path][-1]
        raise ConfigError(f"{path}, line {line}: {type(error).__name__}: {text}") from error
    if not hasattr(config, "items"):
        raise ConfigError(
            f"{path}: get_config() returns {type(config).__name__!r}, not a ConfigDict"
        )
    return config


def main(argv: Sequence[str]) -> int:
    """Runs the mode; returns the exit code: 0 done, 1 failed, 128 + signal if asked to stop."""
    del argv
    _keep_libraries_quiet()
    is_alone = _MODE.value == "preflight"  # without data, workdir and other hosts
    try:
        workdir = "" if is_alone else resolve_workdir(_WORKDIR.value)
        host = None if is_alone or _MODE.value == "export" else _host()
    except UserError as error:
        sys.exit(f"ERROR: {error}")
    if os.environ.get("TPU_GRPC_URL") and _MODE.value not in ("preflight", "doctor"):
        print("NOTE TPU_GRPC_URL is set; a TPU VM does not use it")
    log = logging.getLogger("tpu_suite")
    log.setLevel(logging.INFO)
    log.propagate = False
    terminal = logging.StreamHandler(sys.stdout)
    if host and host.index:
        terminal.setLevel(logging.WARNING)  # process 0 says what all would say
    log.addHandler(terminal)
    return _run(workdir, host)


def _keep_libraries_quiet() -> None:
    """Keeps the errors of Orbax off the terminal; `engine.cluster.hostlog` writes them to a file.

    Orbax logs an error for every file and every task of a failed save, and TensorStore prints a
    traceback for each. The failure itself arrives as an exception.
    """
    absl_logging.set_verbosity(absl_logging.ERROR)
    absl_logging.get_absl_handler().addFilter(lambda record: record.name != "absl")
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)

    def print_unraisable(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = print_unraisable


def _host() -> Any:
    """This process among the hosts of the run; None if it is alone."""
    from engine.cluster import hosts

    return hosts.find(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)


def _run(workdir: str, host: Any) -> int:
    """Runs the mode together with the other processes; a failure of one ends all of them."""
    from engine.cluster import guard, preemption, processes

    preemption.listen(lambda code, reason: processes.fail(reason, code))
    try:
        code = _run_mode(workdir, host)
    except (preemption.Preempted, guard.MemoryFull) as error:
        if not getattr(error, "agreed", True):
            processes.fail(str(error), error.code)  # the other processes know nothing of it
        print(f"{error}; exit code {error.code}", file=sys.stderr)
        code = error.code
    except Exception as error:
        processes.fail_with(error)
        raise
    processes.finish(code)


def _settings(workdir: str) -> Any:
    """The run that the command line describes; resolves where its data and weights are."""
    import benchmarks
    import run

    config = _CONFIG.value
    if config is None:
        from modes import report

        return report.settings_of(workdir)
    run.read(config)  # a recipe that lacks keys is refused before they are used
    keys.read(Locations, config)
    keys.check("config.data_fallback", config.get("data_fallback", ""), str)
    if workdir:
        if _MODE.value != "import" and benchmarks.needs_data_dir(config):
            config.data_dir = resolve_data_dir(config)
        config.init_from = _resolve_init(config.init_from, config.init_env)
    from modes import importing

    fixed = config_flags.get_override_values(flags.FLAGS["config"])
    for line in importing.settle(config, workdir, _MODE.value, fixed):
        _note(f"NOTE {line}")
    return run.read(config.lock(), workdir, _origin(config))


def _origin(config: Any) -> dict[str, Any]:
    """The recipe's file, and the values of `config` that differ from it; see `run.Settings`."""
    file = config_flags.get_config_filename(flags.FLAGS["config"])
    path, _, argument = file.partition(":")
    before, after = keys.flat(_load_recipe(file, path, argument)), keys.flat(config)
    changed = [key for key in after if before.get(key) != after[key]]
    return {"file": file, "changes": {key: [before.get(key), after[key]] for key in changed}}


def _run_mode(workdir: str, host: Any) -> int:
    """Runs what --mode or --replay says; returns the exit code."""
    from engine import mesh
    from engine.cluster import preemption, processes

    if _MODE.value == "export":
        from modes import export

        flags_of_export = (_FORMAT.value, _OUT.value, _DATA_DIR.value, _ALLOW_MISMATCH.value)
        export.run(export.Request(workdir, _CHECKPOINT.value, *flags_of_export))
        return 0
    settings = _settings(workdir)
    if _MODE.value == "preflight":
        from modes import preflight

        return preflight.run(
            settings,
            preflight.Request(_TPU.value, _JSON.value, _LARGEST_BATCH.value, _PRICE.value),
        )
    facts = {"workdir": workdir, "mode": _MODE.value, "replay": _REPLAY.value, **_facts(settings)}
    if host and _MODE.value != "doctor":  # the doctor itself says which hosts are missing
        limits = settings.limits
        processes.join(host, facts, limits.hosts_wait_seconds, limits.host_silence_seconds)
    if mesh.tpu_chips():
        preemption.watch_cloud()
    if _MODE.value == "doctor":
        from modes import doctor

        return doctor.run(settings, _JSON.value, host and (host, facts))
    if _REPLAY.value:
        from modes import replay

        replay.replay(settings, _REPLAY.value)
    elif _MODE.value == "report":
        from modes import report

        report.report(settings, _CHECKPOINT.value, _COMPARE.value)
    elif _MODE.value == "eval":
        import evaluate

        watch_seconds = _EVAL_TIMEOUT.value if _WATCH.value else 0.0
        evaluate.evaluate(settings, _CHECKPOINT.value, watch_seconds)
    elif _MODE.value == "import":
        from modes import importing

        importing.run(settings)
    elif _MODE.value == "probe":
        from modes import probe

        probe.probe(settings)
    else:
        import train

        train.train_and_evaluate(settings, evaluating=_MODE.value == "train_and_eval")
    return 0


def _facts(settings: Any) -> dict[str, Any]:
    """What must be the same on all hosts: the configuration, the libraries, the program."""
    root, digest = os.path.dirname(os.path.abspath(__file__)), hashlib.sha256()
    folders = [root]
    for part in ("benchmarks", "engine", "modes", "ops"):
        folders += sorted(folder for folder, _, _ in os.walk(os.path.join(root, part)))
    for folder in folders:
        for name in sorted(os.listdir(folder)):
            if name.endswith(".py"):
                with open(os.path.join(folder, name), "rb") as file:
                    digest.update(file.read())
    from engine.manifest import LIBRARIES

    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {
        "Python": platform.python_version(),
        "the program (SHA-256 of its files)": digest.hexdigest()[:12],
        **{f"the version of {name}": installed.get(name, "absent") for name in LIBRARIES},
        **{f"config.{key}": str(value) for key, value in keys.flat(settings.recipe).items()},
    }


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
