"""engine/environment.py: what a run's libraries find in the environment."""

import ctypes
import gc
import os
import pathlib
import platform
import subprocess
import sys
import types

import pytest

from engine import environment

ROOT = pathlib.Path(__file__).parents[2]


def test_the_users_own_values_stay(monkeypatch):
    for name in environment.DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GCS_REQUEST_IDLE_TIMEOUT_SECS", "7")
    monkeypatch.setattr(gc, "set_threshold", lambda *_: None)
    environment.set_defaults()
    values = {name: os.environ[name] for name in environment.DEFAULTS}
    assert values == environment.DEFAULTS | {"GCS_REQUEST_IDLE_TIMEOUT_SECS": "7"}


@pytest.mark.parametrize(("before", "after"), [(700, 50_000), (90_000, 90_000)])
def test_python_looks_for_cycles_less_often(before, after, monkeypatch):
    thresholds = [(before, 10, 7)]
    monkeypatch.setattr(gc, "get_threshold", lambda: thresholds[-1])
    monkeypatch.setattr(gc, "set_threshold", lambda *values: thresholds.append(values))
    environment.set_defaults()
    assert thresholds[-1] == (after, 10, 7)


@pytest.mark.parametrize("is_glibc", [True, False])
def test_malloc_keeps_freed_memory(is_glibc, monkeypatch):
    """The numbers of the parameters are those of glibc's malloc.h."""
    calls = []
    library = types.SimpleNamespace(mallopt=lambda *pair: calls.append(pair))
    monkeypatch.setattr(
        ctypes, "CDLL", lambda name: library if is_glibc else types.SimpleNamespace()
    )
    environment.keep_freed_memory()
    m_mmap_max, m_arena_max, m_trim_threshold = -4, -8, -1
    assert calls == [(m_mmap_max, 0), (m_arena_max, 1), (m_trim_threshold, -1)] * is_glibc


@pytest.mark.long
def test_main_sets_them_before_a_library_is_imported():
    """TensorFlow and TensorStore read them once, at their import."""
    code = (
        "import builtins, os, sys\n"
        "from engine import environment\n"
        "checks, plain = [], builtins.__import__\n"
        "def spy(name, *rest, **more):\n"
        "    if name.split('.')[0] in ('tensorflow', 'tensorstore', 'orbax') and not checks:\n"
        "        checks.append(all(k in os.environ for k in environment.DEFAULTS))\n"
        "    return plain(name, *rest, **more)\n"
        "builtins.__import__ = spy\n"
        "import main\n"
        "from common.tensorflow import tensorflow\n"
        "tensorflow()\n"
        "print(checks)\n"
    )
    clean = {k: v for k, v in os.environ.items() if k not in environment.DEFAULTS}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[True]"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other mallocs have no mallopt")
def test_a_step_on_cpus_takes_its_temporaries_from_freed_memory():
    """Jax's threads would map each block above 64 MB anew: 32,768 pages, each of which faults."""
    code = (
        "import resource\n"
        "from engine import devices\n"
        "devices.open_platform()\n"
        "import jax\n"
        "step = jax.jit(lambda i: jax.numpy.zeros(1 << 25).at[i].add(1.0).sum())\n"
        "i, faults = jax.numpy.arange(9), []\n"
        "for _ in range(12):\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    step(i).block_until_ready()\n"
        "    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
        "print(min(faults[2:]))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(run.stdout.splitlines()[-1]) < 1000
