"""A stand-in for gcloud, of which no process stays."""

import contextlib
import os
import signal

import pytest

from tests.helpers.fake_gcloud import Place


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    for pid in made.fake.glob("worker*/tpu_run/job/pid"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(pid.read_text()), signal.SIGKILL)
