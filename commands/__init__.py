"""What each value of --mode does, and what it needs: `main.py` reads everything from this table."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Mode:
    """What a value of --mode does, and what it needs."""

    # "module:function", imported when the mode is chosen. It takes the settings of the run (the
    # workdir, where a recipe is refused) and what `arguments` makes of the values of `flags`. If it
    # returns an integer, that is the exit code.
    function: str
    summary: str  # for --help
    flags: tuple[str, ...] = ()  # modes that do not list a flag refuse it
    arguments: Callable[..., tuple[Any, ...]] = lambda *values: values
    # "optional": the workdir's checkpoint may hold it.
    recipe: Literal["required", "optional", "refused"] = "required"
    workdir: Literal["required", "optional", "unused"] = "required"  # "optional": only --workdir
    reads_data: bool = True  # whether it needs the folder of the data
    # "joined": all hosts of the run work together. "unjoined": the function joins them itself and
    # gets (host, facts) as its last argument. "alone": on one host.
    hosts: Literal["joined", "unjoined", "alone"] = "joined"


MODES = {
    "train_and_eval": Mode("train:train_and_evaluate", "the default"),
    "train": Mode(
        "train:train_and_evaluate",
        "train, and leave the evaluation to another process",
        arguments=lambda: (False,),
    ),
    "eval": Mode(
        "engine.evaluate:evaluate",
        "evaluate a checkpoint",
        ("checkpoint", "watch", "eval_timeout"),
        arguments=lambda checkpoint, watch, seconds: (checkpoint, seconds if watch else 0.0),
    ),
    "import": Mode(
        "commands.importing:run",
        "write the weights of another library, --config.init_from=FILE, as a checkpoint",
        reads_data=False,
    ),
    "export": Mode(
        "commands.export:run",
        "write the trained model for other programs (without --config)",
        ("checkpoint", "format", "out", "allow_mismatch", "accept_other_data", "overwrite"),
        recipe="refused",
        hosts="alone",
    ),
    "report": Mode(
        "commands.report:report",
        "write a page about the run, WORKDIR/report/report.html (with or without --config)",
        ("checkpoint",),
        recipe="optional",
    ),
    "scaling": Mode(
        "commands.scaling.parts:run",
        "train on nested parts of the data, and say what twice as much would bring",
        ("seeds",),
    ),
    "doctor": Mode(
        "commands.doctor:run",
        "look for what would stop the run, and say how to fix it",
        ("json", "full"),
        hosts="unjoined",
    ),
    "preflight": Mode(
        "commands.preflight:run",
        "compile the steps for TPUs that are not here, and say whether they fit and how fast they "
        "would be",
        ("tpu", "json", "chip_hour_price"),
        workdir="unused",
        reads_data=False,
        hosts="alone",
    ),
    "prove": Mode(
        "commands.prove:run",
        "check on this machine's devices what the tests check on CPUs (without --config)",
        ("short", "out"),
        recipe="refused",
        workdir="optional",
        hosts="alone",
    ),
}
