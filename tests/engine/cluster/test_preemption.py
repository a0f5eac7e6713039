"""Signals that ask to stop: none is lost, wherever the program is."""

import signal

import pytest

from tests.engine.cluster.meeting import child

# Each sends SIGTERM where Python drops what a handler raises, or calls no handler.
PLACES = {
    "finalizer": """
class Finalizer:
    def __del__(self): stop()
Finalizer()""",
    "long finalizer": """
class Finalizer:
    def __del__(self):
        stop()
        end = time.monotonic() + 1.5
        while time.monotonic() < end: pass
Finalizer()""",
    "weak reference": """
import weakref
class Thing: pass
thing = Thing()
reference = weakref.ref(thing, lambda _: stop())
del thing""",
    "end of a garbage collection": """
import gc
gc.callbacks.append(lambda phase, info: phase == "stop" and gc.callbacks.clear() is None and stop())
gc.collect()""",
    "callback of C": """
import ctypes
ctypes.CFUNCTYPE(None)(stop)()""",
    "while C computes": """
import hashlib, threading
threading.Timer(0.2, stop).start()
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)""",
    "while every exception is dropped": """
while True:
    try:
        stop()
        time.sleep(60)
    except BaseException:
        pass""",
}
PROGRAM = """
import os, signal, sys, time
from engine.cluster import preemption
def leave(code, reason):
    print(reason, flush=True)
    os._exit(code)
def stop():
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000): pass  # the handler runs here
preemption.listen(leave)
try:
    exec(sys.argv[1])
    time.sleep(60)
except preemption.Preempted as error:
    leave(error.code, str(error))
"""


def test_a_signal_is_never_lost():
    children = {place: child(PROGRAM, code, errors=True) for place, code in PLACES.items()}
    for place, process in children.items():
        out, errors = process.communicate()
        assert (process.returncode, out) == (143, "stopped by SIGTERM\n"), place
        assert "Traceback" not in errors, place


SAVES = """
import signal, sys, time
from engine.cluster import preemption
preemption.listen(print)
with preemption.deferred():
    print("begun", flush=True)
    while not preemption.requested():
        time.sleep(0.01)
    time.sleep(1.5)  # a save
    print("saved", flush=True)
    sys.exit(preemption.answer().code)
"""


@pytest.mark.parametrize(
    ("name", "code"), [("INT", 130), ("HUP", 143), ("USR1", 143), ("USR2", 143), ("XCPU", 143)]
)
def test_warnings_of_clusters_save_as_sigterm_does(name, code):
    with child(SAVES, errors=True) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(getattr(signal, f"SIG{name}"))
        out, errors = process.communicate()
        assert (process.returncode, out) == (code, "saved\n"), errors
        assert f"SIG{name}: saving, then stopping" in errors


def test_what_the_parent_ignores_stays_ignored():
    ignoring = """
import os, signal, sys
for signum in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM): signal.signal(signum, signal.SIG_IGN)
from engine.cluster import preemption
preemption.listen(print)
for signum in (signal.SIGHUP, signal.SIGUSR1): os.kill(os.getpid(), signum)
print(preemption.requested())
os.kill(os.getpid(), signal.SIGTERM)
print(preemption.requested(), preemption.answer())
"""
    with child(ignoring) as process:
        assert process.communicate()[0].split() == ["False", "True", "stopped", "by", "SIGTERM"]


def test_the_second_signal_does_not_wait():
    twice = """
import os, signal, sys, time
from engine.cluster import preemption
preemption.listen(print)
os.kill(os.getpid(), signal.SIGTERM)
print("goes on")
try: os.kill(os.getpid(), signal.SIGINT)
except preemption.Preempted as error: sys.exit(error.code)
"""
    with child(twice) as process:
        assert process.communicate()[0] == "goes on\n" and process.returncode == 143


# After the answer, the last files are written, to a service that may hang.
HANGS = """
import os, signal, sys, time
from engine.cluster import preemption
def leave(code, reason):
    print(reason, flush=True)
    os._exit(code)
preemption.listen(leave)
os.kill(os.getpid(), signal.SIGINT)
preemption.answer()
os.kill(os.getpid(), signal.SIGINT)
print("goes on", flush=True)
preemption._quiet_until -= 60.0
with preemption.deferred():
    preemption._quiet_until -= 60.0
    os.kill(os.getpid(), signal.SIGINT)
    print("a save goes on", flush=True)
preemption._quiet_until -= 60.0
try:
    exec(sys.argv[1])
except preemption.Preempted as error:
    leave(error.code, str(error))
"""


def test_a_signal_ends_what_hangs_after_the_answer():
    kill = "os.kill(os.getpid(), signal.SIGINT); "
    compute = "import hashlib, threading; threading.Timer(0.2, lambda: exec(kill)).start(); "
    compute += "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"
    children = [child(HANGS, kill + "time.sleep(60)"), child(HANGS, f"kill = {kill!r}; {compute}")]
    for process in children:
        assert process.communicate()[0] == "goes on\na save goes on\nstopped by SIGINT\n"
        assert process.returncode == 130
