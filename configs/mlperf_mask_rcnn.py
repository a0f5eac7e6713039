"""Mask R-CNN as MLPerf Training ran it from v0.6 on: --config=configs/mlperf_mask_rcnn.py:NAME.

NAME is a batch size for which MLPerf publishes a reference convergence point (rulesets 1.0.0 to
3.1.0), or one of Google's own entries. No run here has verified these recipes.
"""

import ml_collections

from configs import _detection, mask_rcnn
from configs._loop import choose_recipe

# By name: batch, peak rate, steps of warm-up, steps of the two drops, and epochs of the run,
# a few more than the published runs needed (docs/mask_rcnn.md).
RECIPES = {
    "8": (8, 0.01, 500, "144000, 192000", 17),
    "48": (48, 0.06, 800, "24000, 32000", 18),
    "64": (64, 0.08, 800, "18000, 24000", 18),
    "96": (96, 0.12, 625, "12000, 16000", 18),
    "128": (128, 0.16, 625, "9000, 12000", 18),
    "256": (256, 0.24, 1800, "5625, 7500", 21),
    "272": (272, 0.24, 1800, "5294, 7058", 21),
    # Google's of 2019 and 2020 on up to 512 cores, and its v3-1024 of 2020.
    "v0.6": (128, 0.16, 1000, "9750, 13000", 16),
    "v0.7-128": (128, 0.16, 1000, "9750, 13000", 18),
    "v0.7-256": (256, 0.24, 2000, "6000, 8000", 21),
}


def get_config(name: str = "") -> ml_collections.ConfigDict:
    """The configuration of one recipe, a key of `RECIPES`."""
    batch, rate, warmup, drops, epochs = choose_recipe(RECIPES, name, __file__)
    config = mask_rcnn.get_config()
    _detection.set_coco(config, batch)
    config.base_learning_rate = rate
    config.learning_rate_per = 0
    config.warmup_steps = f"{warmup} steps"
    config.warmup_from = 0.0
    config.learning_rate_decay_steps = drops
    config.train_steps = f"{epochs} epochs"
    return config
