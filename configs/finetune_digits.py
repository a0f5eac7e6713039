"""Fine-tuning on 100 handwritten digits, half a minute on two CPU cores: finetune.py made small.

bash scripts/quickstart.sh finetune
"""

import ml_collections

from configs import finetune


def get_config() -> ml_collections.ConfigDict:
    """The recipe for a folder of photos, made small."""
    config = finetune.get_config()
    config.data_dir = "data/digits_5-9"
    config.num_label_classes = 5
    config.image_size = 32
    config.crop_area_min = 0.6
    config.random_flip = False

    config.resnet_depth = 18
    config.num_filters = 16
    config.precision = "float32"

    config.train_batch_size = 32
    config.train_steps = "100"
    config.base_learning_rate = 0.03  # digits differ more from other digits than photos from photos
    config.head_learning_rate = 1.0
    config.weight_decay = 5e-4

    return config
