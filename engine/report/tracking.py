"""Lets wandb follow a run's TensorBoard events, with its own sync."""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from engine.cluster import watchdog
from errors import one_line


@contextlib.contextmanager
def synced(workdir: str, recipe: Any, say: Callable[[str], None]) -> Iterator[None]:
    """Has wandb read the events that the block writes to the workdir, local or gs://.

    wandb notices only writers that are made after its start. Whatever it raises becomes one line,
    and the block goes on. WORKDIR/wandb_id.txt names wandb's run, which a resumed run continues.
    """
    run: Any = None
    code = 1
    try:
        with watchdog.during("starting wandb"):
            run = _start(workdir, recipe)
    except Exception as error:  # of the package, of its server, of the disk
        say(f"NOTE config.tracker=wandb: {one_line(error)}; the run goes on without it")
    try:
        yield
        code = 0
    finally:
        try:
            with watchdog.during("sending the last rows to wandb"):
                if run:
                    run.finish(exit_code=code)
        except Exception as error:
            say(f"NOTE config.tracker=wandb: {one_line(error)}; it may lack the last rows")


def _start(workdir: str, recipe: Any) -> Any:
    wandb: Any = importlib.import_module("wandb")  # an optional package
    wandb.tensorboard.patch(root_logdir=workdir)  # else it warns of folders outside its own
    file = epath.Path(workdir) / "wandb_id.txt"
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or recipe["benchmark"],
        name=os.environ.get("WANDB_NAME") or os.path.basename(workdir.rstrip("/")),
        id=file.read_text().strip() if file.exists() else None,
        resume="allow",
        dir=os.environ.get("WANDB_DIR") or (None if "://" in workdir else workdir),
        config=recipe,
        sync_tensorboard=True,
        settings={
            **{"console": "off", "login_timeout": 20, "init_timeout": 30},  # seconds
            **{"finish_timeout": 20, "finish_timeout_raises": True},
        },
    )
    file.write_text(f"{run.id}\n")
    return run
