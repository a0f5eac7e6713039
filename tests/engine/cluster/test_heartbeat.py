"""Checking in, barriers, and the news of lost hosts; each host is a thread or a process."""

import contextlib
import hmac
import json
import logging
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

from engine.cluster import heartbeat as heartbeat_module
from engine.cluster.heartbeat import Heartbeat
from engine.cluster.hosts import RESTART, ProcessGroup
from errors import HostError

FACTS = {"config.seed": "0", "workdir": "gs://b/run"}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def meet(count, facts=None, wait=600.0, silence=600.0, absent=()):
    """(each host's heartbeat or error message, each host's queue of (message, exit code))."""
    port, heartbeats = free_port(), {}
    news = {i: queue.Queue() for i in range(count)}

    def join(index):
        group = ProcessGroup(
            f"127.0.0.1:{port}", count, index, tuple(f"t{i}" for i in range(count))
        )
        end = lambda message, code: news[index].put((message, code))  # noqa: E731
        mine = FACTS | (facts or {}).get(index, {})
        try:
            heartbeats[index] = Heartbeat(group, mine, wait=wait, silence=silence, end=end)
        except HostError as error:
            heartbeats[index] = str(error)

    threads = [threading.Thread(target=join, args=(i,)) for i in range(count) if i not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heartbeats, news


def hang_up(heartbeat):
    """Closes the connections of a host, as the kernel does for a process that was killed."""
    heartbeat._has_ended = True
    for connection in heartbeat._connections.values():
        with contextlib.suppress(OSError):  # the other end was faster
            connection.socket.shutdown(socket.SHUT_RDWR)


def leave(heartbeats):
    """Lets all hosts leave, in threads, and waits for them."""
    threads = [threading.Thread(target=heartbeat.leave) for heartbeat in heartbeats]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# Messages.


@pytest.fixture
def pair():
    """The two ends of a connection: the first of this program, the second a plain socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours = heartbeat_module._Connection(server.accept()[0])
    with theirs:
        yield ours, theirs
        ours.close()


def test_a_message_is_a_line(pair):
    ours, theirs = pair
    theirs.sendall(b'{"a": 1}\n\n[]\n{"b"')
    assert [ours.receive() for _ in range(3)] == [{"a": 1}, {}, {}]
    theirs.sendall(b': 2}\n{"c": 3}\n')
    assert [ours.receive() for _ in range(2)] == [{"b": 2}, {"c": 3}]
    theirs.sendall(b"\n")
    assert ours.receive() == {}
    ours.send(d=4)
    assert theirs.recv(99) == b'{"d": 4}\n'
    theirs.close()
    assert ours.receive() is None


def test_a_line_beyond_the_limit_is_cut(pair):
    ours, theirs = pair
    theirs.sendall(b"7" * 8)
    until = time.monotonic() + 60.0
    assert ours._line(until, 8) == b"7" * 8
    theirs.sendall(b"5" * 7 + b"\n9\n")
    assert ours._line(until, 8) == b"5" * 7 + b"\n"
    assert ours._line(until, 8) == b"9\n"


@pytest.mark.parametrize(
    ("until", "timeout"), [(math.inf, None), (103.0, 3.0), (100.5, 0.5), (99.0, 0.0)]
)
def test_a_message_is_waited_for_until_a_moment(until, timeout, monkeypatch):
    timeouts: list[float | None] = []
    plain: Any = types.SimpleNamespace(
        setsockopt=lambda *_: None, settimeout=timeouts.append, recv=lambda size: b"{}\n"
    )
    monkeypatch.setattr(heartbeat_module.time, "monotonic", lambda: 100.0)
    assert heartbeat_module._Connection(plain).receive(until) == {}
    assert timeouts == [timeout, None]


@pytest.mark.parametrize(
    "changes",
    [
        *({"index": "1"}, {"index": True}, {"index": 1.0}, {"name": 7}, {"name": "x\ny"}),
        *({"facts": []}, {"facts": {"a": []}}, {"facts": {"b": 1, "a": {}}}, {"proof": "xx"}),
    ],
)
def test_an_invalid_greeting_is_refused(changes):
    valid = {"index": 1, "name": "x", "facts": {"a": 1, "b": None}, "proof": "00ff"}
    host, proof = heartbeat_module._read_greeting(valid)
    assert (host.index, host.name, host.facts, proof) == (1, "x", valid["facts"], b"\x00\xff")
    with pytest.raises((TypeError, ValueError)):
        heartbeat_module._read_greeting({**valid, **changes})


def bare(index=0, count=2, silence=3.0):
    """A heartbeat without connections and threads, and what it sends and how it ends."""
    line = object.__new__(Heartbeat)
    events: list[Any] = []
    line._group = ProcessGroup("127.0.0.1:1", count, index)
    line.silence, line._end = silence, lambda *end: events.append(("end", *end))
    line._lock, line._has_ended, line._passed = threading.Condition(), False, 0
    line.hosts = {i: heartbeat_module.Host(i, f"t{i}") for i in range(count)}
    line._me, line._warnings = line.hosts[index], set()
    sent = lambda **message: events.append(message)  # noqa: E731
    peers = [0] if index else range(1, count)
    line._connections = {i: types.SimpleNamespace(send=sent) for i in peers}  # type: ignore[misc]
    return line, events


@pytest.mark.parametrize(("ticks", "is_lost"), [(3, False), (4, True)])
def test_silence_is_counted_in_ticks(ticks, is_lost, monkeypatch):
    line, events = bare()
    left = iter(range(ticks))

    def sleep(seconds):
        assert seconds in (heartbeat_module._TICK, heartbeat_module._DELIVERY)
        if seconds == heartbeat_module._TICK and next(left, None) is None:
            line._has_ended = True

    monkeypatch.setattr(heartbeat_module.time, "sleep", sleep)
    line._beat()
    text = "host 1 (t1) has not been heard of for 3 s; it was starting"
    ends = [event for event in events if isinstance(event, tuple)]
    assert ends == [("end", text, RESTART)] * is_lost


@pytest.mark.parametrize(("index", "known"), [(0, [0, 1, 2]), (1, [1])])
def test_host_0_tells_the_activities_of_all(index, known, monkeypatch):
    line, events = bare(index, 3)
    monkeypatch.setattr(heartbeat_module.watchdog, "activity", lambda: "training")
    monkeypatch.setattr(
        heartbeat_module.time, "sleep", lambda seconds: setattr(line, "_has_ended", True)
    )
    line._beat()
    expected = [(i, "training" if i == index else "starting") for i in known]
    assert events == [{"activities": expected}] * (1 if index else 2)


def test_a_message_is_a_sign_of_life(monkeypatch):
    """And nobody else knows better what this host is doing."""
    line, events = bare(1, 3)
    line.hosts[0].silent, line._me.activity = 2.0, "reading"
    messages = iter([{"activities": [(0, "a"), (1, "b"), (2, "c")]}, None])
    connection: Any = line._connections[0]
    connection.receive, connection.close = lambda: next(messages), lambda: None
    line._listen(0)
    assert [host.activity for host in line.hosts.values()] == ["a", "reading", "c"]
    assert line.hosts[0].silent == 0.0
    text = "host 0 (t0) is gone: its process has ended or its machine is lost; it was a"
    assert events == [{"end": text, "code": RESTART}, ("end", text, RESTART)]


# The start of a run.


def test_all_arrive_work_and_leave():
    heartbeats, news = meet(4)
    me = socket.gethostname()
    assert [str(heartbeats[2].hosts[i]) for i in range(4)] == [f"host {i} ({me})" for i in range(4)]
    leave(heartbeats[i] for i in (2, 1, 3, 0))
    assert all(q.empty() for q in news.values())


def test_a_barrier_holds_all_until_the_last():
    heartbeats, _ = meet(3)
    passed = queue.Queue()

    def run(index):
        for number in range(3):
            heartbeats[index].barrier()
            passed.put((number, index))

    threads = [threading.Thread(target=run, args=(i,)) for i in (0, 2)]
    for thread in threads:
        thread.start()
    while not all(heartbeats[0].hosts[index].barriers for index in (0, 2)):
        time.sleep(0.01)
    assert passed.empty()  # both wait at the first one
    run(1)
    for thread in threads:
        thread.join()
    order = [passed.get()[0] for _ in range(9)]
    assert order == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    leave(heartbeats.values())


def test_each_barrier_compares_its_own_facts():
    """No host is taken to differ because it has come to the next barrier already."""
    heartbeats, news = meet(4)

    def run(line):
        for number in range(200):
            line.barrier({"number": number})

    threads = [threading.Thread(target=run, args=(line,)) for line in heartbeats.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    leave(heartbeats.values())
    assert all(q.empty() for q in news.values())


def test_facts_that_differ_at_a_barrier_end_all():
    heartbeats, news = meet(3)
    for index in range(3):
        facts = {"training examples": 90 + (index == 2)}
        threading.Thread(target=heartbeats[index].barrier, args=(facts,), daemon=True).start()
    for index in range(3):
        message, code = news[index].get()
        assert "host 2 (" in message and code == 1
        assert "training examples is 91 there and 90 on host 0: do all hosts see" in message


def test_a_missing_host_is_named_on_all():
    heartbeats, _ = meet(4, wait=3.0, absent=(2,))
    assert "3 of 4 hosts arrived; host 2 (t2) did not within" in heartbeats[0]
    assert heartbeats[1] == heartbeats[3] == heartbeats[0]


def test_a_missing_first_host():
    heartbeats, _ = meet(2, wait=0.6, absent=(0,))
    assert "host 0 does not answer at 127.0.0.1:" in heartbeats[1] and "firewall" in heartbeats[1]


@pytest.mark.parametrize("differing", [1, 2])
def test_a_host_that_would_run_something_else_is_named(differing):
    heartbeats, _ = meet(3, facts={differing: {"config.seed": "7"}})
    assert f"host {differing} ({socket.gethostname()}) differs: " in heartbeats[0]
    assert "config.seed is 7 there and 0 on host 0" in heartbeats[0]
    assert heartbeats[1] == heartbeats[2] == heartbeats[0]


@pytest.fixture
def log():
    """The lines that host 0 logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tpu_suite").addHandler(handler)
    yield lines
    logging.getLogger("tpu_suite").removeHandler(handler)


class RollCall:
    """Host 0 of a run, in a thread; the test plays the other hosts and the strangers."""

    def __init__(self, secret=b"", wait=600.0, count=2):
        self.port, self.secret, self.wait, self.count = free_port(), secret, wait, count
        self.result: queue.Queue[Heartbeat | HostError] = queue.Queue()
        threading.Thread(target=lambda: self.result.put(self.join(0, secret)), daemon=True).start()

    def join(self, index, secret, facts=FACTS):
        """The heartbeat of a host, or the error that ends it."""
        group = ProcessGroup(f"127.0.0.1:{self.port}", self.count, index)
        options = {"wait": self.wait, "silence": 600.0, "end": lambda *_: None}
        try:
            return Heartbeat(group, facts, **options, secret=secret)
        except HostError as error:
            return error

    def connect(self):
        """A connection to host 0, as a stranger opens it."""
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", self.port))
            time.sleep(0.01)

    def send(self, line):
        """What host 0 answers to a stranger who sends a line, before it hangs up."""
        with (
            self.connect() as stranger,
            stranger.makefile("r") as answers,
            contextlib.suppress(ConnectionError),  # host 0 need not read all of the line
        ):
            challenge = json.loads(answers.readline())["challenge"]
            stranger.sendall(line if isinstance(line, bytes) else line(challenge))
            return answers.read()
        return ""

    def complete(self):
        """Host 1 arrives, and both leave."""
        second = self.join(1, self.secret)
        first = self.result.get()
        assert isinstance(first, Heartbeat) and isinstance(second, Heartbeat), (first, second)
        leave([first, second])


def greeting(index, facts, secret=b""):
    """The line with which a process greets, as a function of host 0's challenge."""

    def line(challenge):
        proof = hmac.new(secret, challenge.encode(), "sha256").hexdigest()
        message = {"index": index, "name": "x", "facts": facts, "proof": proof}
        return json.dumps(message).encode() + b"\n"

    return line


def nested(depth):
    return b"[" * depth + b"]" * depth


def test_strangers_are_ignored_and_named_once(log):
    run = RollCall()
    unknown = b'{"index": "x", "name": "x", "facts": {}, "proof": ""}\n'
    for line in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"\xff\n", unknown, b"x" * (1 << 19)):
        run.send(line)
    run.complete()
    assert log == [
        "WARNING ignored 127.0.0.1, which tried to join this run: it sent no valid greeting in time"
    ]


