"""Fine-tuning an SSD on 60 images of digits, on CPU cores: finetune_ssd.py made small.

bash scripts/quickstart.sh finetune_ssd
"""

import ml_collections

from configs import finetune_ssd


def get_config() -> ml_collections.ConfigDict:
    """The recipe for a folder of photos, made small."""
    config = finetune_ssd.get_config()
    config.data_dir = "data/scenes_5-9"
    config.max_boxes = 16
    config.crop_side_min = 1.0  # as configs/ssd_digits.py
    config.max_samples = 1
    config.random_flip = False
    config.input_streams = 4

    config.batch_norm = "plain"
    config.precision = "float32"
    config.bn_statistics = "batch"  # images of one kind, so that each batch is like the others

    config.train_batch_size = 8
    config.eval_batch_size = 64
    config.train_steps = "200"
    config.optimizer = "adam"
    config.base_learning_rate = 6e-3
    config.head_learning_rate = 1.0
    config.weight_decay = 0.0
    config.warmup_steps = "20"
    config.steps_per_eval = "100"
    config.steps_per_checkpoint = "100"
    return config
