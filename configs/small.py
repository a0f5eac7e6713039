"""Recipes for a few thousand examples, on two CPU cores: --config=configs/small.py:NAME.

`python -m scripts.prepare DIR` prints the command with the batch and the schedule that fit the
data. Each recipe is the benchmark's own with other values; each value has its reason beside it.
"""

import math

import ml_collections

from configs import gnmt, transformer
from configs._named import choose_recipe

_FILE = "configs/small.py"


def _translator(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    config.precision = "float32"  # bfloat16 is emulated on most CPUs
    config.learning_rate_schedule = "polynomial"  # to 0 at the end, however long the run is
    config.polynomial_power = 1.0
    config.base_learning_rate = 2e-3  # a small model takes a large rate
    config.train_steps = "20 epochs"
    config.warmup_steps = "2 epochs"  # a tenth of the run
    config.eval_lengths = (32, 64, 128)  # the tokens of `prepare text`, which names longer ones
    config.eval_batch_size = 128  # the search of so many sentences fits a small memory
    config.steps_per_eval = config.steps_per_checkpoint = "4 epochs"  # translating takes long
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
    config.init_scale = 0.1 * math.sqrt(1024 / 256)  # sums over 256 inputs are as large as of 1024
    config.attention_gain = 1.0  # else attention does not learn where to look at this width
    config.train_batch_size = 128  # pairs: 227 steps in an epoch of 29,000
    config.warmup_shape = "linear"
    config.max_length = 128  # as long as the longest of eval_lengths
    return config


def _transformer() -> ml_collections.ConfigDict:
    config = _translator(transformer.get_config())
    config.shuffle_buffer_size = 8192  # rows: 100,000 pairs
    config.input_streams = 8  # a stream has few examples, and each costs time to start
    config.num_layers, config.num_heads = 3, 4  # with the widths 1.9 million parameters
    config.width, config.mlp_width = 128, 512
    config.train_batch_size = 16  # rows: 126 steps in an epoch of 29,000 captions
    config.gradient_clip_norm = 1.0  # single steps of a small batch are far off
    config.gradient_precision = "float32"  # few devices have little to exchange
    return config


RECIPES = {
    "gnmt": _gnmt,
    "transformer": _transformer,
}


def get_config(name: str = "") -> ml_collections.ConfigDict:
    """The configuration of one recipe, a key of `RECIPES`.

    Raises:
      UnknownRecipe: there is none of that name; the message lists them.
    """
    return choose_recipe(RECIPES, name, _FILE)()
