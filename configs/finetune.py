"""Fine-tunes a model on few examples: minutes instead of days.

    python main.py --config=configs/finetune.py --config.init_from=MODEL \
        --config.data_dir=data/photos --workdir=runs/photos

That is a classifier of photos; configs/finetune.py:NAME is another of `RECIPES`. MODEL is a run's
workdir, or weights from elsewhere; docs/use.md explains the choices. Sizes of layers follow MODEL.
"""

import ml_collections

from configs import mask_rcnn, resnet50, ssd, transformer
from configs._loop import choose_recipe


def _tuned(config: ml_collections.ConfigDict, steps: int, evals: int) -> ml_collections.ConfigDict:
    """A recipe as a short run of `steps`, with `evals` evaluations and checkpoints."""
    config.train_steps = str(steps)
    config.steps_per_eval = config.steps_per_checkpoint = str(steps // evals)
    config.log_step_count_steps = "50"
    config.keep_checkpoints = 1  # the newest; the best one stays as well
    config.target = 0.0  # a number to reach, if there is one
    config.stop_at_target = False
    return config


def _classifier() -> ml_collections.ConfigDict:
    """ResNet-50 with a new head, two rates and statistics that stay; the size of images is 224."""
    config = _tuned(resnet50.get_config(), steps=500, evals=10)
    config.init_without = "head"  # '': the classes are the same, so their head goes on
    config.data_fallback = ""
    config.crop_area_min = 0.25
    config.shuffle_buffer_size = 2048
    config.input_streams = 32

    config.train_batch_size = config.eval_batch_size = 64
    config.base_learning_rate = 0.001  # of the body, for any batch
    config.learning_rate_per = 0
    config.head_learning_rate = 10.0
    config.learning_rate_schedule = "cosine"
    config.schedule_epochs = 10
    config.warmup_epochs = 1.0  # a tenth of the run
    config.label_smoothing = 0.1
    config.bn_statistics = "auto"
    return config


def _digits() -> ml_collections.ConfigDict:
    """On 100 handwritten digits, half a minute on two CPU cores: scripts/quickstart.sh finetune."""
    config = _classifier()
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


def _detector(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """What both detectors share: the classes of the user's annotations, and two rates."""
    config = _tuned(config, steps=500, evals=5)
    config.init_env = ""  # the user names a model
    config.new_classes = True  # False: MODEL has the same classes, so its heads go on
    config.empty_images = True  # they show what is no object
    config.learning_rate_per = 0  # the rate is for any batch
    config.learning_rate_schedule = "cosine"
    config.warmup_steps = "50"
    config.learning_rate_decay_steps = ""
    return config


def _mask_rcnn() -> ml_collections.ConfigDict:
    """From a Mask R-CNN, or with new heads on a ResNet; the size of images is this recipe's."""
    config = _detector(mask_rcnn.get_config())
    config.shuffle_buffer_size = 1024
    config.input_streams = 8
    config.train_batch_size = config.eval_batch_size = 8
    config.base_learning_rate = 0.0025  # of the body
    config.head_learning_rate = 4.0  # configs/mask_rcnn.py has the product for 8 images
    config.warmup_from = 0.0
    config.mask_target = 0.0
    return config


def _ssd() -> ml_collections.ConfigDict:
    """Fine-tunes an SSD, or new heads on a ResNet of basic blocks; BatchNorm is frozen."""
    config = _detector(ssd.get_config())
    config.bn_statistics = "frozen"
    config.shuffle_buffer_size = 2048
    config.input_streams = 16
    config.train_batch_size = config.eval_batch_size = 32
    config.base_learning_rate = 5e-4  # of the body
    config.head_learning_rate = 5.0  # configs/ssd.py trains with the product
    return config


def _ssd_digits() -> ml_collections.ConfigDict:
    """On 60 images of digits, on CPU cores: scripts/quickstart.sh finetune_ssd."""
    config = _ssd()
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
    return config


def _transformer() -> ml_collections.ConfigDict:
    """Other sentences, or another pair of languages, in MODEL's vocabulary; MODEL is a workdir."""
    config = _tuned(transformer.get_config(), steps=1000, evals=4)
    config.init_required = True
    config.shuffle_buffer_size = 8192
    config.input_streams = 8

    config.train_batch_size = 32
    config.learning_rate_schedule = "polynomial"
    config.polynomial_power = 1.0
    config.base_learning_rate = 1e-4  # low, for less text
    config.warmup_steps = "100"
    config.gradient_clip_norm = 1.0
    config.gradient_precision = "float32"
    config.eval_batch_size = 128
    return config


def _opus_mt() -> ml_collections.ConfigDict:
    """Own sentences on a published pair of OPUS-MT: MODEL is hf-hub:Helsinki-NLP/opus-mt-de-en."""
    config = _transformer()
    config.variant, config.activation = "marian", "swish"  # MODEL decides, as its sizes
    config.base_learning_rate = 2e-5  # it has learnt from millions of pairs
    config.beam_size = 6  # as the models' own settings
    config.length_penalty = 1.0
    return config


RECIPES = {
    "classifier": _classifier,
    "digits": _digits,
    "mask_rcnn": _mask_rcnn,
    "opus_mt": _opus_mt,
    "ssd": _ssd,
    "ssd_digits": _ssd_digits,
    "transformer": _transformer,
}


def get_config(name: str = "classifier") -> ml_collections.ConfigDict:
    """The configuration of one recipe, a key of `RECIPES`."""
    config = choose_recipe(RECIPES, name, __file__)()
    config.gradient_accumulation_steps = "auto"  # the same batch on a smaller device
    return config
