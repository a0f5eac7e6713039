"""Checking in, barriers, and the news of lost hosts; each host is a thread or a process."""

import asyncio
import contextlib
import hmac
import json
import logging
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
from engine.cluster.hosts import ProcessGroup
from errors import RESTART, HostError

FACTS = {"config.seed": "0", "workdir": "gs://b/run"}
ME = socket.gethostname()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def in_threads(*works):
    """Runs functions side by side; returns their results."""
    results: dict[int, Any] = {}

    def run(index, work):
        results[index] = work()

    threads = [threading.Thread(target=run, args=item) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[index] for index in range(len(works))]  # an error in a thread fails here


class Run:
    """A run whose hosts are threads of this process; the test may also play strangers."""

    def __init__(self, count=2, secret=b"", wait=600.0):
        self.count, self.secret, self.wait, self.port = count, secret, wait, free_port()
        self.news: list[queue.Queue[tuple[str, int]]] = [queue.Queue() for _ in range(count)]

    def join(self, index, facts=None, secret=None):
        """The heartbeat of a host, or the error that ends it."""
        names = tuple(f"t{i}" for i in range(self.count))
        try:
            return Heartbeat(
                ProcessGroup(f"127.0.0.1:{self.port}", self.count, index, names),
                FACTS | (facts or {}),
                wait=self.wait,
                silence=600.0,
                end=lambda *end: self.news[index].put(end),
                secret=self.secret if secret is None else secret,
            )
        except HostError as error:
            return error

    def meet(self, facts=None, absent=()):
        """The heartbeats, or errors, of all hosts that come; `facts` are those of the last one."""
        come = [index for index in range(self.count) if index not in absent]
        last = come[-1]
        return in_threads(*(lambda i=i: self.join(i, facts if i == last else None) for i in come))

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


class RollCall(Run):
    """A run whose host 0 waits for the others."""

    def __init__(self, count=2, secret=b"", wait=600.0):
        super().__init__(count, secret, wait)
        self.first: queue.Queue[Heartbeat | HostError] = queue.Queue()
        threading.Thread(target=lambda: self.first.put(self.join(0)), daemon=True).start()

    def complete(self):
        """Host 1 arrives, and both leave."""
        second, first = self.join(1), self.first.get()
        assert isinstance(first, Heartbeat) and isinstance(second, Heartbeat), (first, second)
        in_threads(first.leave, second.leave)


def hang_up(heartbeat):
    """Closes the connections of a host, as the kernel does for a process that was killed."""
    heartbeat._has_ended = True
    for peer in heartbeat._peers.values():
        heartbeat._loop.call_soon_threadsafe(peer.writer.transport.abort)


@pytest.fixture
def log():
    """The lines that host 0 logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tpu_suite").addHandler(handler)
    yield lines
    logging.getLogger("tpu_suite").removeHandler(handler)


def until_logged(log):
    """Waits for host 0's one line about strangers that hang up; it must not reach another test."""
    while not log:
        time.sleep(0.01)


# Without connections.


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


def bare(index=0, count=2, messages=()):
    """A heartbeat without connections and threads, and what it sends and how it ends."""
    line, left = object.__new__(Heartbeat), iter([*messages, None])
    events: list[Any] = []

    async def receive():
        return next(left)

    line._group = ProcessGroup("127.0.0.1:1", count, index)
    line.silence, line._end = 3.0, lambda *end: events.append(("end", *end))
    line._has_ended, line._passed, line._warnings = False, 0, set()
    line._loop = types.SimpleNamespace(call_later=lambda _, end, *why: end(*why))  # type: ignore
    line.hosts = {i: heartbeat_module.Host(i, f"t{i}") for i in range(count)}
    line._me = line.hosts[index]
    peer: Any = types.SimpleNamespace(
        send=lambda **message: events.append(message),
        receive=receive,
        writer=types.SimpleNamespace(close=lambda: None),
    )
    peers: list[int] = [0] if index else list(range(1, count))
    line._peers = dict.fromkeys(peers, peer)  # type: ignore
    return line, events


def test_silence_is_counted_in_ticks():
    line, events = bare()
    for _ in range(3):
        line._tick()
    assert not line._has_ended
    line._tick()
    text = "host 1 (t1) has not been heard of for 3 s; it was starting"
    assert events[-2:] == [{"end": text, "code": RESTART}, ("end", text, RESTART)]


