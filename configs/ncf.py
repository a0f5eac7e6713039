"""NeuMF on MovieLens' ml-20m to MLPerf v0.5's target: HR@10 of 0.635 within 20 epochs.

An example is a user, an item and whether the user rated it; an epoch has each rating once and
`train_negatives` items drawn beside it. Durations are as in configs/resnet50.py.
"""

import ml_collections

from configs import _loop


def get_config() -> ml_collections.ConfigDict:
    """The configuration; keys of the training loop are in configs/_loop.py."""
    config = _loop.get_config()
    config.benchmark = "ncf"

    # Data: ml-20m/ratings.csv, the raw ml-20m.zip or ml-1m's ratings.dat: a folder, or the file.
    config.data_dir = ""  # '' = the folder in the environment variable below
    config.data_env = "MLP_PATH_GCS_NCF"
    config.min_ratings = 20  # users with fewer are left out
    # All three 0 = what is there (without data, as in preflight: ml-20m's 138493, 26744 and
    # 20000263). Others must be what is there; steps are then compiled before data are opened.
    config.num_users = 0
    config.num_items = 0
    config.num_ratings = 0
    config.train_negatives = 4  # for each positive, anew in each epoch
    config.eval_negatives = 999  # that each user's latest item is ranked among

    # Model.
    config.gmf_dim = 64
    # Widths of the perceptron; the first is its input, half user and half item.
    config.mlp_layers = (256, 256, 128, 64)

    # Optimisation.
    config.train_batch_size = 2048
    config.gradient_accumulation_steps = 1
    config.train_steps = "20 epochs"
    config.optimizer = "adam"
    config.adam_beta1 = 0.9
    config.adam_beta2 = 0.999
    config.adam_epsilon = 1e-8
    config.moving_average_decay = 0.0  # > 0: evaluate an average of the weights
    config.base_learning_rate = 0.0005
    # base_learning_rate is per so many examples of the batch; 0: it is the peak as it stands.
    config.learning_rate_per = 0
    config.learning_rate_schedule = "step"  # or 'cosine', 'polynomial'
    # In epochs of a run of `schedule_epochs`; a run of another length stretches them.
    config.schedule_epochs = 20
    config.warmup_epochs = 0.0
    config.learning_rate_decay_epochs = ()  # only 'step'; none: the rate is constant
    # Only 'polynomial': how long it decays after the warm-up, stretched like the epochs above
    # ('' = to the end of the run), to which rate, and with which power of the time left.
    config.decay_steps = ""
    config.end_learning_rate = 0.0
    config.polynomial_power = 2.0

    # Evaluation, reports.
    config.eval_batch_size = 1024  # users, each with all the items of its ranking
    config.target = 0.635  # HR@10
    config.stop_at_target = True
    config.log_step_count_steps = "1000"
    return config
