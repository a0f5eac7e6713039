"""Deletes a finished run's checkpoints, but for the best and the last one.

    python scripts/prune.py WORKDIR [--dry_run]

The best is the one with the highest target metric in the run's own metrics.jsonl. What saves that
were cut short have left behind goes as well. Every deletion is printed before it is done, and
nothing at all is deleted where the best is not known or a run has the workdir.
"""

import dataclasses
import os
import re
import sys

from errors import one_line
from scripts import console

# By what Orbax names a save under way on disk; on gs:// it lacks its last file instead.
_UNFINISHED = r"\d+|\d+\.orbax-checkpoint-tmp.*|deleted"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is in a workdir's folder of checkpoints and what is to become of it."""

    metric: str  # the run's target metric
    steps: list[int]  # complete checkpoints, oldest first
    best: int | None  # None if no checkpoint of the run has been evaluated
    unfinished: list[str]  # names of what is no complete checkpoint

    @property
    def kept(self) -> set[int]:
        """The steps that stay."""
        if len(self.steps) == 1 or self.best is None:
            return set(self.steps)
        return {self.best, self.steps[-1]}

    @property
    def removed(self) -> list[int]:
        """The steps that go, oldest first."""
        return [step for step in self.steps if step not in self.kept]


def plan(workdir: str) -> Plan:
    """Looks, and changes nothing.

    Raises:
      CheckpointError: there is no checkpoint, they cannot be listed, or one that would stay cannot
        be read.
    """
    from etils import epath

    from engine.checkpoint import Checkpointer, CheckpointError
    from engine.report.history import History

    folder = epath.Path(workdir) / "checkpoints"
    if not folder.exists():
        raise CheckpointError(f"no checkpoint in {folder}; is the workdir right?")
    checkpoints = Checkpointer(str(folder), keep=1, best=None)
    try:
        steps = checkpoints.steps()
        if not steps:
            raise CheckpointError(f"no complete checkpoint in {folder}")
        metric = checkpoints.manifest(steps[-1]).get("target_metric")
        if not metric:
            raise CheckpointError(
                f"{folder}/{steps[-1]} does not say which metric its run aims at: it was written "
                "by an older version; delete checkpoints by hand"
            )
        best = History(workdir, writes=False).best(metric, among=steps)
        if best is not None:
            checkpoints.manifest(best)
    finally:
        checkpoints.close()
    names = {path.name for path in folder.iterdir()} - {str(step) for step in steps}
    return Plan(metric, steps, best, sorted(n for n in names if re.fullmatch(_UNFINISHED, n)))


def prune(workdir: str, dry_run: bool = False) -> Plan:
    """Deletes what `plan` says, telling each.

    Args:
      workdir: of a run, local or gs://.
      dry_run: only tell.

    Raises:
      CheckpointError: as `plan`, or something cannot be deleted.
      LockError: a run is writing there.
    """
    from engine.cluster.lock import Lock

    found = plan(workdir)
    _describe(workdir, found)
    if not found.removed:  # also what is unfinished stays beside an only checkpoint
        return found
    if dry_run:
        for what in (*found.unfinished, *(f"checkpoint {step}" for step in found.removed)):
            _say(f"would remove {what}")
        return found
    lock = Lock(workdir)
    try:
        _remove(workdir, found)
    finally:
        lock.close()
    return found


def _remove(workdir: str, found: Plan) -> None:
    from engine.checkpoint import Checkpointer, CheckpointError

    for name in found.unfinished:
        _say(f"removing {name}")
    checkpoints = Checkpointer(  # opened for writing, Orbax deletes what is not complete
        os.path.join(workdir, "checkpoints"), keep=len(found.steps), best=lambda: found.best
    )
    try:
        if not found.kept <= set(checkpoints.steps()):
            raise CheckpointError(f"{workdir} has changed meanwhile; nothing was removed")
        for step in found.removed:
            _say(f"removing checkpoint {step}")
            checkpoints.remove(step)
    finally:
        checkpoints.close()
    _say(f"{len(found.removed)} removed, {len(found.kept)} kept")


def _describe(workdir: str, found: Plan) -> None:
    if len(found.steps) == 1:
        _say(f"{workdir} has one checkpoint, step {found.steps[0]}: nothing to remove")
    elif found.best is None:
        _say(f"{workdir} has no {found.metric} of any checkpoint: nothing is removed")
    else:
        kept = f"the best ({found.metric}) is step {found.best}, the last step {found.steps[-1]}"
        _say(f"{workdir}: {kept}" + ("" if found.removed else "; nothing to remove"))


def _say(text: str) -> None:
    print(f"prune: {text}", flush=True)


def quiet() -> None:
    """Keeps jax off the TPU, and Orbax and TensorFlow silent; call before they are imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    import logging

    from absl import logging as absl_logging

    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def main(argv: list[str] | None = None) -> int:
    """Prunes; returns the exit code: 1 if that was not possible."""
    about = "Deletes a finished run's checkpoints, but for the best and the last one."
    parser = console.Parser(prog="prune", allow_abbrev=False, description=about)
    parser.add_argument("workdir", metavar="WORKDIR", help="local or gs://")
    parser.add_argument("--dry_run", action="store_true", help="only say what would be deleted")
    given = parser.parse_args(argv)
    quiet()
    try:
        prune(given.workdir, given.dry_run)
    except (RuntimeError, ValueError, OSError) as error:
        print(f"prune: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
