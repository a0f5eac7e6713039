"""A line from every host to host 0: the roll call before a run, and news of hosts that are gone.

jax's own service would abort the surviving processes with a C++ stack, after minutes or at once.
Here a host that dies is noticed by its closed connection, one that hangs by its silence, and one
that fails says why; all others then end with one line.

The lines use the port that jax's coordinator listens on afterwards: it is the one that firewalls
open, and connections made before stay open.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeGuard

from engine.cluster import activity
from engine.cluster.hosts import RESTART, HostError, Place

_TICK = 1.0  # seconds between signs of life


@dataclasses.dataclass
class Host:
    """One host as the others know it."""

    index: int
    name: str
    what: str = "starting"
    silent: float = 0.0  # seconds
    left: bool = False  # said goodbye

    def __str__(self) -> str:
        return f"host {self.index} ({self.name})"


class _Wire:
    """JSON lines over a socket; several threads may send."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        self.socket = connection
        self._lines = connection.makefile("rb")
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        with self._lock, contextlib.suppress(OSError):  # the reader will notice
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next message; None at the end."""
        try:
            line = self._lines.readline(1 << 20)
            message = json.loads(line) if line else None
            return message if isinstance(message, dict) else None
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """May be called in any thread, and again."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the reader
        with contextlib.suppress(OSError, ValueError):
            self._lines.close()
        self.socket.close()


