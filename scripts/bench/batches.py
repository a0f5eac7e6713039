"""A batch to time a train step with: the first one of the data, or a random one without data."""

import sys
from typing import Any

from etils import epath

import benchmarks
from benchmarks.base import HostBatch
from engine.plan import Programs


def without_data(config: Any) -> Any:
    """The recipe without its folder of data, if that is not here; an unlocked config."""
    folder = config.data_dir
    if not folder or not epath.Path(folder).exists():
        config.dataset = benchmarks.FAKE
        if folder:
            print(f"NOTE {folder} does not exist: a random batch instead", file=sys.stderr)
    return config


def first(programs: Programs) -> HostBatch:
    """The first global batch of training, on the host, without the time that the host took."""
    benchmark = programs.benchmark
    benchmark.open("train")
    benchmark.set_total_steps(1000)  # the sizes of images may follow from the length of the run
    batch = next(benchmark.train_batches(programs.settings.train_batch_size, 0, 1, 0))
    return {name: x for name, x in batch.items() if name != "host_seconds"}
