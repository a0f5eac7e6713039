"""Eight simulated devices for every test, unless --mode=prove runs it; set before jax is there."""

import contextlib
import gc
import importlib
import importlib.metadata
import json
import logging
import logging.handlers
import os
import pathlib
import sys
import time

import pytest

from engine import environment
from tests.helpers.gcs_fixture import (
    gcs,  # noqa: F401
    gcs_process,  # noqa: F401
)

# --mode=prove runs tests that are marked `device` on the devices of the machine, as they are.
ON_DEVICE = "PROVE" in os.environ
if ON_DEVICE:
    environment.set_defaults()
else:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
    _FLAGS = ["--xla_force_host_platform_device_count=8"]
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        # XLA's older code generator compiles a tiny run in a third of the time; later jaxlibs lack
        # it.
        _FLAGS += [
            "--xla_cpu_use_fusion_emitters=false",
            "--xla_cpu_parallel_codegen_split_count=1",
        ]
    for _flag in _FLAGS:
        if _flag not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()
    # Compiling takes most of a tiny run.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    # One compilation serves all tests and their commands. There is no size: with one, jax reads the
    # whole folder under a lock before each new entry.
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    # Parity tests have torch, which imports triton, whose import crashes after TensorFlow's.
    with contextlib.suppress(ImportError):
        importlib.import_module("triton")


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Keeps compiled programs for the session, in all of its processes and their children."""
    if ON_DEVICE:  # --mode=prove has named a folder
        return
    import jax

    environment.keep_freed_memory()  # as a run on CPUs does
    base = tmp_path_factory.getbasetemp()
    folder = str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    jax.config.update("jax_compilation_cache_dir", folder)


@pytest.fixture
def answer(record_property):
    """Records what --mode=prove shows of a test: a line, {figure: value}, {program: SHA-256}."""

    def record(summary, figures=None, programs=None):
        content = {"summary": summary, "figures": figures or {}, "programs": programs or {}}
        record_property("answer", json.dumps(content))

    return record


@pytest.fixture(autouse=True)
def log_of_the_program():
    """A command that an earlier test or fixture called changes neither the log nor caplog."""
    log = logging.getLogger("tpu_suite")

    def reset():
        log.setLevel(logging.NOTSET)
        log.propagate = True
        log.handlers.clear()

    reset()
    yield
    reset()


# The files that take longest come first, so that no worker is left with one alone.
LONG = (
    *("test_benchmarks", "test_processes", "test_train", "test_programs", "test_mlperf"),
    *("test_tensorflow_weights", "test_report", "test_translators", "test_main", "test_sizes"),
    *("test_gcs_faults", "test_boundary", "test_boxes", "test_check"),
    *("test_input_pipeline", "test_checkpointer", "test_tuning", "test_gcs_stalls"),
    *("test_weights_tuning", "test_gram_resnet", "test_weights", "test_sentences"),
)


def pytest_collection_finish():
    """Garbage is not looked for among all modules again, which takes 0.2 s each time."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Puts the long files first; scripts/test.sh keeps xdist from sorting by number of tests."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture(scope="session")
