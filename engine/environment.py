"""Sets the environment variables that other libraries read when they are imported."""

from __future__ import annotations

import ctypes
import os

DEFAULTS = {
    # TensorFlow's start-up messages would hide this program's messages. The message of oneDNN has
    # no level, so oneDNN is off; TensorFlow only reads data here.
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    # TensorFlow reuses the memory of images and batches, as it does with oneDNN. malloc takes new
    # pages each time, which costs an eighth of the input's CPU time; see docs/performance.md.
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    # A connection to gs:// that is silent for this long is opened again instead of hanging.
    "GCS_REQUEST_IDLE_TIMEOUT_SECS": "30",
    # TensorFlow holds a block of each open gs:// file, by default 64 MB. Training keeps up to 512
    # files open (ops/order.py), over all hosts.
    "GCS_READ_CACHE_BLOCK_SIZE_MB": "4",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "60",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}


def set_defaults(**others: str) -> None:
    """Sets `DEFAULTS` and `others` where the environment does not set a variable; `others` win.

    Call this before the libraries are imported.
    """
    for name, value in (DEFAULTS | others).items():
        os.environ.setdefault(name, value)


def keep_freed_memory() -> None:
    """Makes malloc keep freed memory for the next step, for runs whose devices are CPUs.

    XLA allocates the temporaries of each step again on CPUs. By default glibc returns large blocks
    to the system, and new pages took a quarter of an SSD step's time (docs/performance.md). This
    does nothing where malloc is not glibc's.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: no block is mapped on its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the top of the heap stays
