"""Fine-tunes a model on few images of one's own: minutes instead of days.

    python main.py --config=configs/finetune.py --config.init_from=MODEL \
        --config.data_dir=data/photos --workdir=runs/photos

MODEL is a run's workdir, or weights from elsewhere; docs/use.md explains the choices. The
architecture and the input spec are those of MODEL, the size of the images is the config's.
"""

import ml_collections

from configs import resnet50


def get_config() -> ml_collections.ConfigDict:
    """The ResNet-50 configuration with a new head, two rates and statistics that stay."""
    config = resnet50.get_config()
    config.init_without = "head"  # '': the classes are the same, so their head goes on
    config.data_fallback = ""
    config.crop_area_min = 0.25
    config.shuffle_buffer_size = 2048
    config.input_streams = 32

    config.train_batch_size = 64
    config.train_steps = "500"
    config.base_learning_rate = 0.001  # of the body, for any batch
    config.learning_rate_per = 0
    config.head_learning_rate = 10.0
    config.learning_rate_schedule = "cosine"
    config.schedule_epochs = 10
    config.warmup_epochs = 1.0  # a tenth of the run
    config.label_smoothing = 0.1
    config.bn_statistics = "auto"

    config.eval_batch_size = 64
    config.steps_per_eval = "50"
    config.steps_per_checkpoint = "50"
    config.log_step_count_steps = "50"
    config.keep_checkpoints = 1  # the newest; the best one stays as well
    config.target = 0.0  # a number to reach, if there is one
    return config
