"""Hosts meet, pass barriers and learn of lost ones; each host is a thread of this process."""

import contextlib
import json
import logging
import queue
import socket
import threading
import time
from typing import Any

import pytest

from common.errors import RESTART, HostError
from engine.cluster import heartbeat, watchdog
from engine.cluster.heartbeat import Heartbeat
from tests.engine.cluster.meeting import FACTS, ME, RollCall, Run, hang_up, in_threads


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
    assert log[0].startswith(f"WARNING ignored 127.0.0.1, which tried to join: {reason}")
    first = run.first.get()
    assert isinstance(first, HostError) and first.code == RESTART
    assert f"did not within 4 s; a process at 127.0.0.1 was refused: {reason}" in str(first)


GREETING = json.dumps({"index": 1, "name": "x", "facts": FACTS}).encode() + b"\n"


def test_two_processes_of_one_number(log):
    run = RollCall(3)
    with run.connect() as host, host.makefile("r") as answers:
        host.sendall(GREETING)
        answer = json.loads(run.send(GREETING))
        assert "two processes, or too many, call themselves host 1 (x)" in answer["end"]
        assert answer["code"] == 1 and len(log) == 1
        lines = run.join(2), run.first.get()
        assert all(isinstance(line, Heartbeat) for line in lines)
        assert "names" in answers.readline()


STRANGERS = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "no host": b"{}\n",
    "TLS": bytes(range(256)) * 4 + b"\n",
    "UTF-16": "\ufeff{}\n".encode("utf-16"),
    "deep": b"[" * 200_000 + b"\n",
    "deep name": GREETING.replace(b'"x"', b"[" * 100_000 + b"]" * 100_000),
    "long": b"x" * (3 << 20) + b"\n",
    "number": b"7" * 10_000 + b"\n",
    "index": GREETING.replace(b"1", b'"one"', 1),
    "infinite index": GREETING.replace(b"1", b"Infinity", 1),
    "name": GREETING.replace(b'"x"', b'{"x": 1}'),
    "facts": json.dumps({"index": 1, "name": "x", "facts": ["x"]}).encode() + b"\n",
    "no facts": json.dumps({"index": 1, "name": "x", "facts": None}).encode() + b"\n",
    "nothing": b"",
}


def test_another_program_that_calls_this_port_is_ignored(log, caplog, monkeypatch):
    monkeypatch.setattr(heartbeat, "_GREETING_SECONDS", 0.5)
    run = RollCall()
    for line in STRANGERS.values():
        run.send(line)
    run.complete()
    assert len(log) == 1 and "it sent no valid greeting in time" in log[0]
    assert [record.name for record in caplog.records] == ["tpu_suite"]  # nothing of asyncio


def test_what_another_process_sends_stays_in_one_line(log):
    run = RollCall()
    other = {"index": 1, "name": "a\nERROR: b\x1b[2J", "facts": FACTS | {"x": "c\r\nd" * 9999}}
    run.send(json.dumps(other).encode() + b"\n")
    other["facts"] = FACTS
    with run.connect() as host, host.makefile("r") as answers:
        host.sendall(json.dumps(other).encode() + b"\n")
        names = json.loads(answers.readline())["names"]
        first = run.first.get()
        activity = json.dumps({"activities": [[1, "reading a\nb"]]}).encode() + b"\n"
        host.sendall(activity)
        while first.hosts[1].activity == "starting":
            time.sleep(0.01)
    assert first.hosts[1].activity == "reading a b"
    assert names == [ME, "a ERROR: b\\x1b[2J"]
    assert len(log) == 1 and "\n" not in log[0] and "\r" not in log[0] and len(log[0]) < 2000
    assert log[0].startswith("WARNING ignored 127.0.0.1, which tried to join: host 1 (a ERROR: b")


def test_no_answer_of_a_stranger_in_place_of_host_0_is_a_traceback(monkeypatch):
    monkeypatch.setattr(heartbeat, "_RETRY", 0.6)
    answers = [b"HTTP/1.1 400 Bad Request\r\n\r\n", b'{"names": 5}\n', b'{"names": ["a"]}\n']
    run, results = Run(), queue.Queue()
    with socket.create_server(("127.0.0.1", run.port)) as server:
        threading.Thread(target=lambda: results.put(run.join(1)), daemon=True).start()
        for answer in answers:
            with contextlib.suppress(TimeoutError):
                server.settimeout(2.0)
                with server.accept()[0] as connection:
                    connection.sendall(answer)
    assert "has ended before all hosts arrived" in str(results.get())


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["[::1]", "localhost"])
def test_hosts_meet_by_ipv6(host):
    lines = Run(host=host).meet()
    assert all(isinstance(line, Heartbeat) for line in lines), lines
    in_threads(*(line.leave for line in lines))


def test_a_name_that_no_host_can_have():
    (error,) = Run(wait=0.6, host="a..b").meet(absent=(0,))
    assert "host 0 does not answer at a..b:" in str(error)


def test_a_host_that_dies_while_others_wait_may_come_again():
    run = RollCall(3)
    with run.connect() as process:
        process.sendall(GREETING)
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


def test_a_host_that_stands_still_ends_the_others(monkeypatch):
    """Every second counts as one second of silence; the activities show what the host was doing."""
    monkeypatch.setattr(watchdog, "_activity", watchdog.Activity("training", 7, 0.0))
    run = Run(3)
    lines = run.meet()
    while any(host.activity == "starting" for line in lines for host in line.hosts.values()):
        time.sleep(0.05)
    lines[1]._loop.call_soon_threadsafe(lines[1]._tasks[0].cancel)
    lines[0].silence = 3.0
    for index in (0, 2):
        message, code = run.news[index].get()
        assert message.startswith(f"host 1 ({ME}) has not been heard of for 3 s; it was training")
        assert code == RESTART


def test_a_host_that_fails_sends_the_reason():
    run = Run(3)
    run.meet()[2].fail("the disk is full", 1)
    for index in (0, 1):
        assert run.news[index].get() == (f"host 2 ({ME}): the disk is full", 1)
    assert run.news[2].empty()
