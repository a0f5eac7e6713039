"""NeuMF on synthetic ratings whose ceiling is known, under 3 minutes on two CPU cores.

    bash scripts/quickstart.sh ncf

makes the ratings, trains on them and compares HR@10 with the ceiling and with popularity.
"""

import ml_collections

from configs import ncf


def get_config() -> ml_collections.ConfigDict:
    """The configuration for ml-20m, made small."""
    config = ncf.get_config()
    config.data_dir = "data/ratings"
    config.num_users = 4000  # what benchmarks/ncf/preparation/ratings.py makes by default
    config.num_items = 1500
    config.num_ratings = 240_000

    config.gmf_dim = 16
    config.mlp_layers = (32, 32, 16)

    config.eval_batch_size = 64
    config.train_steps = "5 epochs"
    config.schedule_epochs = 5
    config.base_learning_rate = 0.003
    config.learning_rate_schedule = "cosine"

    config.target = 0.6
    config.stop_at_target = False
    config.log_step_count_steps = "1 epoch"
    return config
