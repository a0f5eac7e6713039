"""Checking in, barriers, and the news of lost hosts; each host is a thread or a process."""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

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


def test_a_stranger_who_connects_changes_nothing():
    port, heartbeats = free_port(), {}

    def first():
        group = ProcessGroup(f"127.0.0.1:{port}", 2, 0)
        heartbeats[0] = Heartbeat(group, FACTS, wait=600.0, silence=600.0, end=lambda *_: None)

    thread = threading.Thread(target=first)
    thread.start()
    odd = b'{"index": "x", "name": "x", "facts": {}}\n'
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"", odd):
        for _ in range(100):
            with contextlib.suppress(ConnectionRefusedError):
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(greeting)
                break
    second = Heartbeat(
        ProcessGroup(f"127.0.0.1:{port}", 2, 1),
        FACTS,
        wait=600.0,
        silence=600.0,
        end=lambda *_: None,
    )
    thread.join()
    leave([second, heartbeats[0]])


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
