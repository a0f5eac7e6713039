"""What each value of --mode does, and what it needs: `main.py` reads everything from this table."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Mode:
    """What a value of --mode does, and what it needs.

    Attributes:
      function: "module:function", imported when the mode is chosen. Its arguments are the settings
        of the run (the workdir, where a recipe is refused) and the values of `flags`. If it returns
        an integer, that is the exit code.
      summary: for --help.
      flags: those that other modes refuse, unless they have them, too.
      arguments: makes the function's arguments from the values of `flags`.
      recipe: "required"; "optional", where the workdir's checkpoint holds one; or "refused".
      workdir: "required"; "optional", where only --workdir names one; or "unused".
      reads_data: whether it needs the folder of the data.
      hosts: "joined", all hosts of the run work together; "unjoined", the function joins them
        itself and gets (host, facts) as its last argument; "alone", on one host.
    """

    function: str
    summary: str
    flags: tuple[str, ...] = ()
    arguments: Callable[..., tuple[Any, ...]] = lambda *values: values
    recipe: Literal["required", "optional", "refused"] = "required"
    workdir: Literal["required", "optional", "unused"] = "required"
    reads_data: bool = True
    hosts: Literal["joined", "unjoined", "alone"] = "joined"


MODES = {
    "train_and_eval": Mode("train:train_and_evaluate", "the default"),
    "train": Mode(
        "train:train_and_evaluate",
        "train, and leave the evaluation to another process",
        arguments=lambda: (False,),
    ),
    "eval": Mode(
        "commands.evaluating:evaluate",
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
        ("checkpoint", "format", "out", "allow_mismatch", "accept_other_data"),
        recipe="refused",
        hosts="alone",
    ),
    "report": Mode(
        "commands.report:report",
        "write a page about the run, WORKDIR/report/report.html (with or without --config)",
        ("checkpoint",),
        recipe="optional",
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
