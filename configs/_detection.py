"""What the recipes of both detectors share, SSD's and Mask R-CNN's."""

import ml_collections
from ml_collections import config_dict

from configs import _loop


def get_config() -> ml_collections.ConfigDict:
    """The keys of the loop, and the keys that both benchmarks have, for COCO."""
    config = _loop.get_config()

    # Data: records that `python -m scripts.prepare coco` makes, for Mask R-CNN with --masks.
    config.dataset = ""  # 'fake': one random batch, kept on the devices, instead of data_dir
    config.data_dir = ""  # '' = the folder in the environment variable `data_env`
    config.train_files = "train-*"  # patterns of the records' names
    config.eval_files = "val-*"  # patterns for evaluation
    # COCO's own file of the evaluation's annotations; the score is computed with it.
    config.eval_annotations = "instances_val*.json,raw-data/annotations/instances_val*.json"
    # 0 = as many as the data hold; any other number must agree with the data.
    config.num_train_images = 0  # those that training takes
    config.empty_images = False  # True: training takes images without objects, too
    config.num_eval_images = 0  # 0 = all
    config.num_classes = 0  # without the background; 0 = as many as the data have, else COCO's 80
    config.class_numbers = "order"  # class k is the k-th category; 'ids': the category with id k
    config.max_boxes = 100  # of a training image, at most; of more, the largest are taken
    config.random_flip = True  # training mirrors half of the images
    # 'light', 'medium' or 'strong': presets; for few images, objects in more sizes (SSD: smaller
    # ones) and colours. '' = as MLPerf has it.
    config.augmentation = ""

    # Model.
    config.num_filters = 64  # channels of the stem
    config.max_pool = "same"  # padding of the max-pool; 'torch' for weights from PyTorch
    config.precision = "bfloat16"  # of activations; parameters, boxes and losses are float32
    config.bn_momentum = 0.9  # of BatchNorm's running statistics

    # Optimisation.
    config.init_env = "MLP_GCS_RESNET_CHECKPOINT"  # a ResNet of the same depth
    # True: `init_from` has other classes. Of the last layers only what does not depend on the
    # classes is taken.
    config.new_classes = False
    config.head_learning_rate = 1.0  # multiplies the rate of the layers that depend on the classes

    # Evaluation.
    config.min_score = 0.05  # detections with a lower score are dropped
    config.nms_iou = 0.5  # IoU of non-maximum suppression (NMS)
    # Pixels of the tiles' side in evaluation; 'auto': the model's input; 0: none.
    config.eval_tiles = config_dict.FieldReference(0, field_type=object)
    config.stop_at_target = True
    return config


def set_coco(config: ml_collections.ConfigDict, batch: int) -> None:
    """COCO 2017 as MLPerf counts it, for a run with this batch."""
    config.num_train_images = 117_266
    config.num_eval_images = 5_000
    config.num_classes = 80
    config.train_batch_size = batch
    config.eval_batch_size = batch  # divides among the same devices; the last batch is padded


def set_digits(config: ml_collections.ConfigDict) -> None:
    """Handwritten digits scattered over clutter, for two CPU cores and random weights."""
    config.num_classes = 10
    config.max_boxes = 16
    config.random_flip = False  # a mirrored 2 looks like a 5
    config.input_streams = 8  # a stream has few examples, and each costs time to start
    config.resnet_stages = (1, 2, 1)
    config.num_filters = 16
    config.precision = "float32"  # bfloat16 is emulated on most CPUs
    config.train_batch_size = 8
    config.optimizer = "adam"
    config.learning_rate_schedule = "cosine"
    config.base_learning_rate = 1.5e-3
    config.learning_rate_per = 0
    config.warmup_steps = "200"
    config.learning_rate_decay_steps = ""
    config.weight_decay = 0.0
    config.stop_at_target = False
