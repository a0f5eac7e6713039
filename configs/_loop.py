"""Keys of the training loop, which every benchmark's configuration has.

Durations are steps, or strings such as '500', '90 epochs', '1e6 examples'; cadences may also be
times such as '10 minutes' or lists such as '32, 42.7, 48 epochs', and '' is never.

`engine.plan.LoopKeys` declares and checks these keys; the other keys of a recipe are in the
`Settings` of its benchmark.
"""

from collections.abc import Mapping
from typing import Any

import ml_collections


def choose_recipe(recipes: Mapping[str, Any], name: str, file: str) -> Any:
    """The entry that --config=FILE:NAME chooses from the `recipes` of a file.

    ValueError lists the names if there is no such recipe.
    """
    if name not in recipes:
        path = f"configs/{file.rpartition('/')[2]}"
        raise ValueError(
            f"--config={path}:{name}: there is no such recipe; give --config={path}:NAME, where "
            f"NAME is one of {', '.join(recipes)}"
        )
    return recipes[name]


def get_config() -> ml_collections.ConfigDict:
    """All keys of the loop; a recipe sets the values that differ and adds its benchmark's keys."""
    config = ml_collections.ConfigDict()
    config.seed = 0  # of all that is random
    config.train_batch_size = 1024  # examples of a step, over all devices
    # Micro-batches that one step adds up; 'auto': the fewest with which it fits the memory.
    config.gradient_accumulation_steps = ml_collections.FieldReference(1, field_type=object)
    config.train_steps = "90 epochs"  # how long to train
    # A workdir: train for as many steps as its best evaluation had; for a last run on all data.
    config.steps_of = ""
    # < 1: train on a part of the data; its seed draws it, and smaller parts are in larger ones.
    config.train_fraction = 1.0
    config.train_fraction_seed = 0  # draws that part
    _initial_weights(config)
    _optimizer(config)
    _learning_rate(config)

    # Evaluation, checkpoints, reports.
    config.eval_batch_size = 128  # over all devices
    config.moving_average_decay = 0.0  # > 0: evaluate an average of the weights
    config.moving_average_every = 1  # steps between its updates; the decay is per update
    config.stop_at_target = False  # True: the run ends when it reaches its target
    # The score that chooses the best checkpoint; 'macro_f1', 'AP75', or '' for the target's.
    config.best_by = ""  # `patience` goes by it, too
    config.patience = 0  # > 0: stop after so many evaluations without a better score
    config.steps_per_eval = "1 epoch"  # how often to evaluate
    config.eval_offset = ""  # when the first evaluation is; '' = after steps_per_eval
    config.steps_per_checkpoint = "1 epoch"  # how often to save
    config.keep_checkpoints = 3  # how many of the newest stay; the best one stays as well
    config.log_step_count_steps = "100"  # how often to log
    config.tracker = ""  # or 'wandb'; it reads the run's events (docs/run.md)
    config.profile_steps = ""  # 'begin:end': a trace of these steps
    # > 0: all devices are compared every so many steps (docs/run.md).
    config.check_devices_every = 0

    # Hosts.
    config.watchdog_seconds = 900.0  # without a step: stacks are written; twice as long: the end
    config.host_memory_limit = 0.95  # a fuller host saves and stops
    config.hosts_wait_seconds = 300.0  # how long to wait for all hosts
    config.host_silence_seconds = 60.0  # so long without a sign: a host counts as dead
    # Compiled programs for the next start, outside the workdir; local or gs://, '' keeps none.
    config.compilation_cache = "~/.cache/tpu_suite"

    # The log of an MLPerf run, docs/mlperf.md; run_and_time.sh sets the first three.
    config.mlperf = ml_collections.ConfigDict()
    config.mlperf.format = ""  # 'mllog', 'v0.5' (NCF: only this), or '' for no log
    config.mlperf.org = ""  # who runs it
    config.mlperf.clear_caches = False  # drop the hosts' file caches first; needs root or sudo
    config.mlperf.platform = ""  # name of the system; '' = number and kind of the devices
    config.mlperf.division = "closed"  # or 'open'
    config.mlperf.status = "cloud"  # or 'onprem', 'preview', 'research'
    return config


