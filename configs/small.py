"""Recipes for a few thousand examples, on two CPU cores: --config=configs/small.py:NAME.

`python -m scripts.prepare DIR` prints the command with the batch and the schedule that fit the
data. Each recipe is the benchmark's own with other values; each value has its reason beside it.
"""

import ml_collections

from configs import resnet50
from configs._named import choose_recipe

_FILE = "configs/small.py"


def _resnet() -> ml_collections.ConfigDict:
    config = resnet50.get_config()
    config.data_fallback = ""
    config.resnet_depth, config.num_filters = 18, 32  # a quarter of ResNet-18's work and memory
    config.image_size, config.eval_image_size = 96, 128  # crops show objects larger than photos do
    config.precision = "float32"  # bfloat16 is emulated on most CPUs
    config.crop_area_min = 0.25  # of small photos smaller crops show nothing
    config.augmentation = "trivialaugment"  # photos that are seen 200 times are learnt by heart
    config.label_smoothing, config.weight_decay = 0.1, 5e-4  # against the same
    config.input_streams = 32  # a stream has few examples, and each costs time to start
    config.train_batch_size = config.eval_batch_size = 64  # 46 steps in an epoch of 3,000 photos
    config.base_learning_rate = 0.4  # for 256 images, so 0.1 for 64
    config.learning_rate_schedule = "cosine"  # to 0 at the end, however long the run is
    config.train_steps = "200 epochs"  # 9 ms of a core for a photo: 45 minutes of two for 3,000
    config.steps_per_eval = config.steps_per_checkpoint = "20 epochs"
    config.target = 0.0  # a number to reach, if there is one
    return config


RECIPES = {
    "resnet": _resnet,
}


def get_config(name: str = "") -> ml_collections.ConfigDict:
    """The configuration of one recipe, a key of `RECIPES`.

    Raises:
      UnknownRecipe: there is none of that name; the message lists them.
    """
    return choose_recipe(RECIPES, name, _FILE)()
