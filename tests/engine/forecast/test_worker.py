"""Workers: children that answer, that die, and what their compiler's errors mean.

The tests of commands.preflight have the signals, and a compiler that dies.
"""

import sys

import pytest

from engine.forecast import worker

CHILD = """
import json, os, sys
sys.path.insert(0, {root!r})
from multiprocessing.connection import Connection
from engine.forecast import worker
with Connection(int(sys.argv[2])) as line:  # the first argument is the module
    request = worker.receive(line)
    print("noise on stdout")
    line.send("working")
    if request == "die":
        os.write(2, b"the reason\\nE0000 ... env var TPU_WORKER_HOSTNAMES\\n=== trace\\n")
        os._exit(3)
    names = ("JAX_PLATFORMS", "TPU_NAME", "MINE", "JAX_ENABLE_COMPILATION_CACHE")
    line.send([request, {{name: os.environ.get(name) for name in names}}])
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    path = tmp_path / "child.py"
    path.write_text(CHILD.format(root=worker._ROOT))
    monkeypatch.setattr(worker, "_CHILD", [sys.executable, str(path)])


@pytest.mark.usefixtures("child")
def test_a_worker_answers_from_the_cpus_of_this_machine(monkeypatch, capfd):
    monkeypatch.setenv("TPU_NAME", "this machine's")
    monkeypatch.setenv("MINE", "7")
    request, environment = worker.ask("module", {"of": ["any", "kind"]}, "v5e:2x4")
    assert request == {"of": ["any", "kind"]}
    assert environment == {
        "JAX_PLATFORMS": "cpu",
        "TPU_NAME": None,
        "MINE": "7",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    assert capfd.readouterr() == ("", "v5e:2x4: working ...\n")


@pytest.mark.usefixtures("child")
def test_the_last_message_of_a_dead_worker_is_no_noise():
    message = "^the compiler died while working: exit code 3: the reason$"
    with pytest.raises(worker.CompilerDied, match=message):
        worker.ask("module", "die", "v5e:2x4")


FULL = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20G of 15.75G hbm."


@pytest.mark.parametrize(
    ("message", "text", "fits"),
    [
        (FULL, f"the step does not fit: {FULL.split(': ')[1]}", False),
        # Of a kernel that needs too much memory of the chip's own.
        (
            "RESOURCE_EXHAUSTED: x :: #a [space=vmem]",
            "RESOURCE_EXHAUSTED: x :: #a [space=vmem]",
            None,
        ),
        ("INTERNAL: no\nmore", "INTERNAL: no", None),
    ],
)
def test_what_the_compiler_says_against_a_program(message, text, fits):
    assert worker.refusal(RuntimeError(message), "the step") == (text, fits)


def test_the_largest_arrays_are_named_if_they_are_known():
    error = RuntimeError(FULL)
    error.add_note("the largest: 4.00 GiB f32[32768,32768] jit(step)/add")
    text, _ = worker.refusal(error, "the step")
    assert text.endswith("hbm; the largest: 4.00 GiB f32[32768,32768] jit(step)/add")