@pytest.mark.parametrize("depth", [500, 100_000])
def test_nested_greetings_are_ignored(depth, log):
    run = RollCall()
    run.send(nested(depth) + b"\n")
    flat = greeting(1, {"x": "VALUE"})
    run.send(lambda challenge: flat(challenge).replace(b'"VALUE"', nested(depth)))
    run.complete()
    assert len(log) == 1 and "no valid greeting" in log[0]


def test_a_slow_stranger_does_not_delay_the_end_of_the_wait():
    run, is_over = RollCall(wait=2.0), threading.Event()

    def dribble():
        with run.connect() as stranger, contextlib.suppress(OSError):
            while not is_over.wait(0.05):
                stranger.sendall(b"x")

    thread = threading.Thread(target=dribble)
    thread.start()
    assert "1 of 2 hosts arrived; host 1 (?) did not within 2 s" in str(run.result.get())
    is_over.set()
    thread.join()


def test_a_stranger_has_limited_time_for_its_greeting(monkeypatch):
    monkeypatch.setattr(heartbeat_module, "_GREETING_SECONDS", 1.0)
    run = RollCall()
    with run.connect() as stranger, contextlib.suppress(ConnectionError):
        while True:  # until host 0 hangs up
            stranger.sendall(b"x")
            time.sleep(0.05)
    monkeypatch.setattr(heartbeat_module, "_GREETING_SECONDS", 600.0)
    run.complete()


