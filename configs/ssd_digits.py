"""SSD on handwritten digits scattered over clutter, about 7 minutes on two CPU cores.

    bash scripts/quickstart.sh ssd

makes the images in COCO's form, prepares them as COCO is prepared, and trains on them.
"""

import ml_collections

from configs import _detection, ssd


def get_config() -> ml_collections.ConfigDict:
    """The configuration for COCO, made small."""
    config = ssd.get_config()
    _detection.set_digits(config)
    config.data_dir = "data/digit_scenes"
    config.image_size = 128
    config.crop_side_min = 1.0  # no crops: digits of other sizes than those to find teach little
    config.max_samples = 1

    config.max_pool = "torch"
    config.batch_norm = "plain"
    config.extra_squeezed = (64, 64)
    config.extra_filters = (128, 128)
    config.extra_strides = (2, 2)
    config.extra_paddings = (1, 1)
    config.box_steps = (8, 16, 32)
    config.box_sides = (28, 46, 64, 80)
    config.box_ratios = (2, 2, 2)

    config.eval_batch_size = 64
    config.train_steps = "5 epochs"
    config.target = 0.8
    config.steps_per_eval = "2 epochs"
    config.log_step_count_steps = "1 epoch"
    return config