class Lifeline:
    """The lines of one process; `hosts` says what the others do."""

    def __init__(
        self,
        place: Place,
        facts: dict[str, Any],
        *,
        wait: float,
        silence: float,
        end: Callable[[str, int], None],
    ):
        """Waits for all hosts and compares what they are about to run.

        Args:
          place: this process among the others.
          facts: what must be the same on all hosts; flat, of JSON values.
          wait: seconds to wait for the last host.
          silence: seconds without a sign of life after which a host counts as dead.
          end: called once, in a thread, with (message, exit code) when the run cannot go on; it
            should not return.

        Raises:
          HostError: a host did not come in time, or one is to run something else.
        """
        self._place, self.silence, self._end = place, silence, end
        self._lock, self._ended, self._leaving = threading.Lock(), False, False
        self._all_left = threading.Event()
        self._arrived = threading.Condition()
        self._calls = self._passed = 0  # barriers
        self._seen = dict.fromkeys(range(place.count), 0)  # on host 0: by host
        me = Host(place.index, socket.gethostname())
        self.hosts = {me.index: me}
        self._wires: dict[int, _Wire] = {}
        if place.index == 0:
            self._call_the_roll(facts, wait)
        else:
            self._report(facts, wait)
        for index, wire in self._wires.items():
            threading.Thread(target=self._listen, args=(index, wire), daemon=True).start()
        threading.Thread(target=self._tick, daemon=True).start()

    def leave(self, code: int = 0, message: str = "") -> None:
        """Ends this process's part; with a `code` other than 0 it ends the other processes, too.

        Without one, host 0 waits until all have left, for as long as they give signs of life.
        """
        with self._lock:
            if self._ended:
                return
            self._leaving, self._ended = True, bool(code)
        if code:
            me = self.hosts[self._place.index]
            self._tell(end=f"{me}: {message}", code=code)
            time.sleep(0.2)  # for the message to leave before the process does
            return
        self._tell(bye=True)
        if self._place.index == 0:
            self._all_left.wait()

    def barrier(self) -> None:
        """Waits until every host has called it as often as this one."""
        with self._arrived:
            self._calls += 1
            mine = self._calls
            self._seen[self._place.index] = mine
        self._tell(barrier=mine)
        self._pass_on()
        with self._arrived:
            self._arrived.wait_for(lambda: self._passed >= mine)

    def names(self) -> list[str]:
        """ "host 2 (name)" of each host, in order."""
        return [str(self.hosts[index]) for index in sorted(self.hosts)]

    # The roll call.

    def _call_the_roll(self, facts: dict[str, Any], wait: float) -> None:
        count, port = self._place.count, int(self._place.address.rpartition(":")[2])
        known: dict[int, dict[str, Any]] = {0: facts}
        try:
            for index, wire, hello in self._arrivals(port, wait):
                if index in self._wires or not 0 < index < count:
                    taken = self.hosts.get(index, f"not one of 0 to {count - 1}")
                    self._refuse(f"a second process calls itself host {index}: {taken}")
                self.hosts[index] = Host(index, hello["name"])
                self._wires[index], known[index] = wire, hello["facts"]
        except TimeoutError:
            names = self._place.names or ("?",) * count
            missing = [f"host {i} ({names[i]})" for i in range(count) if i not in self.hosts]
            self._refuse(
                f"{len(self.hosts)} of {count} hosts arrived; {', '.join(missing)} did not within "
                f"{wait:.0f} s. Start the same command on every host (gcloud: --worker=all)",
                RESTART,
            )
        except OSError as error:
            raise HostError(
                f"host 0 cannot listen on port {port} ({error}): does another run use it? Choose "
                "one with JAX_COORDINATOR_PORT"
            ) from error
        for index in sorted(known):
            if difference := next(_differences(known[index], facts), None):
                self._refuse(f"{self.hosts[index]} is to run something else: {difference}")
        self._tell(go=True, names=[self.hosts[i].name for i in range(count)])

    def _arrivals(self, port: int, wait: float) -> Iterator[tuple[int, _Wire, dict[str, Any]]]:
        """(index, wire, greeting) of each process that comes, until all are there."""
        until = time.monotonic() + wait
        with socket.create_server(("", port), backlog=self._place.count) as server:
            while len(self.hosts) < self._place.count:
                server.settimeout(max(until - time.monotonic(), 0.01))
                wire = _Wire(server.accept()[0])
                wire.socket.settimeout(5)  # a stranger may connect and say nothing
                hello = wire.receive()
                wire.socket.settimeout(None)
                if _is_greeting(hello):
                    yield hello["index"], wire, hello
                else:
                    wire.close()

    def _refuse(self, message: str, code: int = 1) -> None:
        self._tell(refused=message, code=code)
        time.sleep(0.2)
        for wire in self._wires.values():
            wire.close()
        raise HostError(message, code)

    def _report(self, facts: dict[str, Any], wait: float) -> None:
        host, _, port = self._place.address.rpartition(":")
        until = time.monotonic() + wait
        wire = None
        while wire is None:
            try:
                wire = _Wire(socket.create_connection((host, int(port)), timeout=5))
            except OSError as error:
                if time.monotonic() > until:
                    raise HostError(
                        f"host 0 does not answer at {self._place.address} within {wait:.0f} s "
                        f"({error}): does the same command run there, and does the firewall open "
                        f"TCP port {port} between the hosts?",
                        RESTART,
                    ) from error
                time.sleep(0.5)
        me = self.hosts[self._place.index]
        wire.send(index=me.index, name=me.name, facts=facts)
        wire.socket.settimeout(max(until - time.monotonic(), 0) + wait)  # host 0 waits as long
        answer = wire.receive()
        wire.socket.settimeout(None)
        if answer is None or "go" not in answer:
            wire.close()
            if answer and "refused" in answer:
                raise HostError(answer["refused"], answer.get("code", 1))
            raise HostError(
                f"host 0 ({self._place.address}) has ended, or hangs, before all hosts were there",
                RESTART,
            )
        self._wires[0] = wire
        self.hosts |= {i: Host(i, name) for i, name in enumerate(answer["names"])}

    # While the run lasts.

    def _tell(self, **message: Any) -> None:
        for wire in list(self._wires.values()):
            wire.send(**message)

    def _tick(self) -> None:
        me = self.hosts[self._place.index]
        while not self._ended:
            time.sleep(_TICK)
            me.what = str(activity.current())
            if self._place.index == 0:
                self._tell(doing={i: host.what for i, host in self.hosts.items()})
            else:
                self._tell(doing={me.index: me.what})
            for index in self._wires:
                host = self.hosts[index]
                # Counted in ticks: a process that was itself stopped for an hour blames nobody.
                host.silent += _TICK
                if host.silent > self.silence and not host.left:
                    self._lost(host, f"has not been heard of for {self.silence:.0f} s")

    def _listen(self, index: int, wire: _Wire) -> None:
        host = self.hosts[index]
        while message := wire.receive():
            host.silent = 0.0
            for other, what in message.get("doing", {}).items():
                if int(other) != self._place.index:
                    self.hosts[int(other)].what = what
            if "barrier" in message:
                with self._arrived:
                    self._seen[index] = max(self._seen[index], message["barrier"])
                self._pass_on()
            if "passed" in message:
                with self._arrived:
                    self._passed = message["passed"]
                    self._arrived.notify_all()
            if message.get("bye"):
                host.left = True
                self._note_leaving()
            if "end" in message:
                self._stop(message["end"], message["code"])
        wire.socket.close()
        if not host.left:
            self._lost(host, "is gone: its process has ended or its machine is lost")

    def _pass_on(self) -> None:
        """On host 0: lets all go on whose barrier every host has reached."""
        if self._place.index:
            return
        with self._arrived:
            reached = min(self._seen.values())
            if reached <= self._passed:
                return
            self._passed = reached
            self._arrived.notify_all()
        self._tell(passed=reached)

    def _note_leaving(self) -> None:
        if all(self.hosts[index].left for index in self._wires):
            self._all_left.set()

    def _lost(self, host: Host, how: str) -> None:
        host.left = True
        self._note_leaving()
        self._stop(f"{host} {how}; it was {host.what}", RESTART)

    def _stop(self, message: str, code: int) -> None:
        with self._lock:
            if self._ended or (self._leaving and self._place.index):
                return
            self._ended = True
        self._tell(end=message, code=code)
        if self._place.index == 0:
            time.sleep(0.2)  # for the message to leave before the process does
        # Elsewhere at once: jax aborts the process a moment after host 0 is gone.
        self._end(message, code)


def _is_greeting(message: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    kinds = {"index": int, "name": str, "facts": dict}
    return message is not None and all(isinstance(message.get(k), v) for k, v in kinds.items())


def _differences(there: dict[str, Any], here: dict[str, Any]) -> Iterator[str]:
    for key in sorted(there.keys() | here.keys()):
        theirs, ours = there.get(key, "nothing"), here.get(key, "nothing")
        if theirs != ours:
            yield f"{key} is {theirs} there and {ours} on host 0"


def leave_now(code: int) -> NoReturn:
    """Ends the process without waiting for its threads, once what was said is out."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
