"""One process of several, and runs of several real ones, which share four simulated devices."""

import json
import logging
import os
import resource
import shutil
import signal
import tempfile
import time
import types
from pathlib import Path

import jax
import pytest

from common.errors import RESTART, CheckpointError, ConfigError, HostError
from engine.cluster import processes, watchdog
from scripts import prepare
from tests.test_main import TINY, environment
from tests.torture import Group, differences, results

# Alone: the test plays the other processes.


@pytest.fixture
def joined(monkeypatch):
    """What process 1 of two does, in order; its failures and its exit end nothing."""
    events = []
    host = types.SimpleNamespace(activity="reading")
    fake = types.SimpleNamespace(
        silence=40.0,
        hosts={1: host, 0: types.SimpleNamespace(activity="counting")},
        barrier=lambda facts=None: events.append(("barrier", facts)),
        leave=lambda: events.append(("leave",)),
        fail=lambda *arguments: events.append(("fail", *arguments)),
    )
    monkeypatch.setattr(processes, "_heartbeat", fake)
    monkeypatch.setattr(processes, "_index", 1)
    monkeypatch.setattr(processes, "_last_words", None)
    monkeypatch.setattr(processes.signal, "signal", lambda *arguments: None)
    monkeypatch.setattr(processes.time, "sleep", lambda seconds: events.append(("sleep", seconds)))
    monkeypatch.setattr(processes, "_exit_now", lambda code: events.append(("exit", code)))
    return events


def caused(error, cause):
    error.__cause__ = cause
    return error


LOST = jax.errors.JaxRuntimeError("the peer is gone")
CUT = ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")  # jax raises it, too
STORE = ValueError("UNKNOWN: no space [source locations='tensorstore/driver.cc']")
FULL = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GB")
AGAIN = "; start the same command again on all hosts"


@pytest.mark.parametrize(
    ("error", "waits", "message", "code", "alone"),
    [
        (LOST, True, f"the peer is gone{AGAIN}", RESTART, None),
        (caused(ValueError("save"), LOST), True, f"save{AGAIN}", RESTART, None),
        (caused(ValueError("save"), CUT), True, f"save{AGAIN}", RESTART, None),
        (CUT, True, f"{CUT}{AGAIN}", RESTART, None),
        (STORE, False, f"ValueError: {STORE}", 1, None),
        (caused(CheckpointError("save"), FULL), False, "save", 1, "save"),
        (ConfigError("config.x=1"), False, "config.x=1", 1, "config.x=1"),
        (HostError("late", RESTART), False, "late", RESTART, "late; exit code 75"),
        (OSError("no space"), False, "no space", 1, "no space"),
        (ValueError("a fault"), False, "ValueError: a fault", 1, None),
        (FULL, False, "JaxRuntimeError: RESOURCE_EXHAUSTED: 9 GB", 1, None),
    ],
)
def test_how_an_exception_ends_all(error, waits, message, code, alone, joined, monkeypatch, capsys):
    """If the devices failed, another host may be lost: the heartbeat gets time to find it."""
    processes.fail_with(error)
    ends = [("fail", message, code), ("exit", code)]
    assert joined == [*[("sleep", 40.0 + 5.0)] * waits, *ends]
    suffix = "" if code == 1 else f"; exit code {code}"
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == f"ERROR: {message}{suffix}"
    assert len(lines) == 1 or not (alone or waits)  # the stack of an unexpected error
    joined.clear()
    monkeypatch.setattr(processes, "_heartbeat", None)
    processes.fail_with(error)
    assert joined == ([("exit", code)] if alone else [])
    assert capsys.readouterr().err == (f"ERROR: {alone}\n" if alone else "")


@pytest.mark.parametrize(
    ("code", "line"),
    [(1, "ERROR: why"), (RESTART, f"ERROR: why{AGAIN}; exit code 75"), (143, "why; exit code 143")],
)
def test_a_host_follows_another_one(code, line, joined, capsys):
    """The other one may have followed a third."""
    processes.follow("why" if code != RESTART else f"why{AGAIN}", code)
    assert capsys.readouterr().err == f"{line}\n" and joined[-1] == ("exit", code)


