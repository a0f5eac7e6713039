"""Keys of the training loop, which every benchmark's configuration has."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Cadences, hosts, compiling and MLPerf's log; a recipe adds its benchmark's keys."""
    config = ml_collections.ConfigDict()
    config.seed = 0

    # Evaluation, checkpoints, reports.
    config.steps_per_eval = "1 epoch"
    config.eval_offset = ""  # when the first one is; '' = after steps_per_eval
    config.steps_per_checkpoint = "1 epoch"
    config.keep_checkpoints = 3  # the newest; the best one stays as well
    config.log_step_count_steps = "100"
    config.profile_steps = ""  # 'begin:end': a trace of these steps

    # Hosts.
    config.watchdog_seconds = 900.0  # without a step: stacks are written; twice as long: the end
    config.host_memory_limit = 0.95  # fuller than this, a host saves and stops
    config.hosts_wait_seconds = 300.0  # for all hosts to arrive
    config.host_silence_seconds = 60.0  # after which a host counts as dead
    # Compiled programs for the next start, outside the workdir; local or gs://, '' keeps none.
    config.compilation_cache = "~/.cache/tpu_suite"

    # The log of an MLPerf run, docs/mlperf.md; run_and_time.sh sets the first three.
    config.mlperf = ml_collections.ConfigDict()
    config.mlperf.format = ""  # 'mllog', 'v0.5' (NCF: only this), or '' for no log
    config.mlperf.org = ""  # who runs it
    config.mlperf.clear_caches = False  # drop the hosts' file caches first; needs root or sudo
    config.mlperf.platform = ""  # the system's name; '' = number and kind of the devices
    config.mlperf.division = "closed"  # or 'open'
    config.mlperf.status = "cloud"  # or 'onprem', 'preview', 'research'
    return config
