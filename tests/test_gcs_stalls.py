"""A gs:// that accepts requests and never answers: every phase of a run names what it waits for."""

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
import traceback

import pytest

import train
from common.errors import RESTART
from engine.cluster import watchdog
from engine.plan import read_settings
from tests.conftest import make_tiny_config
from tests.scripts.test_gradient import make_run, metrics
from tests.test_gcs_training import assert_same_results, cloud, rows, steps  # noqa: F401
from tests.test_main import ROOT, TINY, command, started

GIVE_UP = 300.0  # seconds without any news, after which a test fails instead of hanging


MODULES = {  # what a thread does inside a library, by its module
    "jax._src.compilation_cache": "reading or writing the compiled programs in ",
    "orbax.checkpoint._src.path.deleter": "deleting checkpoints that newer ones replace",
}


def in_libraries():
    """What the threads of this process do inside libraries, of which no activity tells."""
    frames = itertools.chain(*map(traceback.walk_stack, sys._current_frames().values()))
    modules = {frame.f_globals.get("__name__") for frame, _ in frames}
    return [text for name, text in MODULES.items() if name in modules]


@contextlib.contextmanager
def stalling(gcs, phases):
    """Requests that match a pattern hang until this process says that it waits for them.

    `phases` has patterns, and what the watchdog would say. The first four POSTs of a pattern go
    well. Yields the patterns that were released.
    """
    for pattern in phases:
        gcs.fault(pattern, delay=3600.0, times=-1, skip=4 * pattern.startswith("POST"))
    ended, released = threading.Event(), []

    def look():
        news = time.monotonic()
        while not ended.wait(0.2):
            activities = "; ".join([str(watchdog.activity()), *in_libraries()])
            for pattern in gcs.struck():
                if phases[pattern] in activities:
                    gcs.clear_faults(pattern)
                    released.append(pattern)
                    news = time.monotonic()
            if time.monotonic() - news > GIVE_UP:
                print(f"{gcs.struck()} wait, and the run says: {activities}")  # pytest shows it
                gcs.clear_faults()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield released
    finally:
        ended.set()
        thread.join()


@pytest.mark.slow
def test_every_phase_says_what_it_waits_for_and_goes_on(gcs, calm_run, cloud):  # noqa: F811
    data, workdir = cloud
    folder = f"{workdir}/checkpoints"
    first = {
        "GET .*prefix=records": f"listing {data}",
        "GET .*o/records/train-00001": "looking up the sizes of 4 files",
        "GET /bucket.*train-00002": "counting records",
        "PUT .*data_index/tmp.train": f"writing {workdir}/data_index/train.json",
        "PUT .*metrics.jsonl": f"writing {workdir}/metrics.jsonl",
        "PUT .*learning_curves": f"writing {workdir}/learning_curves.png",
        "PUT .*checkpoints/6/commit_success": f"writing {folder}/6",
        "DELETE .*checkpoints/3/manifest/metadata": "deleting checkpoints that newer ones replace",
        "GET .*checkpoints/12/model/d/.*alt=media": f"reading {folder}/12",
        "PUT .*tfevents": f"writing TensorBoard events in {workdir}",  # when the file is made
        "POST .*tfevents": f"writing TensorBoard events in {workdir}",  # later ones, at the end
    }
    with stalling(gcs, first) as released:
        assert (
            train.train_and_evaluate(read_settings(make_tiny_config(data), workdir)) == calm_run[1]
        )
    assert set(released) == set(first)
    assert_same_results(gcs, calm_run, workdir)
    *_, newest, last = steps(gcs, workdir)
    for name in gcs.names(f"{folder}/{last}"):
        gcs.delete(f"{folder}/{last}/{name}")
    second = {
        "GET /bucket.*metrics.jsonl": f"reading {workdir}/metrics.jsonl",
        "GET /bucket.*data_index/train.json": f"reading {workdir}/data_index/train.json",
        "GET .*prefix=some/run/checkpoints/&": folder,
        f"GET .*checkpoints/{newest}/manifest/metadata": f"reading {folder}/{newest}/manifest",
        f"GET .*checkpoints/{newest}/model/d/.*alt=media": f"reading {folder}/{newest}",
    }
    with stalling(gcs, second) as released:
        assert (
            train.train_and_evaluate(read_settings(make_tiny_config(data), workdir)) == calm_run[1]
        )
    assert set(released) == set(second)
    assert_same_results(gcs, calm_run, workdir)


STALLS = {
    "an upload": ("POST .*checkpoints/6/model/ocdbt.*/d/", "checkpoints/6"),
    "a read": ("GET /bucket.*train-00002", "waiting for input"),
    "evaluation": ("GET /bucket.*validation-00001", "evaluating"),
    "the workdir": ("/b/WORKDIR/|GET /WORKDIR/", "gs://WORKDIR/some/run/"),
    "all connections": ("CONNECT ", "gs://WORKDIR/some/run/"),
}


@pytest.mark.slow
@pytest.mark.parametrize("stall", STALLS)
def test_a_request_that_is_never_answered(stall, gcs, calm_run, cloud):  # noqa: F811
    """The watchdog ends the run and names the object; the same command goes on."""
    data, workdir = cloud
    pattern, name = (text.replace("WORKDIR", workdir.split("/")[2]) for text in STALLS[stall])
    overrides = {**TINY, "data_dir": data, "watchdog_seconds": 25, "train_steps": 60}
    output = ""
    with started(command(f"--workdir={workdir}", **overrides)) as process:
        for text in process.stdout:
            output += text
            if "step 2/" in text:
                gcs.fault(pattern, delay=3600.0, times=-1)
    assert process.returncode == 75, output
    assert "nothing has happened for 25 s" in output
    (error,) = [text for text in output.splitlines() if text.startswith("ERROR")]
    assert name in error and "nothing has happened for 50 s" in error, output
    gcs.clear_faults()
    assert 3 in steps(gcs, workdir) or stall != "an upload"
    train.train_and_evaluate(read_settings(make_tiny_config(data, train_steps="60"), workdir))
    trained = [row["step"] for row in rows(gcs, workdir) if row["split"] == "train"]
    assert trained == list(range(2, 61, 2))


@pytest.mark.long
@pytest.mark.parametrize(
    ("request_", "name", "code"),
    [
        ("GET .*8/manifest", "cannot read gs://", RESTART),
        ("GET /bucket.*metrics.jsonl", "metrics.jsonl", 1),
    ],
)
def test_finishing_a_job_ends(request_, name, code, gcs):
    model_dir = f"{gcs.bucket()}/job"
    gcs.write(f"{model_dir}/output_data/metrics.jsonl", metrics().encode())
    make_run(f"{model_dir}/output_data")
    gcs.fault(request_, delay=3600.0, times=-1)
    limits = {"GCS_REQUEST_IDLE_TIMEOUT_SECS": "1", "GCS_RETRY_CONFIG_MAX_RETRIES": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gradient", "finish"],
        cwd=ROOT,
        env={**os.environ, **limits, "TPU_MODEL_DIR": model_dir},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    (line,) = [text for text in done.stderr.splitlines() if text.startswith("ERROR: ")]
    assert name in line and "the connection stood still" in line and model_dir in line