@pytest.mark.parametrize("index", [0, 1])
def test_process_0_works_before_the_others(index, joined, monkeypatch):
    monkeypatch.setattr(processes, "_index", index)
    waits = []
    during = watchdog.during
    monkeypatch.setattr(watchdog, "during", lambda what: waits.append(what) or during(what))
    result = processes.first_process_first(lambda: joined.append(("work",)) or 7)
    assert result == 7
    order = [("work",), ("barrier", None)]
    assert joined == (order[::-1] if index else order)
    assert waits == [
        "waiting for host 0 to read the data" if index else "waiting for the other hosts"
    ]
    (other,) = processes.others()
    assert other.endswith(" is counting" if index else " is reading")


@pytest.mark.parametrize("code", [0, RESTART])
def test_processes_that_finish_leave_together(code, joined, monkeypatch):
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: joined.append("shutdown"))
    processes.finish(code)
    assert joined == [("barrier", None), "shutdown", ("leave",), ("exit", code)]
    joined.clear()
    monkeypatch.setattr(processes, "_heartbeat", None)
    if code:
        processes.finish(code)
        assert joined == [("exit", code)]
    else:  # the ordinary way
        with pytest.raises(SystemExit) as caught:
            processes.finish(code)
        assert caught.value.code == 0 and not joined


def test_the_facts_of_a_run(monkeypatch):
    monkeypatch.setattr(processes.environment, "commit", lambda: "0123-dirty")
    facts = processes.run_facts({"seed": 3, "mlperf": {"format": ""}})
    assert (facts["config.seed"], facts["config.mlperf.format"]) == ("3", "")
    assert facts["the version of jax"] == jax.__version__
    assert facts["the program's commit"] == "0123-dirty"


# Several processes.


@pytest.fixture(autouse=True, scope="module")
def clean():
    """The variables of a developer's shell must not choose the workdir."""
    kept, variables = dict(os.environ), environment()
    os.environ.clear()
    os.environ.update(variables)
    yield
    os.environ.clear()
    os.environ.update(kept)


def flags(data, **overrides):
    keys = {"data_dir": data, **TINY, **overrides}
    return ["--config=configs/digits.py", *(f"--config.{k}={v}" for k, v in keys.items())]


def finished(group, *expected):
    codes = group.wait()
    assert codes == list(expected or [0] * group.count), group.said() + group.said(group.count - 1)
    return group


@pytest.fixture(scope="module")
def calm(tiny_records, tmp_path_factory):
    """Two processes that nobody disturbed."""
    group = Group(str(tmp_path_factory.mktemp("calm") / "run"), flags(tiny_records), 2)
    return finished(group.start())


def until(group, index, text):
    """Waits until a process has printed `text`."""
    while text not in group.said(index):
        assert group.alive(), group.said(index)
        time.sleep(0.05)


