"""Fine-tunes an SSD on few images of one's own, with the classes of their annotations.

    python main.py --config=configs/finetune_ssd.py --config.init_from=MODEL \
        --config.data_dir=data/photos --workdir=runs/photos

MODEL is an SSD: the workdir of a run, or a checkpoint of MLPerf's reference. It may also be a
ResNet-34, for the backbone alone; docs/use.md explains the choices. The sizes of layers, boxes and
images are those of MODEL.
"""

import ml_collections

from configs import ssd


def get_config() -> ml_collections.ConfigDict:
    """The recipe for COCO with new classes, two rates and statistics that stay."""
    config = ssd.get_config()
    config.init_env = ""  # the user names a model
    config.new_classes = True  # False: they are those of MODEL, so its heads go on
    config.bn_statistics = "frozen"
    config.shuffle_buffer_size = 2048
    config.input_streams = 16

    config.train_batch_size = 32
    config.train_steps = "500"
    config.base_learning_rate = 5e-4  # of the body, for any batch
    config.learning_rate_per = 0
    config.head_learning_rate = 5.0  # configs/ssd.py trains with the product
    config.learning_rate_schedule = "cosine"
    config.warmup_steps = "50"
    config.learning_rate_decay_steps = ""

    config.eval_batch_size = 32
    config.steps_per_eval = "100"
    config.steps_per_checkpoint = "100"
    config.log_step_count_steps = "50"
    config.keep_checkpoints = 1  # the newest; the best one stays as well
    config.target = 0.0  # a number to reach, if there is one
    config.stop_at_target = False
    return config
