"""ResNet-50 on one random batch that stays on the devices: smoke tests and speed, no data."""

import ml_collections

from configs import resnet50


def get_config() -> ml_collections.ConfigDict:
    """The ResNet-50 configuration without input; accuracy means nothing."""
    config = resnet50.get_config()
    config.dataset = "fake"
    config.num_train_images = 1_281_167
    config.num_eval_images = 50_000
    config.train_steps = "1000"
    config.steps_per_eval = config.steps_per_checkpoint = "1000"
    config.log_step_count_steps = "50"
    config.target = 0.0
    return config