def assert_close(rows, others):
    for row, other in zip(rows, others, strict=True):
        assert row.pop("split") == other.pop("split")
        assert row == pytest.approx(other, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_processes_is_one_run(count, calm, tiny_records, tmp_path):
    """Gradients are summed in another order than within one process: not bit for bit."""
    other = finished(Group(str(tmp_path / "run"), flags(tiny_records), count).start())
    rows, steps = results(other.workdir)
    shared_rows, shared_steps = results(calm.workdir)
    assert steps.keys() == shared_steps.keys()
    assert_close(rows, shared_rows)
    assert [r["examples"] for r in shared_rows if "examples" in r] == [23, 23, 23]


def test_who_writes_what(calm):
    names = sorted(os.listdir(calm.workdir))
    assert sum("tfevents" in name for name in names) == 1
    assert sorted(os.listdir(f"{calm.workdir}/hosts")) == ["host-000.log", "host-001.log"]
    for index in (0, 1):
        with open(f"{calm.workdir}/hosts/host-00{index}.log") as file:
            assert "step 12/12" in file.read()
    assert "step 12/12" in calm.said(0) and "step 12/12" not in calm.said(1)


@pytest.mark.slow
def test_evaluation_and_doctor(calm):
    group = Group(calm.workdir, [*calm.arguments, "--mode=eval"], 2)
    finished(group.start())
    with open(f"{calm.workdir}/eval/metrics.jsonl") as file:
        row = json.loads(file.readlines()[-1])
    trained = [r for r in results(calm.workdir)[0] if r["split"] == "eval"][-1]
    assert row["examples"] == 23 and row["loss"] == pytest.approx(trained["loss"], rel=1e-5)
    group.arguments = [*calm.arguments, "--mode=doctor"]
    finished(group.start())
    assert "hosts: 2 arrived at 127.0.0.1:" in group.said(1)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_kill_9_of_one_stops_the_other_and_loses_nothing(victim, calm, tmp_path):
    group = Group(str(tmp_path / "run"), calm.arguments, 2).start()
    until(group, 0, "step 4/12")
    group.processes[victim].kill()
    codes = group.wait()
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == RESTART, codes
    lines = [line for line in group.said(1 - victim).splitlines() if line.startswith("ERROR")]
    assert len(lines) == 1 and f"host {victim} (" in lines[0] and "is gone" in lines[0]
    assert "start the same command again" in lines[0]
    assert "*** " not in group.said(1 - victim)  # of jax, which would abort
    finished(group.start())
    assert not differences(calm.workdir, group.workdir)


@pytest.mark.slow
def test_sigterm_to_one_saves_on_all_and_one_alone_goes_on(calm, tmp_path):
    group = Group(str(tmp_path / "run"), calm.arguments, 2).start()
    until(group, 0, "step 2/12")
    group.processes[1].send_signal(signal.SIGTERM)
    finished(group, 143, 143)
    saved = max(map(int, results(group.workdir)[1]))
    assert "stopped by SIGTERM" in group.said(0) and 2 <= saved < 12
    alone = finished(Group(group.workdir, calm.arguments, 1).start())
    assert f"resuming at step {saved} " in alone.said()
    rows, steps = results(alone.workdir)
    calm_rows, calm_steps = results(calm.workdir)
    assert steps.keys() - {str(saved)} == calm_steps.keys() - {str(saved)}
    assert_close(rows, calm_rows)


@pytest.mark.slow
def test_a_write_error_of_one_ends_all_and_loses_nothing(calm, tmp_path):
    """Orbax alone would wait for ever: the others for this host's commit, this one for them."""
    group = Group(str(tmp_path / "run"), calm.arguments, 2).start()
    until(group, 0, "step 2/12")
    pid, least = group.processes[0].pid, 20_000  # bytes, more than logs and less than arrays
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (least, resource.RLIM_INFINITY))
    finished(group, 1, 1)
    (error,) = [line for line in group.said(1).splitlines() if line.startswith("ERROR")]
    assert "host 0 (" in error and "could not be saved" in error and "File too large" in error
    finished(group.start())
    assert not differences(calm.workdir, group.workdir)


@pytest.mark.long
def test_an_evaluation_that_hangs_ends(calm, tmp_path):
    workdir, recipe = str(tmp_path / "run"), tmp_path / "recipe.py"
    shutil.copytree(calm.workdir, workdir)
    recipe.write_text(
        "import time\n"
        "import input_pipeline\n"
        "from configs.digits import get_config\n"
        "input_pipeline.eval_batches = lambda *_: time.sleep(3600)\n"
    )
    arguments = [f"--config={recipe}", *calm.arguments[1:], "--config.watchdog_seconds=2"]
    group = finished(Group(workdir, [*arguments, "--mode=eval"], 1).start(), RESTART)
    assert "nothing has happened for 2 s" in group.said()
    assert "ERROR: nothing has happened for" in group.said()
    assert any(name.endswith("stacks.txt") for name in os.listdir(f"{workdir}/hosts"))


