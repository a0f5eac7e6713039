"""Hosts meet at the start of a run, whatever strangers send to host 0."""

import contextlib
import functools
import json
import queue
import socket
import threading
import time

import pytest

from common.errors import RESTART, HostError
from engine.cluster import rollcall
from engine.cluster.heartbeat import Heartbeat
from tests.engine.cluster.meeting import FACTS, ME, RollCall, Run, in_threads, leave

SEED = "config.seed is 7 there and 0 on host 0"


def greeting(index, facts, secret=b"", changes=()):
    """The line with which a process greets, as a function of host 0's challenge."""

    def line(challenge):
        proof = rollcall.proof(secret, challenge, "mine", index, "x", facts)
        values = {"index": index, "name": "x", "facts": facts, "challenge": "mine", "proof": proof}
        return json.dumps({**values, **dict(changes)}).encode() + b"\n"

    return line


def nested(depth):
    return b"[" * depth + b"]" * depth


def until_logged(log):
    """Waits for host 0's one line about strangers that hang up; it must not reach another test."""
    while not log:
        time.sleep(0.01)


@pytest.mark.parametrize(
    "changes",
    [
        *({"index": "1"}, {"index": True}, {"index": 1.0}, {"name": 7}, {"name": "x\ny"}),
        *({"facts": []}, {"facts": {"a": []}}, {"facts": {"b": 1, "a": {}}}, {"proof": "é"}),
        *({"name": "x" * 256}, {"proof": None}, {"challenge": 3}),
    ],
)
def test_an_invalid_greeting_is_refused(changes):
    valid = json.loads(greeting(1, {"a": 1, "b": None})("challenge"))
    host = rollcall._read_greeting(valid)
    assert (host.index, host.name, host.facts) == (1, "x", valid["facts"])
    with pytest.raises(TypeError):
        rollcall._read_greeting({**valid, **changes})


# Hosts.


def test_a_missing_host_is_named_on_all():
    (error,) = {str(error) for error in Run(4, wait=3.0).meet(absent=(2,))}
    assert "3 of 4 hosts arrived; host 2 (t2) did not within" in error


def test_a_missing_first_host():
    (error,) = Run(wait=0.6).meet(absent=(0,))
    assert "host 0 does not answer at 127.0.0.1:" in str(error) and "firewall" in str(error)


def test_with_a_secret_a_host_that_would_run_something_else_ends_all():
    facts = {"config.seed": "7", "workdir": "x"}
    errors = Run(3, b"of this run").meet(facts)
    assert {str(error) for error in errors} == {f"host 2 ({ME}) differs: {SEED}"}
    assert {error.code for error in errors} == {1}


def test_without_a_secret_such_a_host_alone_ends_and_host_0_knows_why(log):
    """It could be a stranger, whom host 0 tells nothing and for whom it does not change its code.

    The wait is for the host that has the right settings.
    """
    run = RollCall(wait=4.0)
    error = run.join(1, {"config.seed": "7"})
    reason = "its settings differ from host 0's, whose output says where"
    assert isinstance(error, HostError) and error.code == 1
    assert str(error) == f"host 0 ({ME}) refuses this process: {reason}"
    assert log == [f"WARNING ignored 127.0.0.1, which tried to join this run: {SEED}"]
    first = run.first.get()
    assert isinstance(first, HostError) and first.code == RESTART
    assert f"did not within 4 s; a process at 127.0.0.1 was refused: {SEED}. Start" in str(first)


@pytest.mark.parametrize("secret", [b"", b"of this run"])
def test_a_host_that_dies_while_others_wait_may_come_again(secret):
    run = RollCall(3, secret=secret)
    with run.connect() as process, process.makefile("r") as answers:
        challenge = json.loads(answers.readline())["challenge"]
        process.sendall(greeting(1, FACTS, secret)(challenge))
        time.sleep(0.2)
    second, third = in_threads(lambda: run.join(1), lambda: run.join(2))
    leave(run.first.get(), second, third)


