"""NeuMF on MovieLens' ml-20m to MLPerf v0.5's target: HR@10 of 0.635 within 20 epochs.

On other ratings that target does not count: 3 evaluations without a better score end the run.

An example is a user, an item and whether the user rated it; an epoch has each rating once and
`train_negatives` items that are drawn for it. configs/_loop.py has the keys that all benchmarks
share; `benchmarks.ncf.settings.Settings` checks the others, `engine.plan.read_settings` those of
the loop.
"""

import ml_collections

from configs import _loop


def get_config() -> ml_collections.ConfigDict:
    """The recipe's values and the keys of the NCF benchmark."""
    config = _loop.get_config()
    config.benchmark = "ncf"

    # Data: ml-20m/ratings.csv, the raw ml-20m.zip or ml-1m's ratings.dat; the file or its folder.
    config.dataset = ""  # 'fake': one random batch, kept on the devices, instead of data_dir
    config.data_dir = ""  # '' = the folder in the environment variable below
    config.data_env = "MLP_PATH_GCS_NCF"
    config.min_ratings = 20  # users with fewer are left out
    # All three 0 = as many as the data hold (without data, as in preflight: ml-20m's 138493, 26744
    # and 20000263). Other numbers must agree with the data.
    config.num_users = 0
    config.num_items = 0
    config.num_ratings = 0
    config.train_negatives = 4  # for each positive; others in each epoch
    # Which items are held out and ranked: the 'latest' of each user, a 'random' one (drawn with the
    # seed), all from a 'date' on ('2018-05-31'; 'date' or '20%': the newest rows), or 'none'.
    config.eval_holdout = "latest"
    # That the held-out item is ranked among; 'all': that the user does not train on.
    config.eval_negatives = ml_collections.FieldReference(999, field_type=object)

    # Model.
    config.gmf_dim = 64
    # Widths of the perceptron; the first is its input, half user and half item.
    config.mlp_layers = (256, 256, 128, 64)

    # Optimisation.
    config.train_batch_size = 2048
    config.train_steps = "20 epochs"
    config.optimizer = "adam"
    config.base_learning_rate = 0.0005  # constant
    config.schedule_epochs = 20

    # Evaluation, reports.
    config.eval_batch_size = 1024  # users, each with all the items of its ranking
    config.target = 0.635  # HR@10; another value counts for any ratings
    config.stop_at_target = True
    config.log_step_count_steps = "1000"
    return config
