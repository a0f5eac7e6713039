"""NeuMF on MovieLens' ml-20m to MLPerf v0.5's target: HR@10 of 0.635 within 20 epochs.

An example is a user, an item and whether the user rated it; an epoch has each rating once and
`train_negatives` items drawn beside it. Durations are as in configs/resnet50.py.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The whole configuration; every key that the program reads is here."""
    config = ml_collections.ConfigDict()
    config.benchmark = "ncf"
    config.seed = 0

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

    # Evaluation, checkpoints, reports.
    config.eval_batch_size = 1024  # users, each with all the items of its ranking
    config.target = 0.635  # HR@10
    config.stop_at_target = True
    config.steps_per_eval = "1 epoch"
    config.eval_offset = ""  # when the first one is; '' = after steps_per_eval
    config.steps_per_checkpoint = "1 epoch"
    config.keep_checkpoints = 3  # the newest; the best one stays as well
    config.log_step_count_steps = "1000"
    config.watchdog_seconds = 900.0  # without a step: stacks are written; twice as long: the end
    config.host_memory_limit = 0.95  # fuller than this, a host saves and stops
    config.hosts_wait_seconds = 300.0  # for all hosts to arrive
    config.host_silence_seconds = 60.0  # after which a host counts as dead
    # Compiled programs for the next start, outside the workdir; local or gs://, '' keeps none.
    config.compilation_cache = "~/.cache/tpu_suite"
    config.profile_steps = ""  # 'begin:end': a trace of these steps

    # The log of an MLPerf run, docs/mlperf.md.
    config.mlperf = ml_collections.ConfigDict()
    config.mlperf.format = ""  # 'v0.5': ':::MLPv0.5.0' lines; '': no log
    config.mlperf.org = ""  # who runs it
    config.mlperf.clear_caches = False  # drop the hosts' file caches first; needs root or sudo
    config.mlperf.platform = ""  # the system's name; '' = number and kind of the devices
    config.mlperf.division = "closed"  # or 'open'
    config.mlperf.status = "cloud"  # or 'onprem', 'preview', 'research'
    return config
