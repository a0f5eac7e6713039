"""1,797 handwritten digits, 3 minutes on two CPU cores: the real job's path on a small scale.

--config=configs/digits.py:NAME is a recipe of configs/recipes.py in miniature, or "plain", the
digits' own. All miniatures cost the same, so that their scores compare; docs/resnet.md has the
rules in words.
"""

from typing import Any

import ml_collections

from configs import resnet50
from configs._loop import choose_recipe
from configs.recipes import RECIPES

COST = 8.0  # the work of a miniature, in epochs of images of 32 pixels
_IMAGES, _IMAGENET = 1437, 1_281_167

# Keys that a miniature takes from the digits, whatever the recipe says.
_OF_DIGITS = (
    "data_dir num_label_classes input_streams crop_area_min random_flip eval_flip resnet_depth "
    "num_filters precision train_batch_size eval_batch_size target log_step_count_steps"
)


def get_config(name: str = "") -> ml_collections.ConfigDict:
    """The ResNet-50 configuration, made small; with a name, that recipe in miniature."""
    config = resnet50.get_config()
    config.data_dir = "data/digits"
    config.num_label_classes = 10
    config.image_size = 32
    config.crop_area_min = 0.6  # smaller crops lose what tells 3 from 8
    config.random_flip = False
    config.input_streams = 32  # a stream has few examples, and each costs time to start

    config.resnet_depth = 18
    config.num_filters = 32
    config.precision = "float32"  # bfloat16 is emulated on most CPUs

    config.train_batch_size = 64
    config.train_steps = "15 epochs"
    config.base_learning_rate = 0.4
    config.learning_rate_schedule = "cosine"
    config.label_smoothing = 0.1
    config.weight_decay = 5e-4

    config.target = 0.97
    config.steps_per_eval = "2 epochs"
    config.steps_per_checkpoint = "2 epochs"
    config.log_step_count_steps = "1 epoch"
    return _miniature(config, name) if name else config


def _miniature(digits: ml_collections.ConfigDict, name: str) -> ml_collections.ConfigDict:
    """The recipe of a name in miniature, or `digits` themselves, at the same cost."""
    epochs, values = choose_recipe({"plain": (0, {}), **RECIPES}, name, __file__)
    digits.num_filters = 16  # a run takes a minute, so that seeds and recipes can be compared
    config = digits if name == "plain" else _scaled(digits, epochs, values)
    run = _epochs(config)
    config.train_steps = f"{run} epochs"
    config.steps_per_eval = config.steps_per_checkpoint = f"{run / 4:g} epochs"
    return config


def _scaled(
    digits: ml_collections.ConfigDict, epochs: int, values: dict[str, Any]
) -> ml_collections.ConfigDict:
    """The recipe with these epochs and values, at the sizes and rates of the digits."""
    full: Any = resnet50.get_config()
    config: Any = resnet50.get_config()
    plain_rate = _peak(full) / full.train_batch_size
    full.update(values)
    config.update(values)
    config.update({key: digits[key] for key in _OF_DIGITS.split()})
    config.schedule_epochs = epochs  # the warm-up and other epochs keep their share of the run

    config.image_size = _pixels(full.image_size)
    config.eval_image_size = 0  # with crops of 0.6 and more, larger images do not help evaluation
    config.image_sizes = tuple((start, _pixels(side)) for start, side in full.image_sizes)

    # Other optimizers keep their rate.
    if config.optimizer == "sgd":
        ratio = _peak(full) / full.train_batch_size / plain_rate
        config.base_learning_rate = round(digits.base_learning_rate * ratio, 6)
        config.learning_rate_per = digits.learning_rate_per
        for key in ("warmup_from", "end_learning_rate"):
            config[key] = full[key] * _peak(config) / _peak(full)

    # The average of the weights reaches back over the same share of the run.
    if full.moving_average_decay:
        steps = _epochs(config) * _IMAGES / config.train_batch_size
        interval = full.moving_average_every * steps * full.train_batch_size / (epochs * _IMAGENET)
        config.moving_average_every = max(1, round(interval))
        exponent = config.moving_average_every / interval
        config.moving_average_decay = full.moving_average_decay**exponent
    return config


def _pixels(side: int) -> int:
    """A seventh of the side, 32 for 224, to the nearest even number."""
    return 2 * round(side / 14)


def _epochs(config: Any) -> int:
    """How many epochs cost `COST`, where an epoch costs the mean of its images' areas."""
    stages: Any = config.image_sizes or ((0.0, config.image_size),)
    ends = (*(start for start, _ in stages[1:]), 1.0)
    pairs = zip(stages, ends, strict=True)
    return round(COST / sum((end - start) * (side / 32) ** 2 for (start, side), end in pairs))


def _peak(config: Any) -> float:
    """The largest learning rate."""
    per = config.learning_rate_per
    return config.base_learning_rate * (config.train_batch_size / per if per else 1)
