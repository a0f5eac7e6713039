"""Mask R-CNN on handwritten digits scattered over clutter, in two orientations, on CPU cores.

    bash scripts/quickstart.sh mask_rcnn

makes the images in COCO's form with masks, prepares them as COCO is prepared, and trains on them.
"""

import ml_collections

from configs import _detection, mask_rcnn


def get_config() -> ml_collections.ConfigDict:
    """The configuration for COCO, made small."""
    config = mask_rcnn.get_config()
    _detection.set_digits(config)
    config.data_dir = "data/digit_scenes"
    config.image_short = 128
    config.image_long = 160
    config.image_shape = (128, 160)
    config.mask_size = 28
    config.shuffle_buffer_size = 2048

    config.resnet_bottleneck = False
    config.init_env = ""  # there is no trained ResNet to begin with
    config.freeze = ""
    config.bn_statistics = "batch"
    config.pyramid_levels = (3, 4)
    config.pyramid_filters = 48
    config.anchor_scale = 5.0  # sides of 40 and 80 pixels
    config.anchor_ratios = (1.0, 1.6)
    config.anchor_samples = 64
    config.proposals_before_nms = config.eval_proposals_before_nms = 100
    config.proposals_after_nms = config.eval_proposals_after_nms = 50
    config.region_samples = 32
    config.region_scale = 128.0
    config.box_pool = 5
    config.box_features = (128,)
    config.mask_pool = 7
    config.mask_features = (32, 32)

    config.eval_batch_size = 32
    config.train_steps = "2 epochs"
    config.warmup_from = 0.0
    config.target = 0.75
    config.mask_target = 0.0
    config.log_step_count_steps = "250"
    return config
