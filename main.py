"""Trains and evaluates: python main.py --config=configs/resnet50.py --workdir=DIR."""

import scripts  # isort: skip # noqa: F401 (first: a Python without the packages gets one line)

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from absl import app, flags
from ml_collections import config_flags

from commands import MODES, Mode, recipe
from common import entry
from common.errors import ConfigError
from engine import environment, locations

environment.set_defaults()  # before jax; functions import what imports it, so that --help is quick

_log = logging.getLogger("tpu_suite")
config_flags.DEFINE_config_file(  # here, so that --help lists it
    "config", None, "Recipe: a file in configs/. Override a key with --config.KEY=VALUE."
)
_CONFIG = recipe.Flag(flags.FLAGS["config"])
_WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Folder, local or gs://, for everything the run writes. Default: $TPU_MODEL_DIR, else "
    "$PS_MODEL_PATH, else $MLP_GCS_MODEL_DIR.",
)
_MODE = flags.DEFINE_enum(
    "mode",
    "train_and_eval",
    [*MODES],
    "; ".join(f"{name}: {mode.summary}" for name, mode in MODES.items()),
)
flags.DEFINE_string(
    "checkpoint", "latest", "With --mode=eval, export or report: latest, best or a step."
)
flags.DEFINE_bool("watch", False, "With --mode=eval: also evaluate new checkpoints as they appear.")
flags.DEFINE_float(
    "eval_timeout", 3600.0, "With --watch: stop after this many seconds without a new checkpoint."
)
flags.register_validator("eval_timeout", lambda seconds: seconds > 0, "must be more than 0 seconds")
flags.DEFINE_string(
    "format",
    "",
    "With --mode=export: one or more of hf, onnx, savedmodel, stablehlo, ctranslate2; not every "
    "model has all. Default: savedmodel,stablehlo.",
)
flags.DEFINE_string(
    "out",
    "",
    "Folder, local or gs://. With --mode=export: default WORKDIR/export. With --mode=prove: of "
    "prove.json, default --workdir, else the current folder.",
)
flags.DEFINE_bool("short", False, "With --mode=prove: smaller models, for CPUs.")
flags.DEFINE_bool(
    "allow_mismatch",
    False,
    "With --mode=export --format=hf: write a model that PyTorch computes differently.",
)
flags.DEFINE_bool("overwrite", False, "With --mode=export: replace an earlier export in --out.")
flags.DEFINE_bool(
    "accept_other_data",
    False,
    "With --mode=export: also where the data have other classes than the model by now.",
)
flags.DEFINE_string(
    "tpu", "", "With --mode=preflight: slices such as v5e:4x4 or v3-32, with commas; or all."
)
flags.DEFINE_float(
    "chip_hour_price",
    None,
    "With --mode=preflight: US dollars for an hour of one chip; Google's list price by default.",
)
flags.register_validator(
    "chip_hour_price", lambda price: price is None or 0 <= price <= 1e6, "must be 0 to 1e6 dollars"
)
flags.DEFINE_integer(
    "seeds", 1, "With --mode=scaling: train the small parts so often, each with another seed."
)
flags.register_validator("seeds", lambda seeds: 1 <= seeds <= 100, "must be 1 to 100")
_JSON = flags.DEFINE_bool("json", False, "With --mode=doctor or preflight: print JSON.")
flags.DEFINE_bool(
    "full", False, "With --mode=doctor: read all records, and write the index that the run reads."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator",
    "",
    "host:port of process 0, if neither a TPU slice nor srun, mpirun or torchrun says it.",
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", 0, "With --coordinator: how many.")
_PROCESS_ID = flags.DEFINE_integer("process_id", -1, "With --coordinator: which one, from 0.")


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses the command line; a mistake ends the program with one line."""
    try:
        recipe.check_command(argv)
        words = flags.FLAGS(argv)
        _check_flags()
        if len(words) > 1:
            raise ConfigError(f"unexpected argument {words[1]!r}: values are given as --NAME=VALUE")
        return words
    except Exception as error:  # of absl, of the recipe's own code, or of these checks
        import resnet_main  # few command lines need it: it knows the flags of the TPU tutorial

        text = recipe.explain(argv, error, _CONFIG.own, resnet_main.hint)
        sys.exit(f"ERROR: {ConfigError(text)}")
    except SystemExit as error:
        if error.code:  # --help has the code 1
            raise
        sys.exit("ERROR: the recipe ends the program, but must return its config")


def _check_flags() -> None:
    """Refuses a command without the recipe that its mode needs, and flags of other modes."""
    chosen, mode, given = _CONFIG.recipe, MODES[_MODE.value], f"--mode={_MODE.value}"
    if chosen is None and mode.recipe == "required":
        raise ConfigError("which recipe? Give --config=configs/resnet50.py (or another there)")
    if chosen and mode.recipe == "refused":
        where = ": the workdir has it" if mode.workdir == "required" else ""
        raise ConfigError(f"{given} takes no --config{where}")
    if chosen and "benchmark" not in chosen.own:
        raise ConfigError("--config names no recipe: the file sets no config.benchmark")
    for flag in {flag: None for row in MODES.values() for flag in row.flags}:
        if flags.FLAGS[flag].present and flag not in mode.flags:
            owners = [f"--mode={owner}" for owner, row in MODES.items() if flag in row.flags]
            raise ConfigError(f"--{flag} goes with {' or '.join(owners)}, not with {given}")


def main(argv: Sequence[str]) -> int:
    """Runs the mode; returns the exit code: 0 done, 128 + signal stopped, others failed."""
    del argv
    mode = MODES[_MODE.value]
    # The output of --json is for programs, and what is said before the mode begins is not for them.
    stream, level = (sys.stderr, logging.WARNING) if _JSON.value else (sys.stdout, logging.INFO)
    terminal = environment.show_log(stream, level)
    needed = mode.workdir == "required" or (mode.workdir == "optional" and _WORKDIR.value)
    workdir = locations.workdir(_WORKDIR.value) if needed else ""
    if os.environ.get("TPU_GRPC_URL") and mode.hosts == "joined":
        print("NOTE TPU_GRPC_URL is set; a TPU VM does not use it")
    return _run(mode, workdir, terminal)


def _run(mode: Mode, workdir: str, terminal: logging.Handler) -> int:
    """Runs the mode together with the other processes; a failure of one ends all of them."""
    from engine.cluster import guard, hosts, preemption, processes
    from engine.devices import explain_full_memory

    host = None  # this process among the hosts of the run; None if it is alone
    if mode.hosts != "alone":
        host = hosts.find(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
    preemption.listen(lambda code, reason: processes.fail(reason, code))
    try:
        code = _run_mode(mode, workdir, host, terminal)
    except (preemption.Preempted, guard.MemoryFull) as error:
        if not getattr(error, "agreed", True):
            processes.fail(str(error), error.code)  # the other processes do not stop by themselves
        print(f"{error}; exit code {error.code}", file=sys.stderr)
        code = error.code
    except Exception as error:
        processes.fail_with(explain_full_memory(error) or error)
        raise
    processes.finish(code)


def _run_mode(mode: Mode, workdir: str, host: Any, terminal: logging.Handler) -> int:
    """Calls the mode's function; returns the exit code."""
    from commands import configuration
    from engine.cluster import processes
    from engine.cluster.hosts import watch_for_notice
    from engine.devices import gpu_obstacle, tpu_chips

    values = mode.arguments(*(flags.FLAGS[flag].value for flag in mode.flags))
    settings = None
    if mode.recipe != "refused":
        settings = configuration.resolve(_CONFIG.recipe, _MODE.value, workdir)
    arguments = [workdir if settings is None else settings, *values]
    if settings is not None and mode.hosts != "alone":
        equal = {"workdir": workdir, "mode": _MODE.value}
        if host:  # one host alone has nothing to compare
            equal |= processes.run_facts(settings.config)
        if mode.hosts == "unjoined":
            arguments.append(host and (host, equal))
        elif host:
            waits = settings.hosts_wait_seconds, settings.host_silence_seconds
            processes.join(host, equal, *waits)
        if tpu_chips():
            watch_for_notice()
        elif mode.hosts == "joined" and gpu_obstacle()[0]:
            _log.info("NOTE %s: %s", *gpu_obstacle())
    # From here on process 0 prints what all of them would print.
    terminal.setLevel(logging.WARNING if host and host.index else logging.INFO)
    module, _, function = mode.function.partition(":")
    result = getattr(importlib.import_module(module), function)(*arguments)
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    entry.run(lambda: app.run(main, flags_parser=parse_flags))
