"""--mode=import: writes the weights of another library as a checkpoint.

An imported model is a workdir with the checkpoint of step 0, which no training run writes.
"""

import logging

import numpy as np
from etils import epath

from common import foreign
from common.data import storage
from common.errors import CheckpointError, ConfigError
from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.manifest import array_differences, describe_arrays, describe_run
from engine.plan import Programs, Settings, make_plan
from engine.run import Run
from engine.step import model_items, state_of

_log = logging.getLogger("tpu_suite")


def run(settings: Settings) -> None:
    """Imports the weights in `settings.init_from` of another library.

    The checkpoint holds no optimizer: a training run in this workdir begins with its weights.
    """
    folder = epath.Path(settings.workdir) / "checkpoints"
    if folder.exists() and any(p.name.isdigit() for p in folder.iterdir()):
        raise CheckpointError(
            f"--workdir={settings.workdir} has checkpoints: import into another folder"
        )
    programs = Programs.make(settings, trains=False)  # the run is opened when all fits
    benchmark = programs.benchmark
    path = settings.init_from
    file = foreign.find(path, "--config.init_from") if path else ""
    imported = benchmark.uses.read_foreign(file) if file else None
    if imported is None:
        problem = " is not a file or folder of another library's weights, which --mode=import reads"
        if path and not epath.Path(path).exists():
            problem = ": there is no such file or folder"
        raise ConfigError(f"config.init_from={path!r}{problem}")
    num_examples = benchmark.nominal_examples("train") or benchmark.open("train")
    plan = make_plan(settings, benchmark, num_examples)
    state = state_of(imported.params, imported.model_state, plan.step_settings)
    wanted = programs.abstract_state(plan)
    items = (describe_arrays(model_items(s)) for s in (state, wanted))
    if lines := list(array_differences(*items)):  # the classifier is missing
        raise CheckpointError(
            f"{imported.source} is not complete, only weights to begin a run with: {lines[0]}"
        )
    this = Run.open(settings, trains=False)
    _log.info("read %s", imported.summary)
    checkpoints = Checkpointer(str(folder), keep=1, best=lambda: None)
    manifest = describe_run(this.programs, num_examples, imported.metadata)
    for name, content in imported.files.items():
        storage.write(f"{settings.workdir}/{name}", [content])
    if imported.files:  # a model is found where its workdir is, and they are in it
        manifest["config"]["data_dir"] = ""
    checkpoints.save(0, model_items(state), {"step": np.int32(0)}, manifest)
    checkpoints.close()
    _log.info("wrote %s/0: --workdir=%s is a model now", folder, settings.workdir)