def test_a_host_comes_again_when_host_0_hangs_up_or_starts_again():
    run, results = RollCall.__new__(RollCall), queue.Queue()
    Run.__init__(run)
    with socket.create_server(("127.0.0.1", run.port)) as server:
        threading.Thread(target=lambda: results.put(run.join(1)), daemon=True).start()
        server.accept()[0].close()
    first = run.join(0)
    leave(first, results.get())


@pytest.mark.parametrize(
    ("answer", "text", "code"),
    [
        ({"names": ["a", "b"], "proof": "00"}, "has ended, or hangs, before all hosts", RESTART),
        ({"names": 7}, "has ended, or hangs, before all hosts", RESTART),
        ({"end": "x\x1b[2Jy", "code": 0}, r"x\x1b[2Jy", RESTART),
        ({"end": {}, "code": 1}, "has ended, or hangs, before all hosts", RESTART),
    ],
)
def test_a_stranger_in_the_place_of_host_0_starts_no_host(answer, text, code):
    run, results = Run(secret=b"of this run", wait=1.0), queue.Queue()
    with socket.create_server(("127.0.0.1", run.port)) as server:
        threading.Thread(target=lambda: results.put(run.join(1)), daemon=True).start()
        connection = server.accept()[0]
        with connection, connection.makefile("r") as greetings:
            connection.sendall(b'{"challenge": "x"}\n')
            assert "of this run" not in greetings.readline()
            connection.sendall(json.dumps(answer).encode() + b"\n")
    error = results.get()
    assert isinstance(error, HostError) and text in str(error) and error.code == code


# Strangers.


def test_nothing_listens_after_the_start():
    run = RollCall()
    lines = run.join(1), run.first.get()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", run.port))
    leave(*lines)


def test_strangers_are_ignored_and_named_once(log):
    def with_nested_fact(challenge):
        return greeting(1, {"x": "VALUE"})(challenge).replace(b'"VALUE"', nested(500))

    run = RollCall()
    for line in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"\xff\n", b"{}\n", b"x" * (3 << 20)):
        run.send(line)
    for line in (nested(500) + b"\n", nested(100_000) + b"\n", with_nested_fact):
        run.send(line)
    run.complete()
    assert log == [
        "WARNING ignored 127.0.0.1, which tried to join this run: it sent no valid greeting in time"
    ]


def test_a_slow_stranger_does_not_delay_the_end_of_the_wait(log):
    run, is_over = RollCall(wait=2.0), threading.Event()

    def dribble():
        with run.connect() as stranger, contextlib.suppress(OSError):
            while not is_over.wait(0.05):
                stranger.sendall(b"x")

    thread = threading.Thread(target=dribble)
    thread.start()
    assert "1 of 2 hosts arrived; host 1 (t1) did not within 2 s" in str(run.first.get())
    is_over.set()
    thread.join()
    until_logged(log)


def test_a_stranger_has_limited_time_for_its_greeting(monkeypatch):
    monkeypatch.setattr(rollcall, "_GREETING_SECONDS", 1.0)
    run = RollCall()
    with run.connect() as stranger, contextlib.suppress(ConnectionError):
        while True:  # until host 0 hangs up
            stranger.sendall(b"x")
            time.sleep(0.05)
    monkeypatch.setattr(rollcall, "_GREETING_SECONDS", 600.0)
    run.complete()


def test_idle_strangers_do_not_delay_a_host_and_the_oldest_leave(log, monkeypatch):
    monkeypatch.setattr(rollcall, "_GREETING_SECONDS", 600.0)
    run = RollCall()
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(run.connect()) for _ in range(rollcall._PENDING + 36)]
        with contextlib.suppress(ConnectionError):
            while strangers[0].recv(1000):
                pass
        run.complete()
    until_logged(log)