def test_idle_strangers_do_not_delay_a_host(monkeypatch):
    monkeypatch.setattr(heartbeat_module, "_GREETING_SECONDS", 600.0)
    run = RollCall()
    with contextlib.ExitStack() as strangers:
        for _ in range(60):
            strangers.enter_context(run.connect())
        run.complete()


def test_more_idle_strangers_than_host_0_serves_at_a_time(monkeypatch):
    monkeypatch.setattr(heartbeat_module, "_GREETING_SECONDS", 600.0)
    monkeypatch.setattr(heartbeat_module, "_GREETERS", 3)
    run = RollCall()
    with contextlib.ExitStack() as strangers:
        for _ in range(5):  # the kernel holds two of them back
            strangers.enter_context(run.connect())
        host = threading.Thread(target=run.complete)
        host.start()
    host.join()  # an error in the thread fails the test


@pytest.mark.parametrize("index", [-1, 0, 1, 2, 10**30])
def test_a_greeting_with_other_facts_does_not_end_the_run(index, log):
    run = RollCall()
    answer = json.loads(run.send(greeting(index, {"config.seed": "7"})))
    assert "host 0 (" in answer["end"] and "settings are not those of this run" in answer["end"]
    run.complete()
    assert len(log) == 1 and "ignored 127.0.0.1" in log[0] and "settings" in log[0]


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("secret", [b"", b"of this run"])
def test_a_process_of_the_run_with_a_wrong_number_ends_it(index, secret):
    run = RollCall(secret)
    answer = json.loads(run.send(greeting(index, FACTS, secret)))
    error = run.result.get()
    assert isinstance(error, HostError) and error.code == 1
    assert str(error) == f"two processes, or too many, call themselves host {index} (x)"
    assert answer == {"end": str(error), "code": 1}