@pytest.mark.parametrize(("index", "known"), [(0, [0, 1, 2]), (1, [1])])
def test_host_0_sends_the_activities_of_all(index, known, monkeypatch):
    line, events = bare(index, 3)
    monkeypatch.setattr(heartbeat_module.watchdog, "activity", lambda: "training")
    line._tick()
    expected = [(i, "training" if i == index else "starting") for i in known]
    assert events == [{"activities": expected}] * (1 if index else 2)


def test_a_message_is_a_sign_of_life():
    """And nobody else knows better what this host is doing."""
    line, events = bare(1, 3, [{"activities": [(0, "a"), (1, "b"), (2, "c")]}])
    line.hosts[0].silent, line._me.activity = 2.0, "reading"
    asyncio.run(line._listen(0))
    assert [host.activity for host in line.hosts.values()] == ["a", "reading", "c"]
    assert line.hosts[0].silent == 0.0
    text = "host 0 (t0) is gone: its process has ended or its machine is lost; it was a"
    assert events == [{"end": text, "code": RESTART}, ("end", text, RESTART)]


# The start of a run.


def test_a_missing_host_is_named_on_all():
    (error,) = {str(error) for error in Run(4, wait=3.0).meet(absent=(2,))}
    assert "3 of 4 hosts arrived; host 2 (t2) did not within" in error


def test_a_missing_first_host():
    (error,) = Run(wait=0.6).meet(absent=(0,))
    assert "host 0 does not answer at 127.0.0.1:" in str(error) and "firewall" in str(error)


@pytest.mark.parametrize(
    ("secret", "facts"),
    [(b"", {"config.seed": "7"}), (b"of this run", {"config.seed": "7", "workdir": "x"})],
)
def test_a_host_that_would_run_something_else_is_named(secret, facts):
    """Without a secret it needs a fact in common with host 0."""
    (error,) = {str(error) for error in Run(3, secret).meet(facts)}
    assert f"host 2 ({ME}) differs: config.seed is 7 there and 0 on host 0" in error


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
    monkeypatch.setattr(heartbeat_module, "_GREETING_SECONDS", 1.0)
    run = RollCall()
    with run.connect() as stranger, contextlib.suppress(ConnectionError):
        while True:  # until host 0 hangs up
            stranger.sendall(b"x")
            time.sleep(0.05)
    monkeypatch.setattr(heartbeat_module, "_GREETING_SECONDS", 600.0)
    run.complete()


def test_idle_strangers_do_not_delay_a_host(log, monkeypatch):
    monkeypatch.setattr(heartbeat_module, "_GREETING_SECONDS", 600.0)
    run = RollCall()
    with contextlib.ExitStack() as strangers:
        for _ in range(100):
            strangers.enter_context(run.connect())
        run.complete()
    until_logged(log)


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
    run = RollCall(secret=secret)
    answer = json.loads(run.send(greeting(index, FACTS, secret)))
    error = run.first.get()
    assert isinstance(error, HostError) and error.code == 1
    assert str(error) == f"two processes, or too many, call themselves host {index} (x)"
    assert answer == {"end": str(error), "code": 1}


def test_a_taken_number_ends_the_run_only_for_a_process_of_the_run(log):
    run, seconds = RollCall(3), queue.Queue()
    threading.Thread(target=lambda: seconds.put(run.join(1)), daemon=True).start()
    run.send(greeting(0, {"config.seed": "7"}))
    assert len(log) == 1 and "settings are not those of this run" in log[0]
    run.send(greeting(1, FACTS))
    errors = {str(run.first.get()), str(seconds.get())}
    assert len(errors) == 1 and "call themselves host 1 (" in errors.pop()


# The secret.


def test_a_greeting_without_the_secret_takes_no_place(log):
    run = RollCall(secret=b"of this run")
    for secret in (b"", b"another"):
        answer = json.loads(run.send(greeting(1, FACTS, secret)))
        assert "RUN_SECRET differs" in answer["end"]
    run.complete()
    (line,) = log
    assert "ignored 127.0.0.1" in line and "RUN_SECRET differs" in line


