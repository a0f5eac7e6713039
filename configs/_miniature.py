"""Published recipes in miniature: how configs/digits.py:NAME scales a recipe to the digits.

All miniatures cost the same, so that their scores compare. docs/recipes.md has the rules in words.
"""

from typing import Any

import ml_collections

from configs import resnet50
from configs._named import choose_recipe
from configs.recipes import RECIPES

COST = 8.0  # the work of a run in epochs of 32 pixels
_IMAGES, _IMAGENET = 1437, 1_281_167

# What a miniature has from configs/digits.py, whatever the recipe says.
_OF_DIGITS = (
    *("data_dir", "num_label_classes", "input_streams", "crop_area_min", "random_flip"),
    *("eval_flip", "resnet_depth", "num_filters", "precision", "train_batch_size"),
    *("eval_batch_size", "target", "log_step_count_steps"),
)


def shrink(digits: ml_collections.ConfigDict, name: str, file: str) -> ml_collections.ConfigDict:
    """A recipe in miniature.

    Args:
      digits: the configuration of the digits.
      name: a key of `RECIPES`; or "plain", the configuration of the digits at the same cost.
      file: that of the digits, for the message.

    Raises:
      UnknownRecipe: there is none of that name; the message lists them.
    """
    epochs, values = choose_recipe({"plain": (0, {}), **RECIPES}, name, file)
    digits.num_filters = 16  # a run takes a minute, so that seeds and recipes can be compared
    config = digits if name == "plain" else _scaled(digits, epochs, values)
    run = epochs_at_cost(config)
    config.train_steps = f"{run} epochs"
    config.steps_per_eval = config.steps_per_checkpoint = f"{run / 4:g} epochs"
    return config


def _scaled(
    digits: ml_collections.ConfigDict, epochs: int, values: dict[str, Any]
) -> ml_collections.ConfigDict:
    full: Any = resnet50.get_config()
    config: Any = resnet50.get_config()
    plain_rate = _peak(full) / full.train_batch_size
    full.update(values)
    config.update(values)
    config.update({key: digits[key] for key in _OF_DIGITS})
    config.schedule_epochs = epochs  # the warm-up and other epochs keep their share of the run

    config.image_size = pixels(full.image_size)
    config.eval_image_size = 0  # with crops of 0.6 and more, larger images do not help evaluation
    config.image_sizes = tuple((start, pixels(side)) for start, side in full.image_sizes)

    # Other optimizers keep their rate.
    if config.optimizer == "sgd":
        ratio = _peak(full) / full.train_batch_size / plain_rate
        config.base_learning_rate = round(digits.base_learning_rate * ratio, 6)
        config.learning_rate_per = digits.learning_rate_per
        for key in ("warmup_from", "end_learning_rate"):
            config[key] = full[key] * _peak(config) / _peak(full)

    # The average of the weights reaches back over the same share of the run.
    if full.moving_average_decay:
        steps = epochs_at_cost(config) * _IMAGES / config.train_batch_size
        interval = full.moving_average_every * steps * full.train_batch_size / (epochs * _IMAGENET)
        config.moving_average_every = max(1, round(interval))
        exponent = config.moving_average_every / interval
        config.moving_average_decay = full.moving_average_decay**exponent
    return config


def pixels(side: int) -> int:
    """A seventh of the side, 32 for 224, to the nearest even number."""
    return 2 * round(side / 14)


def epochs_at_cost(config: Any) -> int:
    """How many epochs cost `COST`."""
    return round(COST / cost_of_epoch(config))


def cost_of_epoch(config: Any) -> float:
    """The work of an epoch in epochs of 32 pixels, on the average over the run."""
    stages: Any = config.image_sizes or ((0.0, config.image_size),)
    ends = (*(start for start, _ in stages[1:]), 1.0)
    pairs = zip(stages, ends, strict=True)
    return sum((end - start) * (side / 32) ** 2 for (start, side), end in pairs)


def _peak(config: Any) -> float:
    """The largest learning rate."""
    per = config.learning_rate_per
    return config.base_learning_rate * (config.train_batch_size / per if per else 1)
