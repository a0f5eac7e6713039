"""Connects every host to host 0: all check in before a run, and a lost host is noticed within it.

jax's own service would abort the surviving processes with a C++ stack, after minutes or at once.
Here a host that dies is noticed by its closed connection and one that hangs by its silence. One
that fails says why. All others then end with one line.

The connections use the port on which jax's coordinator listens afterwards: firewalls open that
one, and connections made before stay open.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeGuard

from engine.cluster import watchdog
from engine.cluster.hosts import RESTART, ProcessGroup
from errors import HostError

_TICK = 1.0  # seconds between signs of life
_DELIVERY = 0.2  # seconds for a last message to leave before its process does
_LAST = 1 << 30  # the number of the barrier at the end of a run


@dataclasses.dataclass
class Host:
    """One host as the others know it."""

    index: int
    name: str
    activity: str = "starting"
    silent: float = 0.0  # seconds
    barriers: int = 0  # how many it has reached, as host 0 counts them
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)  # for host 0 to compare

    def __str__(self) -> str:
        return f"host {self.index} ({self.name})"


class _Connection:
    """JSON messages over a socket, one per line; several threads may send."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._lines = connection.makefile("rb")
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        with self._lock, contextlib.suppress(OSError):  # the reader will notice
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next message; None if there is no further one, or none within `timeout` seconds."""
        try:
            self.socket.settimeout(timeout)
            line = self._lines.readline(1 << 20)
            self.socket.settimeout(None)
            message = json.loads(line) if line else None
            return message if isinstance(message, dict) else None
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._lines.close()
        self.socket.close()


class Heartbeat:
    """The connections of one process; `hosts` says what all hosts are doing."""

    def __init__(
        self,
        group: ProcessGroup,
        facts: dict[str, Any],
        *,
        wait: float,
        silence: float,
        end: Callable[[str, int], None],
    ):
        """Waits until all hosts have checked in, and compares what they are about to run.

        Args:
          group: the processes of the run.
          facts: what must be the same on all hosts; flat, of JSON values.
          wait: seconds to wait for the last host.
          silence: seconds without a sign of life after which a host counts as dead.
          end: called once, in a thread, with (message, exit code) when another host cannot go on;
            should end this process.

        Raises:
          HostError: a host did not check in in time, or it is about to run something else.
        """
        self._group, self.silence, self._end = group, silence, end
        self._lock, self._has_ended = threading.Lock(), False
        self._barrier, self._passed = threading.Condition(), 0  # barriers
        self._me = Host(group.index, socket.gethostname(), facts=facts)
        self.hosts = {group.index: self._me}
        self._connections: dict[int, _Connection] = {}
        if group.index == 0:
            self._await_hosts(wait)
        else:
            self._check_in(wait)
        for index in self._connections:
            threading.Thread(target=self._listen, args=(index,), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def fail(self, message: str, code: int) -> None:
        """Ends all other processes with this message and exit code."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
        self._send_all(end=f"{self._me}: {message}", code=code)
        time.sleep(_DELIVERY)

    def barrier(self, facts: dict[str, Any] | None = None) -> None:
        """Waits until every host has called it as often as this one.

        If the `facts` of two hosts differ, host 0 ends all of them. (jax's own barrier runs on the
        devices, and on CPUs it gives up after half a minute.)
        """
        self._reach(self._me.barriers + 1, facts or {})

    def leave(self) -> None:
        """Waits until every host calls it; afterwards a closed connection means nothing."""
        self._reach(_LAST, {})
        if self._group.index == 0:
            time.sleep(_DELIVERY)

    def names(self) -> list[str]:
        """ "host 2 (name)" of each host, in order."""
        return [str(self.hosts[index]) for index in sorted(self.hosts)]

    # Checking in.

    def _await_hosts(self, wait: float) -> None:
        count, port = self._group.count, int(self._group.address.rpartition(":")[2])
        try:
            for connection, hello in self._arrivals(port, wait):
                index = hello["index"]
                if index in self.hosts or not 0 < index < count:
                    taken = self.hosts.get(index, f"not one of 0 to {count - 1}")
                    self._refuse(f"a second process calls itself host {index}: {taken}")
                self.hosts[index] = Host(index, hello["name"], facts=hello["facts"])
                self._connections[index] = connection
        except TimeoutError:
            names = self._group.names or ("?",) * count
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
        if difference := self._difference():
            self._refuse(difference)
        self._send_all(names=[self.hosts[i].name for i in range(count)])

    def _difference(self) -> str:
        """The first fact in which a host differs from host 0, in words; "" if none does."""
        ours = self._me.facts
        for _, host in sorted(self.hosts.items()):
            for key in sorted(ours.keys() | host.facts.keys()):
                here, there = ours.get(key, "nothing"), host.facts.get(key, "nothing")
                if here != there:
                    return f"{host} differs: {key} is {there} there and {here} on host 0"
        return ""

    def _arrivals(self, port: int, wait: float) -> Iterator[tuple[_Connection, dict[str, Any]]]:
        """(connection, greeting) of each process that checks in, until all have."""
        until = time.monotonic() + wait
        with socket.create_server(("", port), backlog=self._group.count) as server:
            while len(self.hosts) < self._group.count:
                server.settimeout(max(until - time.monotonic(), 0.01))
                connection = _Connection(server.accept()[0])
                hello = connection.receive(5.0)  # a stranger may connect and send nothing
                if _is_greeting(hello):
                    yield connection, hello
                else:
                    connection.close()

    def _refuse(self, message: str, code: int = 1) -> NoReturn:
        self._send_all(refused=message, code=code)
        time.sleep(_DELIVERY)
        for connection in self._connections.values():
            connection.close()
        raise HostError(message, code)

    def _check_in(self, wait: float) -> None:
        until = time.monotonic() + wait
        connection = self._connect(until, wait)
        connection.send(index=self._me.index, name=self._me.name, facts=self._me.facts)
        # Host 0 waits as long, and may have started later.
        answer = connection.receive(max(until - time.monotonic(), 0) + wait)
        if answer is None or "names" not in answer:
            connection.close()
            if answer and "refused" in answer:
                raise HostError(answer["refused"], answer.get("code", 1))
            raise HostError(
                f"host 0 ({self._group.address}) has ended, or hangs, before all hosts had "
                "checked in",
                RESTART,
            )
        self._connections[0] = connection
        self.hosts |= {i: Host(i, name) for i, name in enumerate(answer["names"])}
        self._me = self.hosts[self._group.index]

    def _connect(self, until: float, wait: float) -> _Connection:
        host, _, port = self._group.address.rpartition(":")
        while True:
            try:
                return _Connection(socket.create_connection((host, int(port)), timeout=5))
            except OSError as error:
                if time.monotonic() > until:
                    raise HostError(
                        f"host 0 does not answer at {self._group.address} within {wait:.0f} s "
                        f"({error}): does the same command run there, and does the firewall open "
                        f"TCP port {port} between the hosts?",
                        RESTART,
                    ) from error
                time.sleep(0.5)

    # While the run lasts.

    def _send_all(self, **message: Any) -> None:
        for connection in list(self._connections.values()):
            connection.send(**message)

    def _beat(self) -> None:
        while not self._has_ended and self._passed < _LAST:
            time.sleep(_TICK)
            self._me.activity = str(watchdog.activity())
            known = self.hosts.values() if self._group.index == 0 else [self._me]
            self._send_all(activities={host.index: host.activity for host in known})
            for index in self._connections:
                host = self.hosts[index]
                # Ticks are counted: a process that was itself stopped for an hour blames nobody.
                host.silent += _TICK
                if host.silent > self.silence:
                    self._lose(host, f"has not been heard of for {self.silence:.0f} s")

    def _listen(self, index: int) -> None:
        host, connection = self.hosts[index], self._connections[index]
        while message := connection.receive():
            host.silent = 0.0
            for other, activity in message.get("activities", {}).items():
                if int(other) != self._group.index:
                    self.hosts[int(other)].activity = activity
            if "barrier" in message:
                host.facts, host.barriers = message["facts"], message["barrier"]
                self._open_barrier()
            if "passed" in message:
                self._pass(message["passed"])
            if "end" in message:
                self._stop(message["end"], message["code"])
        connection.close()
        self._lose(host, "is gone: its process has ended or its machine is lost")

    def _reach(self, number: int, facts: dict[str, Any]) -> None:
        """Waits at the barrier of this number until host 0 says that all hosts are there."""
        self._me.facts, self._me.barriers = facts, number
        self._send_all(barrier=number, facts=facts)
        self._open_barrier()
        with self._barrier:
            self._barrier.wait_for(lambda: self._passed >= number)

    def _open_barrier(self) -> None:
        """On host 0: lets all hosts pass the barrier that every host has reached."""
        with self._barrier:  # held until all may pass, so that no host brings its next facts
            reached = min(host.barriers for host in self.hosts.values())
            if self._group.index or reached <= self._passed:
                return
            if difference := self._difference():
                self._stop(f"{difference}: do all hosts see the same files?", 1)
            else:
                self._send_all(passed=reached)
                self._pass(reached)

    def _pass(self, number: int) -> None:
        with self._barrier:
            self._passed = max(self._passed, number)
            self._barrier.notify_all()

    def _lose(self, host: Host, reason: str) -> None:
        if self._group.index and self._me.barriers == _LAST:
            self._pass(_LAST)  # host 0 has ended, and so may this one
        self._stop(f"{host} {reason}; it was {host.activity}", RESTART)

    def _stop(self, message: str, code: int) -> None:
        with self._lock:
            if self._has_ended or self._passed == _LAST:
                return
            self._has_ended = True
        self._send_all(end=message, code=code)
        if self._group.index == 0:
            time.sleep(_DELIVERY)
        # Elsewhere at once: jax aborts the process a moment after host 0 is gone.
        self._end(message, code)


def _is_greeting(message: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    kinds = {"index": int, "name": str, "facts": dict}
    return message is not None and all(isinstance(message.get(k), v) for k, v in kinds.items())
