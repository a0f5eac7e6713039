"""Recipes for a few thousand examples, on two CPU cores: --config=configs/small.py:NAME.

`python -m scripts.prepare DIR` prints the command with the batch and the schedule that fit the
data. Each recipe is the benchmark's recipe with other values, and gives the reason for each value.
"""

import math

import ml_collections

from configs import gnmt, mask_rcnn_digits, ncf, resnet50, ssd_digits, transformer
from configs._loop import choose_recipe


def _translator(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    config.precision = "float32"  # bfloat16 is emulated on most CPUs
    config.learning_rate_schedule = "polynomial"  # to 0 at the end, however long the run is
    config.polynomial_power = 1.0
    config.eval_lengths = (32, 64, 128)  # the tokens of `prepare text`, which names longer ones
    config.eval_batch_size = 128  # the search of so many sentences fits a small memory
    config.log_step_count_steps = "50"  # a step takes about a second
    config.target = 0.0  # a number to reach, if there is one
    config.stop_at_target = False
    return config


def _gnmt() -> ml_collections.ConfigDict:
    config = _translator(gnmt.get_config())
    config.train_source = config.train_target = ""  # the records of `prepare text` instead
    config.eval_source = config.eval_target = ""
    config.bucket_lengths = (16, 24, 40, 80)  # 80: the longest that `prepare text` keeps
    config.num_encoder_layers = config.num_decoder_layers = 2  # the fewest
    config.width = 256  # 5 million parameters for 29,000 pairs
    config.base_learning_rate = 2e-3
    config.train_steps = "12 epochs"
    config.warmup_steps = "1 epoch"
    config.steps_per_eval = config.steps_per_checkpoint = "3 epochs"  # translating takes long
    config.init_scale = 0.1 * math.sqrt(1024 / 256)  # sums over 256 inputs are as large as of 1024
    config.attention_gain = 1.0  # else attention does not learn where to look at this width
    config.train_batch_size = 64  # pairs: 453 steps in an epoch of 29,000; 128 learns less in it
    config.warmup_shape = "linear"
    config.max_length = 128  # as long as the longest of eval_lengths
    return config


def _detector(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """The digits' recipe, its rates and batch statistics from random weights, for photos."""
    config.data_dir = ""
    config.init_env = ""  # a backbone is the user's, which decides its sizes
    config.num_classes = 0  # as many as the data have
    config.empty_images = True  # they show what is no object
    config.max_boxes = 100  # photos of cells and crowds have many
    config.random_flip = True  # photos may be mirrored, digits may not
    config.target = 0.0
    return config


def _mask_rcnn() -> ml_collections.ConfigDict:
    config = _detector(mask_rcnn_digits.get_config())
    config.image_short, config.image_long = 256, 320  # less loses objects, more takes too long
    config.image_shape = (256, 320)
    config.pyramid_levels = (2, 3, 4, 5, 6)
    config.anchor_scale, config.anchor_ratios = 3.0, (0.5, 1.0, 2.0)  # sides of 12 to 192 pixels
    config.anchor_samples, config.region_samples = 128, 64  # as images have more objects
    config.proposals_before_nms = config.eval_proposals_before_nms = 200
    config.proposals_after_nms = config.eval_proposals_after_nms = 150
    return config


def _ssd() -> ml_collections.ConfigDict:
    config = _detector(ssd_digits.get_config())
    config.image_size = 240  # less loses objects, more takes a core too long
    config.crop_side_min = 0.7  # few images are soon known by heart
    config.max_samples = 50
    config.extra_squeezed = config.extra_filters = (64, 64, 64)
    config.extra_strides, config.extra_paddings = (2, 2, 2), (1, 1, 1)
    config.box_steps = (8, 16, 32, 64)
    config.box_sides = (18, 36, 72, 130, 200)  # objects of a twelfth to most of the image
    config.box_ratios = (2, 2, 2, 2)
    return config


def _ncf() -> ml_collections.ConfigDict:
    config = ncf.get_config()
    config.min_ratings = 2  # one to train on, one held out
    config.mlp_layers = (64, 64, 32)  # a wider perceptron knows few ratings by heart
    config.base_learning_rate = 0.001  # half the epochs of 0.0005
    config.train_negatives = 10  # of few ratings; with 4 the best item-kNN ranks as well
    config.moving_average_decay = 0.999  # the average ranks better than the last weights
    config.train_steps = "40 epochs"  # at most
    config.patience = 6  # the average rises slowly, and not at each evaluation
    config.eval_batch_size = 64  # of few users a batch is not mostly padding
    config.target = 0.0
    config.stop_at_target = False
    config.log_step_count_steps = "1 epoch"
    return config


def _resnet() -> ml_collections.ConfigDict:
    config = resnet50.get_config()
    config.data_fallback = ""
    config.resnet_depth, config.num_filters = 18, 32  # a quarter of ResNet-18's work and memory
    config.image_size, config.eval_image_size = 96, 128  # crops show objects larger than photos do
    config.precision = "float32"  # bfloat16 is emulated on most CPUs
    config.crop_area_min = 0.25  # of small photos smaller crops show nothing
    config.augmentation = "medium"  # photos that are seen 100 times are learnt by heart
    config.label_smoothing, config.weight_decay = 0.1, 5e-4  # against the same
    config.input_streams = 32  # a stream has few examples, and each costs time to start
    config.train_batch_size = config.eval_batch_size = 64  # 46 steps in an epoch of 3,000 photos
    config.base_learning_rate = 0.4  # for 256 images, so 0.1 for 64
    config.learning_rate_schedule = "cosine"  # to 0 at the end, however long the run is
    config.train_steps = "100 epochs"  # 10 ms of a core for a photo: 25 minutes of two for 3,000
    config.steps_per_eval = config.steps_per_checkpoint = "10 epochs"
    config.target = 0.0  # a number to reach, if there is one
    return config


def _transformer() -> ml_collections.ConfigDict:
    config = _translator(transformer.get_config())
    config.shuffle_buffer_size = 8192  # rows: 100,000 pairs
    config.input_streams = 8  # a stream has few examples, and each costs time to start
    config.num_layers, config.num_heads = 3, 4  # with the widths 1.9 million parameters
    config.width, config.mlp_width = 128, 512
    config.base_learning_rate = 3e-3  # a small model takes a large rate
    config.dropout = 0.2  # 0.3 is too much for this width
    config.train_steps = "40 epochs"
    config.warmup_steps = "4 epochs"  # a tenth of the run
    config.steps_per_eval = config.steps_per_checkpoint = "8 epochs"
    config.train_batch_size = 16  # rows: 126 steps in an epoch of 29,000 captions
    config.gradient_clip_norm = 1.0  # single steps of a small batch are far off
    config.gradient_precision = "float32"  # few devices have little to exchange
    return config


RECIPES = {
    "gnmt": _gnmt,
    "mask_rcnn": _mask_rcnn,
    "ncf": _ncf,
    "resnet": _resnet,
    "ssd": _ssd,
    "transformer": _transformer,
}


def get_config(name: str = "") -> ml_collections.ConfigDict:
    """The configuration of one recipe, a key of `RECIPES`."""
    config = choose_recipe(RECIPES, name, __file__)()
    config.gradient_accumulation_steps = "auto"  # the same batch on a smaller device
    return config