def _initial_weights(config: ml_collections.ConfigDict) -> None:
    # True: goes on although the data's classes or vocabulary are not the checkpoint's; the
    # checkpoint is the one that the run begins with, or that it evaluates.
    config.accept_other_data = False
    # Weights to begin with: a workdir, a checkpoint, or others' weights (docs/use.md). They are not
    # loaded where the run resumes.
    config.init_from = ""
    # Parts of the model that begin at random all the same; by name: 'head', 'stage4, head'.
    config.init_without = ""
    # Parts that never change; by name: 'stem, stage1'. common/trees.py says what a name means.
    config.freeze = ""
    # The environment variable for an empty init_from; MLPerf's detectors have
    # MLP_GCS_RESNET_CHECKPOINT.
    config.init_env = ""


def _optimizer(config: ml_collections.ConfigDict) -> None:
    """The formulas are in engine/optim.py."""
    config.optimizer = "sgd"  # or 'lars', 'adam', 'lamb'
    config.momentum = 0.9  # of 'sgd' and 'lars'
    config.nesterov = False  # only 'sgd'
    config.weight_decay = 0.0  # of 'sgd', 'lars' and 'lamb'; 'adam' does not use it
    # True: 'sgd' decays the weights apart from the gradient. A step shrinks them by weight_decay *
    # rate / peak rate. The same effect needs a weight_decay of peak rate / (1 - momentum) times the
    # other.
    config.decoupled_decay = False
    config.lars_trust_coefficient = 0.001  # of 'lars': multiplies the ratio of norms
    config.lars_epsilon = 0.0  # of 'lars': added to the norm of the gradient
    config.adam_beta1 = 0.9  # of 'adam' and 'lamb': the decay of the mean gradient
    config.adam_beta2 = 0.999  # of its mean square
    config.adam_epsilon = 1e-8  # added to the root of that
    config.gradient_clip_norm = 0.0  # a gradient with a larger norm is scaled down; 0 = off
    # True: clip the gradient of each device before the mean; as MLPerf's GNMT.
    config.gradient_clip_per_device = False
    # Of gradients while they are added over devices; 'bfloat16' halves what the devices exchange.
    config.gradient_precision = "float32"


def _learning_rate(config: ml_collections.ConfigDict) -> None:
    """The formulas are in engine/schedules.py."""
    config.learning_rate_schedule = "step"  # or 'cosine', 'polynomial', 'rsqrt'
    # The peak; 'rsqrt' is base_learning_rate / sqrt(steps), with the model's width ** -0.5 in it.
    config.base_learning_rate = 0.1
    # base_learning_rate is for so many examples in a batch; 0: it is for any batch size.
    config.learning_rate_per = 0
    # The length of training that all epochs below refer to; a run of another length stretches them.
    config.schedule_epochs = 90
    config.warmup_epochs = 0.0  # the rate rises for so long
    config.warmup_steps = ""  # a duration instead, which is not stretched
    config.warmup_shape = "linear"  # or 'exponential'
    config.warmup_from = 0.0  # the first rate; 'exponential' replaces 0 by a hundredth of the peak
    config.learning_rate_decay_epochs = ()  # when 'step' lowers the rate; none: it is constant
    config.learning_rate_decay_steps = ""  # durations instead, '9000, 12000', not stretched
    config.learning_rate_decay_factors = (0.1,)  # by what; one for all boundaries, or one for each
    # Only 'polynomial': how long it decays after the warm-up; stretched like the epochs. '' = to
    # the end of the run.
    config.decay_steps = ""
    config.end_learning_rate = 0.0  # to which rate
    config.polynomial_power = 2.0  # with which power of the time left
