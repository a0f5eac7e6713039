"""What libraries read from the environment at their import, for a run of main.py."""

from __future__ import annotations

import os

DEFAULTS = {
    # TensorFlow only reads data here; its start-up notes would bury what this program says.
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    # TensorFlow keeps the memory of images and batches. From malloc, all of it is new pages each
    # time, which costs a tenth of the input's CPU time.
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    # A connection to gs:// that brings nothing for so long is tried again; else it is waited for.
    "GCS_REQUEST_IDLE_TIMEOUT_SECS": "30",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "60",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}


def set_defaults() -> None:
    """Sets `DEFAULTS` where the environment says nothing; before the libraries are imported."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
