"""Runs whose hosts are threads of this process; tests may also play strangers."""

import contextlib
import json
import pathlib
import queue
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from common.errors import HostError
from engine.cluster.heartbeat import Heartbeat
from engine.cluster.hosts import ProcessGroup

FACTS = {"config.seed": "0", "workdir": "gs://b/run"}
ME, ROOT = socket.gethostname(), pathlib.Path(__file__).parents[3]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def child(program, *arguments) -> Any:
    """A process that runs a program's text, with pipes for its input and its output."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, text=True, **pipes
    )


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


def leave(*lines):
    """All hosts have met, and leave."""
    for line in lines:
        assert isinstance(line, Heartbeat), line
    in_threads(*(line.leave for line in lines))


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
        leave(self.join(1), self.first.get())


def hang_up(heartbeat):
    """Closes the connections of a host, as the kernel does for a process that was killed."""
    heartbeat._has_ended = True
    for peer in heartbeat._peers.values():
        heartbeat._loop.call_soon_threadsafe(peer.writer.transport.abort)