def test_a_host_that_disagrees_ends_and_is_named(tiny_records, tmp_path):
    group = Group(str(tmp_path / "run"), flags(tiny_records, hosts_wait_seconds=60), 2)
    group.start(each=[[], ["--config.seed=1"]])
    group.processes[1].wait()
    reason = "differs: config.seed is 1 there and 0 on host 0"
    until(group, 0, reason)
    group.processes[0].send_signal(signal.SIGTERM)
    finished(group, 143, 1)
    (error,) = [line for line in group.said(1).splitlines() if line.startswith("ERROR")]
    assert "host 0 (" in error and "host 1 (" in error and reason in error
    assert "Traceback" not in group.said(0) + group.said(1)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "kills"), [(1, 20), (2, 20), (4, 10)])
def test_torture(processes, kills, tmp_path, capsys, monkeypatch):
    """Random kills of random processes; whatever was killed ends like what was not."""
    from tests import torture

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    prepare.make("digits", ["--out", str(tmp_path / "digits")])
    words = [f"--kills={kills}", f"--processes={processes}", "--seed=3"]
    code = torture.main([*words, f"--data={tmp_path / 'digits'}"])
    output = capsys.readouterr().out
    assert code == 0 and f"torture: {kills} kills, 0 things wrong" in output, output


def test_torture_sees_what_differs(calm_run, tmp_path):
    """The comparison is not blind: another row, another array, a missing checkpoint."""
    calm, _ = calm_run
    for change in ("row", "array", "step"):
        other = Path(shutil.copytree(calm, tmp_path / change))
        metrics, facts = other / "metrics.jsonl", other / "checkpoints/12/manifest/metadata"
        if change == "row":
            metrics.write_text(metrics.read_text().replace('"loss": 1', '"loss": 2', 1))
        elif change == "step":
            shutil.rmtree(other / "checkpoints/12")
        else:
            content = json.loads(facts.read_text())
            content["checksums"]["model"]["params/head/bias"] += 1
            facts.write_text(json.dumps(content))
        found = differences(calm, str(other))
        assert len(found) == 1, change
        assert change != "array" or found == [
            "checkpoint 12 has other bits in model/params/head/bias"
        ]
    assert not differences(calm, calm)


def test_each_host_has_a_log_of_its_own_that_later_runs_append_to(tmp_path):
    loggers = logging.getLogger("tpu_suite"), logging.getLogger("absl")
    loggers[0].setLevel(logging.INFO)
    for text in ("first", "second"):  # two runs after one another
        handler = processes.attach_log(str(tmp_path / "a"), 12)
        assert processes.attach_log(str(tmp_path / "a"), 12) is handler
        loggers[0].info("%s run", text)
        other = processes.attach_log(str(tmp_path / "b"), 12)
        for logger in loggers:
            assert other in logger.handlers and handler not in logger.handlers
            logger.removeHandler(other)
    lines = (tmp_path / "a/hosts/host-012.log").read_text().splitlines()
    assert [line.split(" INFO ")[1] for line in lines] == ["first run", "second run"]


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "hosts").write_text("in the way")
    handler = processes.attach_log(str(tmp_path), 0)
    logging.getLogger("tpu_suite").info("still here")
    assert handler.note("stacks.txt", "x") == ""
    logging.getLogger("tpu_suite").removeHandler(handler)


def test_a_bucket_has_notes_and_no_log(gcs):
    workdir = f"{gcs.bucket()}/run"
    handler = processes.HostLog(workdir, 0)
    assert not handler.path.exists()  # imports TensorFlow, for which `note` would not wait
    handler.emit(logging.makeLogRecord({"msg": "a line", "levelno": logging.ERROR}))
    path = handler.note("stacks.txt", "stacks")
    assert path == f"{workdir}/hosts/host-000.stacks.txt" and gcs.read(path) == b"stacks"
    assert not [name for name in gcs.names(workdir) if name.endswith(".log")]
