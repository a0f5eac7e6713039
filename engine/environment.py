"""What a process runs in: versions of the program and its libraries, variables, malloc, the log.

Libraries read the variables when they are imported. The log goes to the terminal, and other
libraries' errors stay off it.
"""

import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import logging
import os
import pathlib
import subprocess
import sys
from typing import Any, TextIO

from common.errors import visible

LIBRARIES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "tensorflow-cpu")
DEFAULTS = {
    # Programs that take less time to compile are not kept. jax's 1 s left NCF without any at times.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    # TensorFlow's start-up messages would hide this program's messages. The message of oneDNN has
    # no level, so oneDNN is off; TensorFlow only reads data here.
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    # TensorFlow reuses the memory of images and batches, as it does with oneDNN. malloc takes new
    # pages each time, which costs an eighth of the input's CPU time.
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    # A connection to gs:// that is silent for this long is opened again instead of hanging.
    "GCS_REQUEST_IDLE_TIMEOUT_SECS": "30",
    # TensorFlow holds a block of each open gs:// file, by default 64 MB. Training keeps up to 512
    # files open (common/data/order.py), over all hosts.
    "GCS_READ_CACHE_BLOCK_SIZE_MB": "4",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "60",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}


def set_defaults(**others: str) -> None:
    """Sets `DEFAULTS` and `others` where the environment does not set a variable; `others` win.

    Call this before the libraries are imported: they make a million objects that stay, and Python
    looks through them for cycles less often afterwards, which saves a tenth of a start's CPU time.
    """
    for name, value in (DEFAULTS | others).items():
        os.environ.setdefault(name, value)
    if 0 < gc.get_threshold()[0] < 50_000:
        gc.set_threshold(50_000, *gc.get_threshold()[1:])


def keep_freed_memory() -> None:
    """Makes malloc keep freed memory for the next step, for runs whose devices are CPUs.

    XLA allocates the temporaries of each step again on CPUs. By default glibc returns large blocks
    to the system, and new pages took a third of NCF's step on large tables. Call
    this before jax opens its devices: a thread that has its own arena already goes on mapping
    blocks. It does nothing where malloc is not glibc's.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: no block is mapped on its own
        mallopt(-8, 1)  # M_ARENA_MAX: one, because the others map each block above 64 MB
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the top of the heap stays


def show_log(stream: TextIO, level: int = logging.INFO) -> logging.Handler:
    """Sends the log's records from `level` on to a stream of the terminal; returns what sends them.

    Orbax logs an error for every file and every task of a failed save, and TensorStore prints a
    traceback for each. The failure itself arrives as an exception, and `engine.cluster.processes`
    writes these errors to a file of a local workdir.
    """
    from absl import logging as absl_logging  # not where only the variables are set

    absl_logging.set_verbosity(absl_logging.ERROR)
    absl_logging.get_absl_handler().addFilter(lambda record: record.name != "absl")
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.unraisablehook = _print_unraisable
    log, handler = logging.getLogger("tpu_suite"), logging.StreamHandler(stream)
    handler.setFormatter(_Visible())
    log.setLevel(logging.INFO)
    log.propagate = False
    handler.setLevel(level)
    log.addHandler(handler)
    return handler


@functools.cache
def versions() -> dict[str, str]:
    """Returns {library: installed version} of the libraries that shape a run."""
    installed = {}
    for library in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[library] = importlib.metadata.version(library)
    return installed


def commit() -> str:
    """The commit of this program, with "-dirty" if files were changed; "" where git knows none."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    root = pathlib.Path(__file__).parents[1]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    return ""


class _Visible(logging.Formatter):
    """Escapes control characters, which names in the data may have."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def _print_unraisable(unraisable: Any) -> None:
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
