"""ResNet-50 v2 as the Gradient tutorial trained it: 130,000 steps of 1024, "vgg" crops, float32.

The tutorial's code is `cloud_tpu/models/resnet_garden` of tensorflow/tpu (February 2018), which
states no accuracy. Its neighbour `cloud_tpu/models/resnet`, configs/resnet50.py here, replaced it:
start from that one unless you want to repeat the tutorial. No run here has verified this recipe.
"""

import ml_collections

from configs import resnet50


def get_config() -> ml_collections.ConfigDict:
    """The ResNet-50 configuration with the garden's values."""
    config = resnet50.get_config()
    config.resnet_version = "2"
    config.bn_momentum = 0.997
    config.precision = "float32"  # 'bfloat16' halves the memory that activations need
    config.preprocessing = "vgg"
    config.input_spec = "vgg"

    config.train_batch_size = 1024
    config.train_steps = "130000"
    config.schedule_epochs = 104  # of ImageNet, in these steps (103.9)
    # From epoch 90 on the rate is 0: only the statistics of BatchNorm still change.
    config.learning_rate_decay_epochs = (30, 60, 80, 90)
    config.learning_rate_decay_factors = (0.1, 0.1, 0.1, 0.0)

    config.target = 0.75  # not the garden's, which states none
    return config
