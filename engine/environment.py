"""Sets the environment variables that other libraries read when they are imported."""

from __future__ import annotations

import os

DEFAULTS = {
    # TensorFlow only reads data here; its start-up notes would bury this program's messages.
    # oneDNN's note has no level, so oneDNN is off.
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    # TensorFlow keeps the memory of images and batches, as it would with oneDNN. malloc takes new
    # pages each time: an eighth of the input's CPU time, see docs/performance.md.
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    # A connection to gs:// that brings nothing for so long is opened again; else it hangs.
    "GCS_REQUEST_IDLE_TIMEOUT_SECS": "30",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "60",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}


def set_defaults(**others: str) -> None:
    """Sets `DEFAULTS` and `others`, which win, where the environment leaves a variable open.

    Call this before the libraries are imported.
    """
    for name, value in (DEFAULTS | others).items():
        os.environ.setdefault(name, value)
