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
    config.benchmark = "ncf"  # the package in benchmarks/

    # Data: ml-20m/ratings.csv, the raw ml-20m.zip or ml-1m's ratings.dat; the file or its folder.
    config.dataset = ""  # 'fake': one random batch, kept on the devices, instead of data_dir
    config.data_dir = ""  # '' = the folder in the environment variable `data_env`
    config.data_env = "MLP_PATH_GCS_NCF"  # environment variable of the folder
    config.min_ratings = 20  # users with fewer are left out
    # 0 = as many as the data hold; all three. Without data, as in preflight: ml-20m's 138493, 26744
    # and 20000263. Other numbers must agree with the data.
    config.num_users = 0
    config.num_items = 0  # 0 = all
    config.num_ratings = 0  # 0 = all
    config.train_negatives = 4  # items drawn for each rating; others in each epoch
    # Hold out items: the 'latest' of each user, a 'random' one, from a date on, or 'none'. The seed
    # draws. A date: '2018-05-31', or 'date' or '20%' for the newest rows.
    config.eval_holdout = "latest"
    # Items that the held-out one is ranked among; 'all': that the user does not train on.
    config.eval_negatives = ml_collections.FieldReference(999, field_type=object)

    # Model.
    config.gmf_dim = 64  # width of the GMF branch
    # Widths of the MLP branch; the first is its input, half user and half item.
    config.mlp_layers = (256, 256, 128, 64)

    # Optimisation.
    config.train_batch_size = 2048
    config.train_steps = "20 epochs"
    config.optimizer = "adam"
    config.base_learning_rate = 0.0005  # constant
    config.schedule_epochs = 20

    # Evaluation, reports.
    config.eval_batch_size = 1024  # users, each with all the items of its ranking
    config.target = 0.635  # HR@10 to reach; another value counts for any ratings
    config.stop_at_target = True
    config.log_step_count_steps = "1000"
    return config
