"""Trains and evaluates: python main.py --config=configs/resnet50.py --workdir=DIR."""

from __future__ import annotations

import difflib
import logging
import os
import runpy
import sys
from collections.abc import Sequence

# TensorFlow only reads data here; its start-up notes would bury what this program says.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
# A connection to gs:// that brings nothing for a minute is tried again; else it is waited for.
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "60")
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Recipe: a file in configs/. Override a key with --config.KEY=VALUE."
)
_WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Folder, local or gs://, for everything the run writes. Default: $TPU_MODEL_DIR, else "
    "$MLP_GCS_MODEL_DIR.",
)
_MODE = flags.DEFINE_enum(
    *("mode", "train_and_eval", ["train_and_eval", "train", "eval", "doctor"]),
    "doctor: look for what would stop the run, and say the remedy.",
)
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", "latest", "With --mode=eval: latest, best or a step."
)
_WATCH = flags.DEFINE_bool(
    "watch", False, "With --mode=eval: also evaluate new checkpoints as they appear."
)
_JSON = flags.DEFINE_bool("json", False, "With --mode=doctor: print JSON.")
_EVAL_TIMEOUT = flags.DEFINE_float(
    "eval_timeout", 3600.0, "With --watch: stop after this many seconds without a new checkpoint."
)


def _note(text: str) -> None:
    if not (_JSON.present and _JSON.value):  # that output is for programs
        print(text)


def resolve_workdir(flag: str | None) -> str:
    """The folder for results: the flag, else the environment, else ValueError."""
    for name, value in (
        ("--workdir", flag),
        ("$TPU_MODEL_DIR", os.environ.get("TPU_MODEL_DIR")),
        ("$MLP_GCS_MODEL_DIR", os.environ.get("MLP_GCS_MODEL_DIR")),
    ):
        if value:
            _note(f"workdir: {value} (from {name})")
            return value if "://" in value else os.path.abspath(os.path.expanduser(value))
    raise ValueError("where should results go? Give --workdir=DIR or set TPU_MODEL_DIR")


def resolve_data_dir(config) -> str:
    """The folder of the records: the config, else the environment, else public random images."""
    from etils import epath

    if config.data_dir:
        _note(f"data: {config.data_dir} (from --config.data_dir or the recipe)")
        return os.path.expanduser(config.data_dir)
    staged = os.environ.get("TPU_MODEL_DIR", "").rstrip("/") + "/input_data"
    if found := os.environ.get(config.data_env):
        _note(f"data: {found} (from ${config.data_env})")
        return found
    if staged != "/input_data" and epath.Path(staged).exists():
        _note(f"data: {staged} (from $TPU_MODEL_DIR)")
        return staged
    _note(
        f"data: {config.data_fallback}: WARNING: these are random images, accuracy will mean "
        f"nothing. Set --config.data_dir or ${config.data_env} to train on your own"
    )
    return config.data_fallback


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses flags; a slip ends the program with one line that says what was meant."""
    try:
        rest = flags.FLAGS(argv)
        if _CONFIG.value is None:
            raise ValueError("which recipe? Give --config=configs/resnet50.py (or another there)")
        _CONFIG.value.keys()  # a file that does not load says so only when it is used
        _check_modes()
        if len(rest) > 1:
            raise ValueError(f"unexpected argument {rest[1]!r}: values are given as --NAME=VALUE")
        return rest
    except (flags.Error, KeyError, AttributeError, TypeError, ValueError, OSError) as error:
        sys.exit(f"ERROR: {_explain(argv, error)}")


def _check_modes() -> None:
    """Refuses flags that the mode would ignore."""
    only = {"watch": "eval", "checkpoint": "eval", "eval_timeout": "eval", "json": "doctor"}
    for flag, mode in only.items():
        if flags.FLAGS[flag].present and _MODE.value != mode:
            raise ValueError(f"--{flag} goes with --mode={mode}, not with --mode={_MODE.value}")
    if _EVAL_TIMEOUT.value <= 0:
        raise ValueError(f"--eval_timeout={_EVAL_TIMEOUT.value}: must be more than 0 seconds")


def _explain(argv: Sequence[str], error: Exception) -> str:
    """What was wrong with the command line, in one line."""
    file = next((a.partition("=")[2] for a in argv if a.startswith("--config=")), "")
    path, _, argument = file.partition(":")
    if file and not os.path.isfile(path):
        recipes = sorted(
            p
            for p in os.listdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "configs"))
            if p.endswith(".py")
        )
        return f"--config={file}: there is no such file; configs/ has {', '.join(recipes)}"
    given = [a.split("=")[0].removeprefix("--config.") for a in argv if a.startswith("--config.")]
    if file and given:
        make = runpy.run_path(path)["get_config"]
        known = _keys(make(argument) if argument else make())
        for key in given:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                meant = f"did you mean {near[0]}?" if near else f"it has: {', '.join(known)}"
                return f"{path} has no key {key!r}; {meant}"
    return " ".join(str(error).split())


def _keys(tree, prefix: str = "") -> list[str]:
    found = []
    for key, value in tree.items():
        found += _keys(value, f"{prefix}{key}.") if hasattr(value, "items") else [prefix + key]
    return found


def main(argv: Sequence[str]) -> int:
    """Runs the mode; returns the exit code: 0 done, 1 failed, 128 + signal if asked to stop."""
    del argv
    # Orbax tells of every file it touches, and of every task that a failed save leaves behind;
    # the failure itself arrives as an exception.
    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    config = _CONFIG.value
    try:
        workdir = resolve_workdir(_WORKDIR.value)
        if config.get("dataset") == "records":
            config.data_dir = resolve_data_dir(config)
    except ValueError as error:
        sys.exit(f"ERROR: {error}")
    config.lock()

    say = logging.getLogger("tpu_suite")
    say.setLevel(logging.INFO)
    say.propagate = False
    say.addHandler(logging.StreamHandler(sys.stdout))
    from engine import mesh, preemption

    mesh.start()
    import doctor
    import evaluate
    import train

    preemption.listen()
    try:
        if _MODE.value == "doctor":
            return doctor.run(config, workdir, _JSON.value)
        if _MODE.value == "eval":
            watch = _EVAL_TIMEOUT.value if _WATCH.value else 0.0
            evaluate.evaluate(config, workdir, _CHECKPOINT.value, watch)
        else:
            train.train_and_evaluate(config, workdir, evaluating=_MODE.value == "train_and_eval")
    except (*train.USER_ERRORS, OSError) as error:
        sys.exit(f"ERROR: {error}")
    except preemption.Preempted as error:
        print(f"{error}; exit code {error.code}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