def tiny_records(tmp_path_factory):
    """A folder of records: 4 classes of coloured noise, 90 train images, 23 to evaluate."""
    import io

    import numpy as np
    from PIL import Image

    from benchmarks.resnet.preparation.examples import tf_example
    from tests.helpers.preparation import write_shards

    def encoded(draw, label):
        pixels = draw.normal(100, 30, (20, 24, 3))
        pixels[..., label % 3] += 60 + 60 * (label // 3)
        file = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG")
        return file.getvalue()

    folder = tmp_path_factory.mktemp("records")
    for split, count, shards in (("train", 90, 4), ("validation", 23, 2)):
        draw = np.random.default_rng(len(split))
        rows = []
        for i in range(count):
            label = i % 4
            image = encoded(draw, label)
            rows.append(tf_example(image, label + 1, f"n{label}", f"{i}.JPEG", (20, 24)))
        write_shards(str(folder), split, rows, shards)
    return str(folder)


# The benchmark `languages` lives there: one outside this repository's own folder of benchmarks.
FIXTURES = pathlib.Path(__file__).parent / "fixtures"
sys.path.append(str(FIXTURES))


@pytest.fixture(scope="session")
def tiny_texts(tmp_path_factory):
    """A folder of texts for the benchmark `languages`: 72 to train, 23 to evaluate."""
    from tests.fixtures import make_texts

    folder = tmp_path_factory.mktemp("texts")
    make_texts.make(folder, count=95)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_scenes(tmp_path_factory):
    """A folder of images with boxes: 90 to train from and 6 without a box, 23 to evaluate."""
    from tests.benchmarks.detection import scenes_fixture

    folder = tmp_path_factory.mktemp("scenes")
    scenes_fixture.make(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_masks(tmp_path_factory):
    """A folder of images with outlined objects, two of three wide and the others upright.

    90 to train from, 6 without an object and one with a crowd only; 23 to evaluate.
    """
    from tests.benchmarks.detection import scenes_fixture

    folder = tmp_path_factory.mktemp("masks")
    scenes_fixture.make(folder, outlined=True)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_sentences(tmp_path_factory):
    """A folder of packed rows of sentences: 90 to train from; 23 sentences to evaluate."""
    from tests.benchmarks.translation import sentences_fixture

    folder = tmp_path_factory.mktemp("sentences")
    sentences_fixture.make(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_bpe(tmp_path_factory):
    """A folder of sentences in parts of words: 90 to train from; 23 to evaluate, 9 as filling."""
    from tests.benchmarks.translation import bpe_fixture

    folder = tmp_path_factory.mktemp("bpe")
    bpe_fixture.make(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_ratings(tmp_path_factory):
    """A folder of ratings: 23 users with 2 of 12 items each, and one with a single rating."""
    lines = ["userId,movieId,rating,timestamp"]
    for user in range(23):
        for k, item in enumerate((user % 12, (5 * user + 3) % 12)):
            lines.append(f"{7 * user + 1},{10 * item + 5},3.5,{1000 + (-1) ** user * k}")
    folder = tmp_path_factory.mktemp("ratings")
    (folder / "ratings.csv").write_text("\n".join([*lines, "500,5,1.0,7", ""]))
    return str(folder)


# The smallest real job: a narrow ResNet-10, 12 steps of 16 images.
TINY = {
    "num_label_classes": 4,
    "image_size": 16,
    "resnet_depth": 10,
    "num_filters": 4,
    "train_batch_size": 16,
    "eval_batch_size": 8,
    "train_steps": "12",
    "steps_per_eval": "4",
    "steps_per_checkpoint": "3",
    "log_step_count_steps": "2",
    "shuffle_buffer_size": 64,
    "input_streams": 8,
}


def make_tiny_config(data_dir, **overrides):
    """The config of `TINY`."""
    from configs import digits

    config = digits.get_config()
    config.update({**TINY, "data_dir": data_dir, "target": 0.5, **overrides})
    return config


@pytest.fixture(scope="session")
def calm_run(tmp_path_factory, tiny_records):
    """(workdir, scores) of a whole run of the tiny config that nobody disturbed; to read only."""
    import train
    from engine.plan import read_settings

    workdir = str(tmp_path_factory.mktemp("calm"))
    return workdir, train.train_and_evaluate(read_settings(make_tiny_config(tiny_records), workdir))


@pytest.fixture(scope="session")
def untrained_run(tmp_path_factory, tiny_records):
    """The workdir of a ResNet for 4 classes with averages, whose step 4 has its first weights."""
    import jax.numpy as jnp

    from engine.checkpoint.checkpointer import Checkpointer
    from engine.checkpoint.manifest import describe_run
    from engine.plan import make_plan, read_settings
    from engine.run import Run
    from engine.step import checkpoint_items

    workdir = str(tmp_path_factory.mktemp("untrained") / "run")
    settings = read_settings(make_tiny_config(tiny_records, moving_average_decay=0.9), workdir)
    run = Run.open(settings)
    plan = make_plan(settings, run.benchmark, 90)
    state = run.programs.initial_state(plan)._replace(step=jnp.int32(4))
    totals = run.programs.zeros(run.programs.abstract_totals(plan, state))()
    checkpoints = Checkpointer(f"{run.settings.workdir}/checkpoints", keep=1, best=lambda: None)
    opened(run.benchmark)
    checkpoints.save(4, **checkpoint_items(state, totals), manifest=describe_run(run.programs, 90))
    checkpoints.close()
    return workdir


@pytest.fixture
def nothing_held_out(monkeypatch):
    """Classifiers with nothing to evaluate: their evaluation data cannot be touched."""
    from benchmarks.resnet import ImageClassifier

    def untouched(name):
        original = getattr(ImageClassifier, name)

        def method(self, split, *args):
            assert split == "train", name
            return original(self, split, *args)

        monkeypatch.setattr(ImageClassifier, name, method)

    for name in ("open", "num_examples", "batch_spec", "identity", "host_bytes"):
        untouched(name)
    monkeypatch.setattr(ImageClassifier, "no_evaluation", "config.hold_out=0")


def make_programs(config, cache_dir=""):
    """The programs of a config on this machine's devices."""
    from engine.plan import Programs, read_settings

    return Programs.make(read_settings(config), str(cache_dir))


def opened(benchmark, *splits):
    """The benchmark with opened data, of both splits if none is named."""
    for split in splits or ("train", "eval"):
        benchmark.open(split)
    return benchmark


def plan_of(config, num_examples):
    """The plan of a config for so many training examples."""
    from engine.plan import make_plan, read_settings

    settings = read_settings(config)
    return make_plan(settings, settings.load_benchmark(""), num_examples)


def resolved(config, workdir="", mode="train_and_eval", given=()):
    """(the settings of a run, as main.py makes them; its notes)."""
    from commands import configuration
    from commands.recipe import Recipe
    from common import keys

    recipe = Recipe("", config.lock(), keys.flat(config), given)
    log, handler = logging.getLogger("tpu_suite"), logging.handlers.BufferingHandler(1000)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    settings = configuration.resolve(recipe, mode, str(workdir))
    log.setLevel(level)
    log.removeHandler(handler)
    lines = [record.getMessage() for record in handler.buffer]
    return settings, [line.removeprefix("NOTE ") for line in lines if line.startswith("NOTE ")]


def adopt_values(config, source, whole=False):
    """Gives a config the values of another model; returns the changes."""
    import benchmarks

    values, _ = benchmarks.adopted_values(config, source, (), whole)
    with config.unlocked():
        config.update(values)
    return values


def open_run(config, workdir):
    """The run of a config in a workdir."""
    from engine.plan import read_settings
    from engine.run import Run

    return Run.open(read_settings(config, str(workdir)))


@pytest.fixture
def clock(monkeypatch):
    """The time that MLPerf's log sees."""
    from tests.helpers.mlperf_fixture import Clock  # it imports jax

    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    return clock
