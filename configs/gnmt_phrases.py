"""A small GNMT on English dates, numbers and amounts in German.

The sentences are those of configs/phrases.py, `python -m scripts.prepare phrases` makes them:

    python main.py --config=configs/gnmt_phrases.py --workdir=runs/gnmt_phrases
"""

import math

import ml_collections

from configs import gnmt


def get_config() -> ml_collections.ConfigDict:
    """The recipe for WMT with smaller sizes."""
    config = gnmt.get_config()
    config.data_dir = "data/phrases"
    config.train_source = config.train_target = ""  # records instead
    config.eval_source = config.eval_target = ""
    config.bucket_lengths = (12, 16, 24, 44)
    config.eval_lengths = (24, 64)

    config.num_encoder_layers = 3
    config.num_decoder_layers = 3
    config.width = 128
    config.dropout = 0.0  # the model is too small to learn the sentences by heart
    # Sums over 128 inputs are as large as those over 1024 with 0.1. With the values for 1024,
    # attention does not learn where to look.
    config.init_scale = 0.1 * math.sqrt(1024 / 128)
    config.attention_gain = 1.0
    config.precision = "float32"  # bfloat16 is emulated on most CPUs

    config.train_batch_size = 32
    config.eval_batch_size = 128
    config.train_steps = "1500"
    config.learning_rate_schedule = "polynomial"
    config.polynomial_power = 1.0
    config.warmup_steps = "100"
    config.warmup_shape = "linear"

    config.max_length = 64
    config.target = 0.90
    config.stop_at_target = False
    config.steps_per_eval = "500"
    config.steps_per_checkpoint = "500"
    config.log_step_count_steps = "50"
    return config
