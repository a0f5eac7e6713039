"""Hosts meet, whatever comes to their port, and learn of lost ones; each is a thread or process."""

import asyncio
import json
import logging
import queue
import socket
import threading
import time
import types
from typing import Any

import pytest

from common.errors import RESTART, HostError
from engine.cluster import heartbeat, watchdog
from engine.cluster.heartbeat import Heartbeat
from engine.cluster.hosts import ProcessGroup
from tests.engine.cluster.meeting import (
    FACTS,
    ME,
    RollCall,
    Run,
    hang_up,
    in_threads,
)


@pytest.fixture
def log():
    """The lines that host 0 logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tpu_suite").addHandler(handler)
    yield lines
    logging.getLogger("tpu_suite").removeHandler(handler)


# The start of a run.


def test_a_missing_host_is_named_on_all():
    (error,) = {str(error) for error in Run(4, wait=3.0).meet(absent=(2,))}
    assert "3 of 4 hosts arrived; host 2 (t2) did not within 3 s" in error


def test_a_missing_first_host():
    (error,) = Run(wait=0.6).meet(absent=(0,))
    assert "host 0 does not answer at 127.0.0.1:" in str(error) and "firewall" in str(error)
    assert error.code == RESTART


def test_a_host_that_would_run_something_else_ends_and_host_0_waits_for_the_right_one(log):
    run = RollCall(wait=4.0)
    error, reason = run.join(1, seed="7"), f"host 1 ({ME}) differs: config.seed is 7 there and 0 on"
    assert isinstance(error, HostError) and error.code == 1
    assert str(error).startswith(f"host 0 ({ME}) refuses this process: {reason} host 0")
    assert log[0].startswith(f"WARNING ignored 127.0.0.1, which tried to join this run: {reason}")
    first = run.first.get()
    assert isinstance(first, HostError) and first.code == RESTART
    assert f"did not within 4 s; a process at 127.0.0.1 was refused: {reason}" in str(first)


def greeting(index, **changes):
    return json.dumps({"index": index, "name": "x", "facts": FACTS, **changes}).encode() + b"\n"


@pytest.mark.parametrize("index", [-1, 0, 2])
def test_a_number_that_is_taken_or_too_large(index, log):
    run = RollCall()
    answer, text = json.loads(run.send(greeting(index))), f"call themselves host {index} (x)"
    assert text in answer["end"] and answer["code"] == 1
    run.complete()
    assert len(log) == 1 and text in log[0]


def test_what_other_programs_send_is_ignored_and_named_once(log):
    run = RollCall()
    for line in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"\xff\n", b"{}\n", b"x" * (3 << 20)):
        run.send(line)
    run.send(greeting("1"))
    run.send(greeting(1, facts=[]))
    run.complete()
    assert log == [
        "WARNING ignored 127.0.0.1, which tried to join this run: it sent no valid greeting in time"
    ]


def test_a_host_that_dies_while_others_wait_may_come_again():
    run = RollCall(3)
    with run.connect() as process:
        process.sendall(greeting(1))
        time.sleep(0.2)
    run.complete()


def test_a_host_comes_again_when_host_0_hangs_up_or_starts_again():
    run, results = Run(), queue.Queue()
    with socket.create_server(("127.0.0.1", run.port)) as server:
        threading.Thread(target=lambda: results.put(run.join(1)), daemon=True).start()
        connection, _ = server.accept()
        connection.sendall(b"\x00\x00\x12")  # of jax's coordinator, whose run ends
        connection.close()
    lines: Any = run.join(0), results.get()
    in_threads(*(line.leave for line in lines))


def test_a_first_host_that_ends_before_all_have_arrived(monkeypatch):
    monkeypatch.setattr(heartbeat, "_RETRY", 0.6)
    run, results = Run(), queue.Queue()
    with socket.create_server(("127.0.0.1", run.port)) as server:
        threading.Thread(target=lambda: results.put(run.join(1)), daemon=True).start()
        server.accept()[0].close()
    error = results.get()
    assert "has ended before all hosts arrived" in str(error) and error.code == RESTART


def test_a_port_that_is_taken():
    run = Run()
    with socket.create_server(("", run.port)):
        error = run.join(0)
    assert f"host 0 cannot listen on port {run.port} (" in str(error)


# During a run, without connections.


def bare(index=0, count=2, messages=()):
    """A heartbeat without connections and threads, and what it sends and how it ends."""
    line, left = object.__new__(Heartbeat), iter([*messages, None])
    events: list[Any] = []

    async def receive():
        return next(left)

    line._group = ProcessGroup("127.0.0.1:1", count, index)
    line.silence, line._end = 3.0, lambda *end: events.append(("end", *end))
    line._has_ended, line._passed = False, 0
    line._loop = types.SimpleNamespace(call_later=lambda _, end, *why: end(*why))  # type: ignore
    line.hosts = {i: heartbeat.Host(i, f"t{i}") for i in range(count)}
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
    monkeypatch.setattr(watchdog, "activity", lambda: "training")
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


# During a run.


def test_all_arrive_pass_barriers_and_leave():
    """Each barrier compares its own facts, also while a host has come to the next one already."""
    run = Run(4)
    lines = run.meet()
    assert [str(lines[2].hosts[i]) for i in range(4)] == [f"host {i} ({ME})" for i in range(4)]
    with pytest.raises(ConnectionRefusedError):  # host 0 listens no more
        socket.create_connection(("127.0.0.1", run.port))

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
