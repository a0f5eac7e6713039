"""Runs whose hosts are threads of this process; tests may also play strangers."""

import contextlib
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

LINES: list[Heartbeat] = []  # of all tests: collected as garbage, they would warn
FACTS = {"config.seed": "0", "workdir": "gs://b/run"}
ME, ROOT = socket.gethostname(), pathlib.Path(__file__).parents[3]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def child(program, *arguments, errors=False) -> Any:
    """A process that runs a program's text, with pipes for its input, output and perhaps errors."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    pipes |= {"stderr": subprocess.PIPE} if errors else {}
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


class Run:
    """A run whose hosts are threads of this process; the test may also play strangers."""

    def __init__(self, count=2, wait=600.0, host="127.0.0.1"):
        self.count, self.wait, self.port, self.host = count, wait, free_port(), host
        self.news: list[queue.Queue[tuple[str, int]]] = [queue.Queue() for _ in range(count)]

    def join(self, index, **facts):
        """The heartbeat of a host, or the error that ends it."""
        names = tuple(f"t{i}" for i in range(self.count))
        try:
            line = Heartbeat(
                ProcessGroup(f"{self.host}:{self.port}", self.count, index, names),
                FACTS | {f"config.{key}": value for key, value in facts.items()},
                wait=self.wait,
                silence=600.0,
                end=lambda *end: self.news[index].put(end),
            )
        except HostError as error:
            return error
        LINES.append(line)
        return line

    def meet(self, absent=()) -> Any:
        """The heartbeats, or errors, of all hosts that come."""
        come = [index for index in range(self.count) if index not in absent]
        return in_threads(*(lambda i=i: self.join(i) for i in come))

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
            stranger.sendall(line)
            return answers.read()
        return ""


class RollCall(Run):
    """A run whose host 0 waits for the others."""

    def __init__(self, count=2, wait=600.0):
        super().__init__(count, wait)
        self.first: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=lambda: self.first.put(self.join(0)), daemon=True).start()

    def complete(self):
        """The other hosts arrive, and all leave."""
        lines: Any = in_threads(*(lambda i=i: self.join(i) for i in range(1, self.count)))
        in_threads(*(line.leave for line in (*lines, self.first.get())))


def hang_up(heartbeat):
    """Closes the connections of a host, as the kernel does for a process that was killed."""
    heartbeat._has_ended = True
    for peer in heartbeat._peers.values():
        heartbeat._loop.call_soon_threadsafe(peer.writer.transport.abort)
