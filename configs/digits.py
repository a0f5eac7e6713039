"""1,797 handwritten digits, 4 minutes on two CPU cores: the real job's path on a small scale."""

import ml_collections

from configs import resnet50


def get_config() -> ml_collections.ConfigDict:
    """The ResNet-50 configuration, made small."""
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
    return config