def test_a_taken_number_ends_the_run_only_for_a_process_of_the_run(log):
    run, seconds = RollCall(count=3), queue.Queue()
    threading.Thread(target=lambda: seconds.put(run.join(1, b"")), daemon=True).start()
    run.send(greeting(0, {"config.seed": "7"}))
    assert len(log) == 1 and "settings are not those of this run" in log[0]
    run.send(greeting(1, FACTS))
    errors = {str(run.result.get()), str(seconds.get())}
    assert len(errors) == 1 and "call themselves host 1 (" in errors.pop()


# The secret.


def test_hosts_with_the_same_secret_meet():
    RollCall(b"of this run").complete()


def test_a_matching_greeting_without_the_secret_takes_no_place(log):
    run = RollCall(b"of this run")
    for secret in (b"", b"another"):
        answer = json.loads(run.send(greeting(1, FACTS, secret)))
        assert "RUN_SECRET differs" in answer["end"]
    run.complete()
    assert len(log) == 1 and "ignored 127.0.0.1" in log[0] and "RUN_SECRET differs" in log[0]


def test_a_greeting_cannot_be_used_again():
    run, lines = RollCall(b"of this run"), []

    def record(challenge):
        lines.append(greeting(1, FACTS, b"of this run")(challenge))
        return b"\n"

    run.send(record)
    assert "RUN_SECRET differs" in run.send(lines[0])
    run.complete()


