"""A small Transformer on English dates, numbers and amounts in German, 4 minutes on two CPU cores.

    bash scripts/quickstart.sh transformer

makes the sentences, prepares them as WMT is prepared, and trains on them.
"""

import ml_collections

from configs import transformer


def get_config() -> ml_collections.ConfigDict:
    """The recipe for WMT with smaller sizes."""
    config = transformer.get_config()
    config.data_dir = "data/phrases"
    config.row_length = 64
    config.eval_lengths = (16, 32, 64)
    config.input_streams = 8  # a stream has few examples, and each costs time to start

    config.num_layers = 2
    config.width = 128
    config.mlp_width = 256
    config.num_heads = 4
    config.dropout = 0.0  # the model is too small to learn the sentences by heart
    config.precision = "float32"  # bfloat16 is emulated on most CPUs

    config.train_batch_size = 32
    config.eval_batch_size = 128
    config.train_steps = "400"
    config.learning_rate_schedule = "polynomial"
    config.polynomial_power = 1.0
    config.base_learning_rate = 3e-3
    config.warmup_steps = "150"
    config.gradient_clip_norm = 1.0
    config.gradient_precision = "float32"

    config.target = 0.95
    config.stop_at_target = False
    config.steps_per_eval = "200"
    config.steps_per_checkpoint = "200"
    config.log_step_count_steps = "50"
    return config