@pytest.mark.parametrize("index", [0, 1, 10**30])
@pytest.mark.parametrize("right", [{}, *({k: v} for k, v in FACTS.items()), FACTS | {"more": 1}])
def test_a_greeting_without_all_facts_takes_no_place(index, right, log):
    run = RollCall()
    facts = {"config.seed": "7"} | right
    answer = json.loads(run.send(greeting(index, facts)))
    assert "settings differ from host 0's" in answer["end"] and answer["code"] == 1
    assert not any(value in answer["end"] for value in FACTS.values() if len(value) > 1)
    run.complete()
    assert len(log) == 1 and "ignored 127.0.0.1" in log[0] and "there and" in log[0]


@pytest.mark.parametrize("index", [-1, 0, 2])
def test_without_a_secret_the_right_facts_with_a_wrong_number_take_no_place(index, log):
    run = RollCall()
    answer = json.loads(run.send(greeting(index, FACTS)))
    text = f"two processes, or too many, call themselves host {index} (x)"
    assert answer == {"end": f"host 0 ({ME}) refuses this process: {text}", "code": 1}
    run.complete()
    assert log == [f"WARNING ignored 127.0.0.1, which tried to join this run: {text}"]


def test_a_stranger_takes_no_place_from_a_host_that_waits(log):
    run = RollCall(3)
    with run.connect() as host, host.makefile("r") as answers:
        challenge = json.loads(answers.readline())["challenge"]
        host.sendall(greeting(1, FACTS)(challenge))
        assert "call themselves host 1 (x)" in run.send(greeting(1, FACTS))
        assert isinstance(run.join(2), Heartbeat) and isinstance(run.first.get(), Heartbeat)
        assert "names" in answers.readline()


@pytest.mark.parametrize("index", [0, 2])
def test_a_process_with_the_secret_and_a_wrong_number_ends_the_run(index):
    run = RollCall(secret=b"of this run")
    answer = json.loads(run.send(greeting(index, FACTS, b"of this run")))
    error = run.first.get()
    assert isinstance(error, HostError) and error.code == 1
    assert str(error) == f"two processes, or too many, call themselves host {index} (x)"
    assert answer == {"end": str(error), "code": 1}


def test_strangers_do_not_fill_the_log_nor_write_to_the_terminal(log):
    run = RollCall()
    for number in range(rollcall._WARNINGS + 5):
        run.send(greeting(1, {"config.seed": f"{number}\n\x1b[2J" + "x" * 10_000}))
    run.complete()
    assert len(log) == rollcall._WARNINGS + 1 and log[-1] == "WARNING no more refusals are logged"
    assert all(line.isprintable() and len(line) < 400 for line in log)
    assert r"config.seed is 0 \x1b[2Jxxx" in log[0]


# The secret.


def test_a_greeting_without_the_secret_takes_no_place(log):
    run = RollCall(secret=b"of this run")
    for secret in (b"", b"another"):
        answer = json.loads(run.send(greeting(1, FACTS, secret)))
        assert "RUN_SECRET differs" in answer["end"]
    run.complete()
    (line,) = log
    assert "ignored 127.0.0.1" in line and "RUN_SECRET differs" in line


@pytest.mark.parametrize("change", [{}, {"index": 2}, {"facts": {}}, {"challenge": "x"}])
def test_a_greeting_counts_once_and_unchanged(change):
    """Its proof is for one connection's challenge, one number and these facts."""
    run, secret = RollCall(3, secret=b"of this run"), b"of this run"
    answer = json.loads(
        run.send(
            greeting(1, FACTS, secret, change)
            if change
            else lambda _: greeting(1, FACTS, secret)("of another connection")
        )
    )
    assert "RUN_SECRET differs" in answer["end"]
    second, third = in_threads(*(functools.partial(run.join, index) for index in (1, 2)))
    leave(run.first.get(), second, third)


@pytest.mark.parametrize(("first", "second"), [(b"a", b"b"), (b"a", b""), (b"", b"b")])
def test_a_host_with_another_secret_learns_it_in_one_line(first, second):
    run = RollCall(secret=first)
    error = run.join(1, secret=second)
    assert isinstance(error, HostError) and error.code == 1
    text = f"host 0 ({ME}) refuses this process: its RUN_SECRET differs from host 0's: "
    assert str(error).startswith(text)
    run.complete()
