"""Deletes the checkpoints of a finished run, except the best and the last one.

    python -m scripts.job.prune WORKDIR [--dry_run]

The best checkpoint has the highest target metric in the run's metrics.jsonl. The remains of
interrupted saves are deleted as well. The program prints every deletion first. It deletes nothing
if the best checkpoint is not known or if a run uses the workdir.
"""

import dataclasses
import os
import re
import sys

from errors import CheckpointError, UserError, is_of_files, one_line
from ops import console

# Orbax gives a save in progress such a name on disk; on gs:// the save lacks its last file instead.
_UNFINISHED = r"\d+|\d+\.orbax-checkpoint-tmp.*|deleted"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The checkpoints of a workdir: which stay and which are deleted."""

    metric: str  # the first target metric of the run
    steps: list[int]  # complete checkpoints, oldest first
    best: int | None  # None if no checkpoint of the run has been evaluated
    unfinished: list[str]  # names of interrupted saves

    @property
    def remaining(self) -> set[int]:
        """The steps that stay."""
        if len(self.steps) == 1 or self.best is None:
            return set(self.steps)
        return {self.best, self.steps[-1]}

    @property
    def removed(self) -> list[int]:
        """The steps that go, oldest first."""
        return [step for step in self.steps if step not in self.remaining]


def plan(workdir: str) -> Plan:
    """Plans the deletions in the workdir of a run and changes nothing.

    Raises:
      CheckpointError: the checkpoints are missing or cannot be listed, or the best cannot be read.
    """
    from etils import epath

    from engine.checkpoint import Checkpointer
    from engine.report.history import History

    folder = epath.Path(workdir) / "checkpoints"
    if not folder.exists():
        raise CheckpointError(f"no checkpoint in {folder}; is the workdir right?")
    checkpoints = Checkpointer(str(folder), keep=1, best=None)
    try:
        steps = checkpoints.steps()
        if not steps:
            raise CheckpointError(f"no complete checkpoint in {folder}")
        manifest = checkpoints.manifest(steps[-1])
        metric = manifest.get("target_metric")
        if not metric:
            raise CheckpointError(
                f"{folder}/{steps[-1]} does not name the target metric of its run: an older "
                "version wrote it; delete checkpoints by hand"
            )
        history = History(workdir, writes=False)
        history.mend(manifest.get("evaluations", []))
        best = history.best(metric, among=steps)
        if best is not None:
            checkpoints.manifest(best)
    finally:
        checkpoints.close()
    names = {path.name for path in folder.iterdir()} - {str(step) for step in steps}
    return Plan(metric, steps, best, sorted(n for n in names if re.fullmatch(_UNFINISHED, n)))


def prune(workdir: str, dry_run: bool = False) -> Plan:
    """Deletes the checkpoints that `plan` removes, and prints each deletion.

    Args:
      workdir: of a run, local or gs://.
      dry_run: whether to only print the deletions.

    Raises:
      CheckpointError: as `plan`, or a checkpoint cannot be deleted.
      LockError: a run uses the workdir.
    """
    from engine.cluster.lock import take

    checkpoints = plan(workdir)
    _describe(workdir, checkpoints)
    if not checkpoints.removed:  # the remains of interrupted saves stay as well
        return checkpoints
    if dry_run:
        removed = [f"checkpoint {step}" for step in checkpoints.removed]
        for name in (*checkpoints.unfinished, *removed):
            _say(f"would remove {name}")
        return checkpoints
    lock = take(workdir)
    try:
        _remove(workdir, checkpoints)
    finally:
        lock.close()
    return checkpoints


def _remove(workdir: str, pruned: Plan) -> None:
    from engine.checkpoint import Checkpointer

    for name in pruned.unfinished:
        _say(f"removing {name}")
    checkpoints = Checkpointer(  # Orbax deletes interrupted saves when it opens for writing
        os.path.join(workdir, "checkpoints"), keep=len(pruned.steps), best=lambda: pruned.best
    )
    try:
        if not pruned.remaining <= set(checkpoints.steps()):
            raise CheckpointError(f"{workdir} has changed meanwhile; nothing was removed")
        for step in pruned.removed:
            _say(f"removing checkpoint {step}")
            checkpoints.remove(step)
    finally:
        checkpoints.close()
    _say(f"{len(pruned.removed)} removed, {len(pruned.remaining)} kept")


def _describe(workdir: str, pruned: Plan) -> None:
    if len(pruned.steps) == 1:
        _say(f"{workdir} has one checkpoint, step {pruned.steps[0]}: nothing to remove")
    elif pruned.best is None:
        _say(f"{workdir} has no {pruned.metric} of any checkpoint: nothing is removed")
    else:
        steps = (
            f"the best ({pruned.metric}) is step {pruned.best}, the last step {pruned.steps[-1]}"
        )
        _say(f"{workdir}: {steps}" + ("" if pruned.removed else "; nothing to remove"))


def _say(text: str) -> None:
    print(f"prune: {text}", flush=True)


def quiet() -> None:
    """Keeps jax off the TPU, and Orbax and TensorFlow silent; call before they are imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import logging

    from absl import logging as absl_logging

    from engine import environment

    environment.set_defaults()
    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def main(argv: list[str] | None = None) -> int:
    """Prunes a workdir; returns the exit code: 1 after an error."""
    about = "Deletes the checkpoints of a finished run, except the best and the last one."
    parser = console.Parser(prog="prune", allow_abbrev=False, description=about)
    parser.add_argument("workdir", metavar="WORKDIR", help="local or gs://")
    parser.add_argument("--dry_run", action="store_true", help="only print the deletions")
    arguments = parser.parse_args(argv)
    quiet()
    try:
        prune(arguments.workdir, arguments.dry_run)
    except Exception as error:
        if not (isinstance(error, UserError) or is_of_files(error)):
            raise
        print(f"prune: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    console.run(lambda: sys.exit(main()))
