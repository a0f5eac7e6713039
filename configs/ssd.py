"""SSD300 with ResNet-34 on COCO: MLPerf v0.5's detection benchmark, mAP 0.212 on 8 cores.

configs/_detection.py has the keys of both detectors, configs/_loop.py the keys of all benchmarks.
docs/ssd.md explains the recipes.
"""

import ml_collections
from ml_collections import config_dict

from configs import _detection


def get_config() -> ml_collections.ConfigDict:
    """The recipe's values and the keys of the SSD benchmark."""
    config = _detection.get_config()
    config.benchmark = "ssd"  # the package in benchmarks/

    # Data.
    config.data_env = "MLP_PATH_GCS_SSD"  # environment variable of the folder
    config.image_size = 300  # side in pixels
    config.crop_side_min = 0.3  # least side of a training crop, a share of the image's
    # Windows that a training crop tries; then it draws another condition. MLPerf allows 1 and 50.
    config.max_samples = 50
    config.antialias = False  # resizing is antialiased; to train and to evaluate
    config.shuffle_buffer_size = 8192  # examples held for shuffling, over all hosts
    config.input_streams = 64  # a multiple of every number of hosts the run will have

    # Model.
    config.resnet_stages = (3, 4, 6)  # blocks of each stage; ResNet-34 without its last stage
    # Devices in a group of synchronised BatchNorm, 0 for all; or "64/4096": as many devices
    # as have 64 of the 4096 images of a forward pass.
    config.bn_span = config_dict.FieldReference(1, field_type=object)  # a number or text
    # 'frozen': training normalises with the statistics of `init_from`; they never change.
    config.bn_statistics = "batch"
    config.batch_norm = "gram"  # as ResNet's, on TPUs; or 'plain', which computes the same
    config.extra_squeezed = (256, 256, 128, 128, 128)  # channels of extra layers' 1x1 convolution
    config.extra_filters = (512, 512, 256, 256, 256)  # channels of their 3x3 convolution
    config.extra_strides = (2, 2, 2, 1, 1)  # their strides
    config.extra_paddings = (1, 1, 1, 0, 0)  # their paddings
    config.box_steps = (8, 16, 32, 64, 100, 300)  # pixels between a map's default boxes
    config.box_sides = (21, 45, 99, 153, 207, 261, 315)  # their sides in pixels, one more than maps
    config.box_ratios = (2, 3, 3, 3, 2, 2)  # their largest aspect ratio; 3 has 1:2, 2:1, 1:3, 3:1

    # Optimisation.
    config.train_batch_size = 1024
    # Google counted in epochs of 120,000 images. So all durations here are in images.
    config.train_steps = "7.68e6 examples"
    config.weight_decay = 5e-4  # of all parameters
    config.base_learning_rate = 2.5e-3
    config.learning_rate_per = 32  # images
    config.schedule_epochs = 64
    config.warmup_steps = "3.6e5 examples"
    config.learning_rate_decay_steps = "5.12e6, 6.4e6 examples"

    # Evaluation.
    # A device needs 13 MB per image with 80 classes, 50 MB with 300, measured on a CPU.
    config.eval_batch_size = 256
    config.steps_per_eval = "3.84e6, 5.12e6, 5.76e6, 6.4e6, 7.04e6, 7.68e6 examples"
    config.steps_per_checkpoint = "2 epochs"
    config.max_detections = 200  # of an image, at most
    config.clip_boxes = True  # clip detections to the image; before the suppression
    config.target = 0.212  # mAP to reach
    return config
