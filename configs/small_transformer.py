"""A small Transformer for text of one's own: up to about a million pairs of sentences.

    python main.py --config=configs/small_transformer.py --config.data_dir=data/mine \
        --workdir=runs/mine

`python -m scripts.prepare text` prints this command with the epochs that fit the text.
"""

import ml_collections

from configs import transformer


def get_config() -> ml_collections.ConfigDict:
    """The recipe for WMT with smaller sizes, and a rate that falls to 0."""
    config = transformer.get_config()
    config.shuffle_buffer_size = 8192
    config.input_streams = 8  # a stream has few examples, and each costs time to start

    config.num_layers = 3
    config.width = 128
    config.mlp_width = 512
    config.num_heads = 4
    config.precision = "float32"  # bfloat16 is emulated on most CPUs

    config.train_batch_size = 16
    config.train_steps = "20 epochs"
    config.learning_rate_schedule = "polynomial"
    config.polynomial_power = 1.0
    config.base_learning_rate = 2e-3
    config.warmup_steps = "2 epochs"
    config.gradient_clip_norm = 1.0
    config.gradient_precision = "float32"

    config.eval_batch_size = 128
    config.steps_per_eval = "4 epochs"
    config.steps_per_checkpoint = "4 epochs"
    config.log_step_count_steps = "50"
    config.target = 0.0  # a number to reach, if there is one
    config.stop_at_target = False
    return config
