"""ResNet-50 as MLPerf Training ran it: --config=configs/mlperf_resnet50.py:NAME.

NAME is a batch size for which MLPerf publishes a reference convergence point (RCP), or one of
Google's own entries in `ENTRIES`. No run here has verified these recipes; docs/mlperf.md says
what to expect.
"""

import math

import ml_collections

from configs import resnet50
from configs._loop import choose_recipe

_IMAGES = 1_281_167
_PERIOD = 4  # epochs between evaluations, by the rules

# The RCPs of mlperf-logging (rulesets 1.0.0 to 4.0.0), all of them LARS. By batch: mean epochs of
# the reference runs, and the least mean that a submission may have (0: not published); base rate,
# warm-up epochs, momentum, weight decay; steps of decay after the warm-up; and how many images
# share BatchNorm statistics.
POINTS = {
    1632: (35.00, 33.80, 7.4, 2, 0.9, 5e-5, 27476, 204),
    2048: (38.38, 0.0, 8.5, 5, 0.9, 2e-4, 22530, 64),  # 2e-3 is stored, surely a mistake
    3264: (35.15, 34.31, 10.5, 2, 0.9, 5e-5, 14523, 204),
    4096: (39.88, 38.63, 10.0, 5, 0.9, 2e-4, 13137, 64),
    8192: (41.88, 40.63, 17.0, 5, 0.9, 2e-4, 6095, 64),
    13056: (45.50, 44.68, 12.8, 9, 0.9, 2.5e-5, 4710, 204),
    32768: (56.00, 55.44, 21.2, 16, 0.94, 2.5e-5, 2267, 128),
    49152: (68.00, 67.22, 19.405, 24, 0.951807, 1e-4, 1846, 256),
    58880: (80.00, 78.97, 23.246, 29, 0.951807, 1e-4, 1785, 230),
    # Only ruleset 1.0.0 has this point, with 90 decay steps: 90 epochs.
    64480: (86.12, 84.95, 26.0, 31, 0.951807, 1e-4, 1788, 155),
    65536: (84.50, 83.36, 24.699, 31, 0.951807, 1e-4, 1133, 128),
    67840: (85.85, 85.18, 24.699, 31, 0.951807, 1e-4, 1133, 424),
}

# Entries that are no RCP: (batch, BatchNorm span in images, first and last epoch that reached the
# target). With a span of 0 each device has statistics of its share alone.
ENTRIES = {
    "v0.5": (1024, 0, 60, 62),
    "v0.7-4096": (4096, 128, 38, 38),
    "v0.7-65536": (65536, 64, 88, 92),
}


def get_config(name: str = "") -> ml_collections.ConfigDict:
    """The configuration of one recipe: a batch size of `POINTS`, or a key of `ENTRIES`."""
    entries = {"v0.5": _v05, "v0.7-4096": _v07_4096, "v0.7-65536": _v07_65536}
    points = {str(batch): batch for batch in POINTS}
    batch = choose_recipe(points | entries, name, __file__)
    if name in entries:
        return entries[name]()
    mean, _, base, warmup, momentum, weight_decay, decay, span = POINTS[batch]
    config = _lars(batch, span)
    config.base_learning_rate = base
    config.warmup_epochs = float(warmup)
    config.momentum = momentum
    config.weight_decay = weight_decay
    config.decay_steps = str(decay)
    # The rules leave the offset free: one evaluation falls just after the expected epoch.
    _set_length(config, math.ceil(mean) % _PERIOD, warmup + decay * batch / _IMAGES)
    return config


def _v05() -> ml_collections.ConfigDict:
    """Google's v2-8 and v3-8 of 2018: the tutorial's SGD, to 74.9 %.

    Google evaluated every epoch from the 60th on; this recipe evaluates every fourth.
    """
    config = resnet50.get_config()
    config.num_train_images = _IMAGES
    config.num_eval_images = 50_000
    config.num_label_classes = 1000
    config.train_batch_size = config.eval_batch_size = 1024
    config.stop_at_target = True
    config.steps_per_eval = f"{_PERIOD} epochs"
    config.steps_per_checkpoint = ""  # every evaluation saves one, which is enough
    config.target = 0.749
    return config


def _lars(batch: int, span: int) -> ml_collections.ConfigDict:
    """What all recipes from 2019 on share."""
    config = _v05()
    config.target = 0.759
    config.train_batch_size = batch
    config.eval_batch_size = batch  # divides among the same devices; the last batch is padded
    config.bn_span = f"{span}/{batch}"
    config.optimizer = "lars"
    config.nesterov = False
    config.label_smoothing = 0.1
    config.learning_rate_schedule = "polynomial"
    config.learning_rate_per = 0
    return config


def _set_length(config: ml_collections.ConfigDict, offset: int, end: float) -> None:
    """Sets the length and the evaluations, of which epoch `offset` has the first.

    After epoch `end` the rate stays at its last value. A run that is a little late may still reach
    the target there: it stops at the second evaluation after `end`.
    """
    length = offset + _PERIOD * (math.ceil((end - offset) / _PERIOD) + 1)
    config.eval_offset = f"{offset} epochs" if offset else ""
    config.schedule_epochs = length  # as long as the run, so that nothing is stretched
    config.train_steps = f"{length} epochs"


def _v07_4096() -> ml_collections.ConfigDict:
    """Google's v3-32 in the cloud, 2020: a higher and shorter schedule than the RCP of 4096.

    It also shares statistics among twice as many images. Its warm-up was 2 * 312 steps; here it is
    626.
    """
    config = _lars(4096, ENTRIES["v0.7-4096"][1])
    config.base_learning_rate = 13.0
    config.warmup_epochs = 2.0
    config.weight_decay = 2e-4
    config.decay_steps = "12169"
    _set_length(config, 3, 2 + 12169 * 4096 / _IMAGES)
    return config


def _v07_65536() -> ml_collections.ConfigDict:
    """Google's v3-8192 in JAX, 2020: tuned apart from the RCP of 65536, and with another span.

    Its epoch is a quarter of 79 steps, so that four epochs are 79 steps exactly: a warm-up of 33
    epochs is 651.75 steps, which leaves 1166.25 of the 92 epochs for the decay. Google's
    momentum of biases and scales did not contain the rate; here it does.
    """
    config = _lars(65536, ENTRIES["v0.7-65536"][1])
    config.base_learning_rate = 23.080977304670448
    config.momentum = 0.9537213777059405
    config.train_steps = "1817"
    config.schedule_epochs = 92
    config.warmup_epochs = 33.0
    config.steps_per_eval = "79"
    return config
