"""How every program begins and ends: its streams may be closed, full, or a terminal that goes."""

import os
import pathlib
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def start(code: str, *words: str, redirect: str = "", **options) -> subprocess.Popen:
    """A program that ends through `entry.run`, started by a shell that redirects its streams."""
    text = f"from common import entry\n{code}\nentry.run(main)"
    command = f'exec "$@" {redirect}'
    arguments = ["bash", "-c", command, "_", sys.executable, "-c", text, *words]
    return subprocess.Popen(arguments, cwd=ROOT, text=True, **options)


def run(code: str, redirect: str = "") -> tuple[int, str, str]:
    """Its exit code, output and errors."""
    process = start(code, redirect=redirect, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = process.communicate()
    return process.returncode, output, errors


SAYS = "def main():\n  print('a result ' * 9999, flush=True)\n  print('a note', file=sys.stderr)"


@pytest.mark.parametrize("redirect", [">/dev/full", ">&-", "<&- >&-", ">&- 2>&-", "2>/dev/full"])
def test_an_output_may_be_lost(redirect):
    code, _, errors = run(f"import sys\n{SAYS}", redirect)
    assert (code, errors) == (0, "" if "2" in redirect else "a note\n")


def test_errors_that_nobody_can_read_are_failures_all_the_same():
    assert run("def main(): raise ValueError", "2>/dev/full")[0] == 1


@pytest.mark.parametrize(
    "call",
    [
        "from commands.predict import outputs\ndef main(): outputs.write('', ['results'])",
        "def main(): entry.result('results')",
    ],
)
def test_a_result_that_cannot_be_written_is_a_failure(call):
    status, _, errors = run(call, ">/dev/full")
    assert status == 1 and errors.splitlines()[-1].startswith("ERROR: cannot write the standard")
    assert "Traceback" not in errors


def test_a_closed_stream_gives_its_number_to_no_file(tmp_path):
    code = f"""
def main():
  with open({str(tmp_path / "data")!r}, "w") as file:
    print("words for the terminal", flush=True)
    entry.note("more words")
    file.write("data")"""
    assert run(code, "<&- >&- 2>&-")[0] == 0
    assert (tmp_path / "data").read_text() == "data"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return None", 0),
        ("return 3", 3),
        ("raise SystemExit('no')", 1),
        ("raise SystemExit(2.5)", 1),
        ("raise errors.ConfigError('no')", 1),
        ("raise KeyboardInterrupt", 130),
        ("print('\\u00e4', '\\udcff'); return 0", 0),
    ],
)
def test_the_exit_code(body, expected):
    code, _, errors = run(f"from common import errors\ndef main(): {body}", "LC_ALL=C")
    assert code == expected and "Traceback" not in errors
    assert "'no'" not in errors and ("no" in errors) == ("'no'" in body)


def test_success_waits_for_threads_and_leaves_before_python_takes_itself_apart():
    code = """
import atexit, threading, time
class Late:
  def __del__(self): print("taken apart", flush=True)
late = Late()
def work():
  time.sleep(0.3)
  print("thread", flush=True)
def main():
  atexit.register(print, "atexit")
  threading.Thread(target=work).start()
  print("main")"""
    assert run(code) == (0, "main\nthread\natexit\n", "")


RUN = """
import fcntl, pathlib, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from engine.cluster import preemption
folder = pathlib.Path(sys.argv[1])
def main():
  preemption.listen(lambda code, reason: None)
  with preemption.deferred():
    (folder / "begun").touch()
    while not preemption.requested() and not (folder / "end").exists():
      print("a step", flush=True)
      print("a bar", end="\\r", file=sys.stderr, flush=True)
      time.sleep(0.01)
    (folder / "saved").touch()
  if preemption.requested():
    print("saved", flush=True)
    return preemption.answer().code"""


@pytest.mark.parametrize("ignored", [True, False])
def test_a_run_whose_terminal_goes_away(ignored, tmp_path):
    """As under nohup or after disown it goes on to its end; else it saves as after SIGTERM."""
    terminal, own = pty.openpty()
    handler = "SIG_IGN" if ignored else "SIG_DFL"  # what these tests have is ignored under nohup
    process = start(
        f"{RUN}\nimport signal\nsignal.signal(signal.SIGHUP, signal.{handler})",
        str(tmp_path),
        **dict.fromkeys(("stdin", "stdout", "stderr"), own),
        start_new_session=True,
    )
    os.close(own)
    while not (tmp_path / "begun").exists() and process.poll() is None:
        if select.select([terminal], [], [], 0.1)[0]:
            os.read(terminal, 65536)
    os.close(terminal)
    if ignored:
        time.sleep(0.5)  # it writes to nowhere
        (tmp_path / "end").touch()
    assert process.wait() == (0 if ignored else 128 + signal.SIGTERM)
    assert (tmp_path / "saved").exists()
