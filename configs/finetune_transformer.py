"""Fine-tunes a Transformer on text of one's own: other sentences, or another pair of languages.

    python main.py --config=configs/finetune_transformer.py --config.init_from=MODEL \
        --config.data_dir=data/mine --workdir=runs/mine

MODEL is the workdir of a run. The text must be prepared with its vocabulary; docs/use.md has the
commands. The sizes of the layers are those of MODEL.
"""

import ml_collections

from configs import transformer


def get_config() -> ml_collections.ConfigDict:
    """The recipe for WMT with a low rate, for less text."""
    config = transformer.get_config()
    config.init_required = True
    config.shuffle_buffer_size = 8192
    config.input_streams = 8

    config.train_batch_size = 32
    config.train_steps = "1000"
    config.learning_rate_schedule = "polynomial"
    config.polynomial_power = 1.0
    config.base_learning_rate = 1e-4
    config.warmup_steps = "100"
    config.gradient_clip_norm = 1.0
    config.gradient_precision = "float32"

    config.eval_batch_size = 128
    config.steps_per_eval = "250"
    config.steps_per_checkpoint = "250"
    config.log_step_count_steps = "50"
    config.keep_checkpoints = 1  # the newest; the best one stays as well
    config.target = 0.0  # a number to reach, if there is one
    config.stop_at_target = False
    return config
