"""Fine-tunes a Mask R-CNN on few images of one's own, with the classes of their annotations.

    python main.py --config=configs/finetune_mask_rcnn.py --config.init_from=MODEL \
        --config.data_dir=data/photos --workdir=runs/photos

MODEL is a Mask R-CNN: the workdir of a run, or a file of torchvision's. It may also be a ResNet-50,
for the backbone alone; docs/use.md explains the choices. The sizes of layers and anchors are those
of MODEL, the size of the images is this recipe's.
"""

import ml_collections

from configs import mask_rcnn


def get_config() -> ml_collections.ConfigDict:
    """The recipe for COCO with new classes and two rates."""
    config = mask_rcnn.get_config()
    config.init_env = ""  # the user names a model
    config.new_classes = True  # False: they are those of MODEL, so its heads go on
    config.shuffle_buffer_size = 1024
    config.input_streams = 8

    config.train_batch_size = 8
    config.train_steps = "500"
    config.base_learning_rate = 0.0025  # of the body, for any batch
    config.learning_rate_per = 0
    config.head_learning_rate = 4.0  # configs/mask_rcnn.py has the product for 8 images
    config.learning_rate_schedule = "cosine"
    config.warmup_steps = "50"
    config.warmup_from = 0.0
    config.learning_rate_decay_steps = ""

    config.eval_batch_size = 8
    config.steps_per_eval = "100"
    config.steps_per_checkpoint = "100"
    config.log_step_count_steps = "50"
    config.keep_checkpoints = 1  # the newest; the best one stays as well
    config.target = 0.0  # a number to reach, if there is one
    config.mask_target = 0.0
    config.stop_at_target = False
    return config
