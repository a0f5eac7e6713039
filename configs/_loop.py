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
    config.seed = 0  # of all random numbers
    config.train_batch_size = 1024  # examples per step, over all devices
    # Number of micro-batches in a step; 'auto': the fewest with which it fits the memory.
    config.gradient_accumulation_steps = ml_collections.FieldReference(1, field_type=object)
    config.train_steps = "90 epochs"  # how long to train
    # A workdir: train for as many steps as its best evaluation had; for a last run on all data.
    config.steps_of = ""
    # < 1: train on a part of the data; its seed draws it, and smaller parts are in larger ones.
    config.train_fraction = 1.0
    config.train_fraction_seed = 0  # seed of that part
    _initial_weights(config)
    _optimizer(config)
    _learning_rate(config)

    # Evaluation, checkpoints, reports.
    config.eval_batch_size = 128  # examples per evaluation step, over all devices
    config.moving_average_decay = 0.0  # > 0: evaluate an exponential moving average (EMA)
    config.moving_average_every = 1  # steps between updates of the EMA; the decay is per update
    config.stop_at_target = False  # True: the run ends when it reaches its target
    # The score that chooses the best checkpoint; 'macro_f1', 'AP75', or '' for the target's.
    config.best_by = ""  # `patience` goes by it, too
    config.patience = 0  # > 0: early stopping after so many evaluations without a better score
    config.steps_per_eval = "1 epoch"  # how often to evaluate
    config.eval_offset = ""  # when the first evaluation is; '' = after steps_per_eval
    config.steps_per_checkpoint = "1 epoch"  # how often to save
    config.keep_checkpoints = 3  # newest checkpoints to keep, besides the best
    config.log_step_count_steps = "100"  # how often to log
    config.tracker = ""  # 'wandb': Weights & Biases shows the run; from its events (docs/run.md)
    config.profile_steps = ""  # 'begin:end': profile these steps
    # > 0: compare all devices bit for bit every so many steps (docs/run.md).
    config.check_devices_every = 0

    # Hosts.
    config.watchdog_seconds = 900.0  # so long without a step: write stacks; twice: the end
    config.host_memory_limit = 0.95  # a host fuller than this saves and stops
    config.hosts_wait_seconds = 300.0  # how long to wait for all hosts
    config.host_silence_seconds = 60.0  # a host silent for so long counts as dead
    # Compiled programs for the next start, outside the workdir; local or gs://, '' keeps none.
    config.compilation_cache = "~/.cache/tpu_suite"

    # The log of an MLPerf run, docs/mlperf.md; run_and_time.sh sets the first three and status.
    config.mlperf = ml_collections.ConfigDict()
    config.mlperf.format = ""  # 'mllog', 'v0.5' (NCF: only this), or '' for no log
    config.mlperf.org = ""  # the submitter
    config.mlperf.clear_caches = False  # drop the hosts' file caches first; needs root or sudo
    config.mlperf.platform = ""  # the system's name; '' = number and kind of the devices
    config.mlperf.division = "closed"  # or 'open'
    config.mlperf.status = "cloud"  # or 'onprem', 'preview', 'research'
    return config


def _initial_weights(config: ml_collections.ConfigDict) -> None:
    # True: accept data with other classes or vocabulary than the checkpoint's; the
    # checkpoint is the one that the run begins with, or that it evaluates.
    config.accept_other_data = False
    # Weights to begin with: a workdir, a checkpoint, or others' weights (docs/use.md). They are not
    # loaded where the run resumes.
    config.init_from = ""
    # Parts of the model that `init_from` leaves at random; by name: 'head', 'stage4, head'.
    config.init_without = ""
    # Frozen parts of the model; by name: 'stem, stage1'. common/trees.py says what a name means.
    config.freeze = ""
    # Environment variable to use without init_from; MLPerf's detectors have
    # MLP_GCS_RESNET_CHECKPOINT.
    config.init_env = ""


def _optimizer(config: ml_collections.ConfigDict) -> None:
    """The formulas are in engine/optim.py."""
    config.optimizer = "sgd"  # or 'lars', 'adam', 'lamb'
    config.momentum = 0.9  # of 'sgd' and 'lars'
    config.nesterov = False  # only 'sgd'
    config.weight_decay = 0.0  # of 'sgd', 'lars' and 'lamb'; 'adam' does not use it
    # True: decoupled weight decay of 'sgd'. A step shrinks them by weight_decay *
    # rate / peak rate. The same effect needs a weight_decay of peak rate / (1 - momentum) times the
    # other.
    config.decoupled_decay = False
    config.lars_trust_coefficient = 0.001  # of 'lars': multiplies the ratio of norms
    config.lars_epsilon = 0.0  # of 'lars': added to the norm of the gradient
    config.adam_beta1 = 0.9  # of 'adam' and 'lamb': the decay of the mean gradient
    config.adam_beta2 = 0.999  # decay of the mean squared gradient
    config.adam_epsilon = 1e-8  # added to the root of the mean square
    config.gradient_clip_norm = 0.0  # a gradient with a larger norm is scaled down; 0 = off
    # True: clip the gradient of each device before the mean; as MLPerf's GNMT.
    config.gradient_clip_per_device = False
    # Precision in which devices add their gradients; 'bfloat16' halves what the devices exchange.
    config.gradient_precision = "float32"


def _learning_rate(config: ml_collections.ConfigDict) -> None:
    """The formulas are in engine/schedules.py."""
    config.learning_rate_schedule = "step"  # or 'cosine', 'polynomial', 'rsqrt'
    # The peak; 'rsqrt' is base_learning_rate / sqrt(steps), with the model's width ** -0.5 in it.
    config.base_learning_rate = 0.1
    # > 0: base_learning_rate is for batches of this size; 0: it is for any batch size.
    config.learning_rate_per = 0
    # All epochs below are for a run of this length, and scale to another.
    config.schedule_epochs = 90
    config.warmup_epochs = 0.0  # length of the warm-up
    config.warmup_steps = ""  # the warm-up as a duration, which does not scale
    config.warmup_shape = "linear"  # or 'exponential'
    config.warmup_from = 0.0  # the first step's rate; 'exponential': 0 is a hundredth of the peak
    config.learning_rate_decay_epochs = ()  # when 'step' lowers the rate; none: it is constant
    config.learning_rate_decay_steps = ""  # as durations, '9000, 12000', which do not scale
    config.learning_rate_decay_factors = (0.1,)  # multiply the rate; one for all or one for each
    # Only 'polynomial': how long it decays after the warm-up; stretched like the epochs. '' = to
    # the end of the run.
    config.decay_steps = ""
    config.end_learning_rate = 0.0  # only 'polynomial': the last rate
    config.polynomial_power = 2.0  # only 'polynomial': the power of the time left
