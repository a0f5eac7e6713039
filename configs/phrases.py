"""A small Transformer on English dates, numbers and amounts in German, 4 minutes on two CPU cores.

    bash scripts/quickstart.sh transformer

makes the sentences, prepares them as WMT is prepared, and trains on them.
"""

import ml_collections

from configs import small


def get_config() -> ml_collections.ConfigDict:
    """The recipe for few sentences, with smaller sizes."""
    config = small.get_config("transformer")
    config.data_dir = "data/phrases"
    config.row_length = 64
    config.eval_lengths = (16, 32, 64)
    config.shuffle_buffer_size = 65536

    config.num_layers = 2
    config.mlp_width = 256
    config.dropout = 0.0  # the model is too small to learn the sentences by heart

    config.train_batch_size = 32
    config.train_steps = "400"
    config.warmup_steps = "150"
    config.target = 0.95
    config.steps_per_eval = config.steps_per_checkpoint = "200"
    return config