@pytest.mark.parametrize(
    ("first", "second"), [(b"a", b"b"), (b"a", b""), (b"", b"b")], ids=["other", "none", "extra"]
)
def test_a_host_with_another_secret_learns_it_in_one_line(first, second):
    run = RollCall(first)
    error = run.join(1, second)
    assert isinstance(error, HostError) and error.code == 1
    assert str(error) == (
        f"host 0 ({socket.gethostname()}) refuses this process: its RUN_SECRET differs from host "
        "0's: set the same value on all hosts, or none"
    )
    run.complete()


def test_with_a_secret_every_fact_may_differ():
    run = RollCall(b"of this run")
    error = run.join(1, b"of this run", {"config.seed": "7"})
    assert "host 1 (" in str(error) and "config.seed is 7 there and 0 on host 0" in str(error)
    assert str(run.result.get()) == str(error)


@pytest.mark.parametrize("sender", [0, 1])
def test_damaged_messages_during_a_run_are_ignored(sender, log):
    heartbeats, news = meet(2)
    (connection,) = heartbeats[sender]._connections.values()
    with connection._lock:  # no sign of life in the middle of a line
        for line in (nested(100_000), b"x" * (3 << 20), b"[]", b"\xff"):
            connection.socket.sendall(line + b"\n")
    leave(heartbeats.values())
    assert all(q.empty() for q in news.values())
    assert log == [f"WARNING ignored a damaged message of host {sender} ({socket.gethostname()})"]


@pytest.mark.parametrize("lost", [0, 1])
def test_all_others_learn_of_a_host_that_dies(lost):
    heartbeats, news = meet(3)
    hang_up(heartbeats[lost])
    for index in {0, 1, 2} - {lost}:
        message, code = news[index].get()
        assert f"host {lost} (" in message and "is gone" in message
        assert code == RESTART


def test_a_host_that_fails_sends_the_reason():
    heartbeats, news = meet(3)
    heartbeats[2].fail("the disk is full", 1)
    for index in (0, 1):
        message, code = news[index].get()
        assert message == f"host 2 ({socket.gethostname()}): the disk is full" and code == 1
    assert news[2].empty()


def test_hosts_that_have_left_are_not_missed():
    heartbeats, news = meet(3)
    leave(heartbeats.values())
    for line in heartbeats.values():
        hang_up(line)
    assert all(q.empty() for q in news.values())


def test_all_others_learn_of_a_host_that_dies_while_another_leaves():
    heartbeats, news = meet(3)
    threading.Thread(target=heartbeats[0].leave, daemon=True).start()
    hang_up(heartbeats[1])
    for index in (0, 2):
        message, code = news[index].get()
        assert "host 1 (" in message and "is gone" in message and code == RESTART


HANGING = """
import sys
from engine.cluster.heartbeat import Heartbeat
from engine.cluster.hosts import ProcessGroup
group = ProcessGroup(sys.argv[1], 2, 1)
line = Heartbeat(group, {}, wait=600.0, silence=300.0, end=lambda message, code: print(message))
print("here", flush=True)
sys.stdin.read()
"""


def test_a_host_that_hangs_is_noticed_by_its_silence():
    port, news = free_port(), queue.Queue()
    with subprocess.Popen(
        [sys.executable, "-c", HANGING, f"127.0.0.1:{port}"],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        Heartbeat(
            ProcessGroup(f"127.0.0.1:{port}", 2, 0),
            {},
            wait=60.0,
            silence=3.0,
            end=lambda *message: news.put(message),
        )
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        message, code = news.get()
        process.kill()  # which the reader notices
    assert "host 1 (" in message and "not been heard of for 3 s" in message and code == RESTART
