"""A small GNMT on English dates, numbers and amounts in German.

`python -m scripts.prepare phrases` makes the sentences, the same as for configs/phrases.py:

    python main.py --config=configs/gnmt_phrases.py --workdir=runs/gnmt_phrases
"""

import math

import ml_collections

from configs import small


def get_config() -> ml_collections.ConfigDict:
    """The recipe for few sentences, with smaller sizes."""
    config = small.get_config("gnmt")
    config.data_dir = "data/phrases"
    config.bucket_lengths = (12, 16, 24, 44)
    config.eval_lengths = (24, 64)
    config.max_length = 64

    config.num_encoder_layers = config.num_decoder_layers = 3
    config.width = 128
    config.dropout = 0.0  # the model is too small to learn the sentences by heart
    # Sums over 128 inputs are as large as those over 1024 with 0.1.
    config.init_scale = 0.1 * math.sqrt(1024 / 128)

    config.train_batch_size = 32
    config.train_steps = "1500"
    config.warmup_steps = "100"
    config.target = 0.90
    config.steps_per_eval = config.steps_per_checkpoint = "500"
    return config