def test_a_greeting_cannot_be_used_again():
    """Host 0 would accept it from the connection whose challenge it answers, and from no other."""
    run, lines = RollCall(secret=b"of this run"), []

    def record(challenge):
        lines.append(greeting(1, FACTS, b"of this run")(challenge))
        return b"\n"

    run.send(record)
    with run.connect() as stranger, stranger.makefile("r") as answers:
        answers.readline()  # another challenge
        stranger.sendall(lines[0])
        assert "RUN_SECRET differs" in json.loads(answers.readline()).get("end", "")
    run.complete()


@pytest.mark.parametrize(
    ("first", "second"), [(b"a", b"b"), (b"a", b""), (b"", b"b")], ids=["other", "none", "extra"]
)
def test_a_host_with_another_secret_learns_it_in_one_line(first, second):
    run = RollCall(secret=first)
    error = run.join(1, secret=second)
    assert isinstance(error, HostError) and error.code == 1
    assert str(error) == (
        f"host 0 ({ME}) refuses this process: its RUN_SECRET differs from host 0's: set the same "
        "value on all hosts, or none"
    )
    run.complete()


# During a run.


def test_all_arrive_pass_barriers_and_leave():
    """Each barrier compares its own facts, also while a host has come to the next one already."""
    run = Run(4)
    lines = run.meet()
    assert [str(lines[2].hosts[i]) for i in range(4)] == [f"host {i} ({ME})" for i in range(4)]

    def work(line):
        for number in range(200):
            line.barrier({"number": number})
        line.leave()

    in_threads(*(lambda line=line: work(line) for line in lines))
    for line in lines:
        hang_up(line)  # nobody misses a host that has left
    assert all(news.empty() for news in run.news)


def test_a_barrier_holds_all_until_the_last():
    lines = Run(3).meet()
    passed = queue.Queue()

    def work(index):
        for number in range(3):
            lines[index].barrier()
            passed.put(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 2)]
    for thread in threads:
        thread.start()
    while not all(lines[0].hosts[index].barriers for index in (0, 2)):
        time.sleep(0.01)
    assert passed.empty()  # both wait at the first one
    work(1)
    for thread in threads:
        thread.join()
    assert [passed.get() for _ in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    in_threads(*(line.leave for line in lines))


def test_facts_that_differ_at_a_barrier_end_all():
    run = Run(3)
    for index, line in enumerate(run.meet()):
        facts = {"training examples": 90 + (index == 2)}
        threading.Thread(target=line.barrier, args=(facts,), daemon=True).start()
    for news in run.news:
        message, code = news.get()
        assert "host 2 (" in message and code == 1
        assert "training examples is 91 there and 90 on host 0: do all hosts see" in message


@pytest.mark.parametrize("sender", [0, 1])
def test_damaged_messages_during_a_run_are_ignored(sender, log):
    run = Run()
    lines = run.meet()
    (peer,) = lines[sender]._peers.values()
    for line in (nested(100_000), b"x" * (3 << 20), b"[]", b"\xff", b""):
        lines[sender]._loop.call_soon_threadsafe(peer.writer.write, line + b"\n")
    in_threads(*(line.leave for line in lines))
    assert all(news.empty() for news in run.news)
    assert log == [f"WARNING ignored a damaged message of host {sender} ({ME})"]


@pytest.mark.parametrize(("lost", "leaving"), [(0, None), (1, None), (1, 0)])
def test_all_others_learn_of_a_host_that_dies(lost, leaving):
    """Also a host that waits for all others at the end of the run."""
    run = Run(3)
    lines = run.meet()
    if leaving is not None:
        threading.Thread(target=lines[leaving].leave, daemon=True).start()
    hang_up(lines[lost])
    for index in {0, 1, 2} - {lost}:
        message, code = run.news[index].get()
        assert f"host {lost} (" in message and "is gone" in message
        assert code == RESTART


def test_a_host_that_fails_sends_the_reason():
    run = Run(3)
    run.meet()[2].fail("the disk is full", 1)
    for index in (0, 1):
        assert run.news[index].get() == (f"host 2 ({ME}): the disk is full", 1)
    assert run.news[2].empty()


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
    address, news = f"127.0.0.1:{free_port()}", queue.Queue()
    with subprocess.Popen(
        [sys.executable, "-c", HANGING, address],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        group, end = ProcessGroup(address, 2, 0), lambda *message: news.put(message)
        Heartbeat(group, {}, wait=60.0, silence=3.0, end=end)
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        message, code = news.get()
        process.kill()  # which the reader notices
    assert "host 1 (" in message and "not been heard of for 3 s" in message and code == RESTART
