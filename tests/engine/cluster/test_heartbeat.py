"""Barriers, the news of lost hosts, and the tunnel; each host is a thread or a process.

Through the tunnel go connections of jax's service, here of an echo.
"""

import asyncio
import os
import queue
import signal
import socket
import stat
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

from common.errors import RESTART
from engine.cluster import heartbeat as heartbeat_module
from engine.cluster import watchdog
from engine.cluster.heartbeat import Heartbeat, Tunnel
from engine.cluster.hosts import ProcessGroup
from tests.engine.cluster.meeting import ME, Run, child, free_port, hang_up, in_threads
from tests.engine.cluster.test_rollcall import nested

# Without connections.


def bare(index=0, count=2, messages=()):
    """A heartbeat without connections and threads, and what it sends and how it ends."""
    line, left = object.__new__(Heartbeat), iter([*messages, None])
    events: list[Any] = []

    async def receive():
        return next(left)

    line._group = ProcessGroup("127.0.0.1:1", count, index)
    line.silence, line._end = 3.0, lambda *end: events.append(("end", *end))
    line._has_ended, line._passed, line._damaged = False, 0, set()
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


@pytest.mark.long
def test_a_host_that_hangs_is_noticed_by_its_silence():
    address, news = f"127.0.0.1:{free_port()}", queue.Queue()
    with child(HANGING, address) as process:
        group, end = ProcessGroup(address, 2, 0), lambda *message: news.put(message)
        Heartbeat(group, {}, wait=60.0, silence=3.0, end=end)
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        message, code = news.get()
        process.kill()  # which the reader notices
    assert "host 1 (" in message and "not been heard of for 3 s" in message and code == RESTART


# The tunnel.


def path_of(line):
    return line.tunnel.address.removeprefix("unix:")


def connect(line):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path_of(line))
    return connection


def serve(line):
    """An echo in the place of jax's service on host 0."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(path_of(line))
    server.listen()

    def echo(connection):
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def accept():
        while True:
            try:
                connection = server.accept()[0]
            except OSError:
                return
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return server


def receive(connection, count):
    """So many bytes; fewer if the connection ends."""
    data = b""
    while len(data) < count and (more := connection.recv(1 << 16)):
        data += more
    return data


def test_hosts_reach_the_service_over_several_connections():
    lines = Run(3).meet()
    with serve(lines[0]), connect(lines[1]) as first, connect(lines[1]) as second:
        with connect(lines[2]) as third:
            for number, connection in enumerate((first, second, third)):
                data = os.urandom(1000) * 3000 + bytes([number])  # more than a message holds
                thread = threading.Thread(target=connection.sendall, args=(data,))
                thread.start()
                assert receive(connection, len(data)) == data
                thread.join()
        first.shutdown(socket.SHUT_WR)
        assert receive(first, 1) == b""  # the echo has ended, and so has this side
        second.sendall(b"still here")
        assert receive(second, 10) == b"still here"
    in_threads(*(line.leave for line in lines))


def test_a_client_may_come_before_the_service():
    lines = Run(2).meet()
    with connect(lines[1]) as early:
        early.sendall(b"x")
        assert receive(early, 1) == b""
    with serve(lines[0]), connect(lines[1]) as again:
        again.sendall(b"x")
        assert receive(again, 1) == b"x"
    in_threads(*(line.leave for line in lines))


@pytest.mark.parametrize("lost", [0, 1])
def test_jax_does_not_learn_of_a_lost_host(lost):
    """It would abort the process before the heartbeat has named the host."""
    run = Run(2)
    lines = run.meet()
    with serve(lines[0]), connect(lines[1]) as connection:
        connection.sendall(b"x")
        assert receive(connection, 1) == b"x"
        hang_up(lines[lost])
        assert "is gone" in run.news[1 - lost].get()[0]
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)


def test_only_this_user_can_open_the_socket_and_it_goes(monkeypatch, tmp_path):
    tunnel = Tunnel()
    folder = Path(tunnel.address.removeprefix("unix:")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    tunnel.close()
    assert not folder.exists()
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    tunnel = Tunnel()
    assert len(tunnel.address) < 100
    tunnel.close()
