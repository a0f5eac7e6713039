"""Connects all hosts of a run through host 0, so that a lost host ends the others with one line.

A closed connection shows that a host's process has died, and silence shows that a host hangs. A
host that fails sends the reason. jax's own service would abort the other processes with a C++
stack, after minutes or at once.

The connections use the port on which jax's coordinator listens afterwards: firewalls open that
port, and connections made before stay open.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from engine.cluster import watchdog
from engine.cluster.hosts import RESTART, ProcessGroup
from errors import HostError

_TICK = 1.0  # seconds between signs of life
_DELIVERY = 0.2  # seconds in which a last message leaves before its process ends
_LAST = 1 << 30  # the number of the barrier at the end of a run


@dataclasses.dataclass
class Host:
    """One host as the others know it."""

    index: int
    name: str
    activity: str = "starting"
    silent: float = 0.0  # seconds
    barriers: int = 0  # the number of barriers it has reached, as host 0 counts them
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
        with self._lock, contextlib.suppress(OSError):  # the thread that reads will notice
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """The next message; {} if the connection is closed or `timeout` seconds have passed."""
        try:
            self.socket.settimeout(timeout)
            message = json.loads(self._lines.readline(1 << 20))
            self.socket.settimeout(None)
            return message if isinstance(message, dict) else {}
        except (OSError, ValueError):
            return {}

    def close(self) -> None:
        self._lines.close()
        self.socket.close()


class Heartbeat:
    """The connections of one process; `hosts` knows the activities of all hosts."""

    def __init__(
        self,
        group: ProcessGroup,
        facts: dict[str, Any],
        *,
        wait: float,
        silence: float,
        end: Callable[[str, int], None],
    ):
        """Waits until all hosts have checked in with the same facts.

        Args:
          group: the processes of the run.
          facts: flat, of JSON values; must be the same on all hosts.
          wait: seconds to wait for the last host.
          silence: seconds without a sign of life after which a host counts as dead.
          end: called once, in a thread, with (message, exit code) when another host cannot go on;
            should end this process.

        Raises:
          HostError: a host did not check in in time, or its facts differ.
        """
        self._group, self.silence, self._end = group, silence, end
        self._lock, self._has_ended = threading.Condition(), False
        self._passed = 0  # the number of barriers that all hosts have reached
        self._me = Host(group.index, socket.gethostname(), facts=facts)
        self.hosts = {group.index: self._me}
        self._connections: dict[int, _Connection] = {}
        try:
            (self._check_in if group.index else self._await_hosts)(wait)
        except HostError as error:
            self._send_all(end=str(error), code=error.code)
            time.sleep(_DELIVERY)
            for connection in self._connections.values():
                connection.close()
            raise
        for index in self._connections:
            threading.Thread(target=self._listen, args=(index,), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def fail(self, message: str, code: int) -> None:
        """Ends all other processes with this message and exit code."""
        if self._is_first_end(f"{self._me}: {message}", code):
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

    # The start of a run.

    def _await_hosts(self, wait: float) -> None:
        """On host 0: accepts the other hosts, compares their facts and lets them begin."""
        count, port = self._group.count, int(self._group.address.rpartition(":")[2])
        until = time.monotonic() + wait
        try:
            with socket.create_server(("", port), backlog=count) as server:
                while len(self.hosts) < count:
                    server.settimeout(max(until - time.monotonic(), 0.01))
                    self._accept(_Connection(server.accept()[0]))
        except TimeoutError:
            names = self._group.names or ("?",) * count
            missing = [f"host {i} ({names[i]})" for i in range(count) if i not in self.hosts]
            raise HostError(
                f"{len(self.hosts)} of {count} hosts arrived; {', '.join(missing)} did not within "
                f"{wait:.0f} s. Start the same command on every host (gcloud: --worker=all)",
                RESTART,
            ) from None
        except OSError as error:
            raise HostError(
                f"host 0 cannot listen on port {port} ({error}): does another run use it? Choose "
                "another port with JAX_COORDINATOR_PORT"
            ) from error
        if difference := self._difference():
            raise HostError(difference)
        self._send_all(names=[self.hosts[i].name for i in range(count)])

    def _accept(self, connection: _Connection) -> None:
        """Adds the host that greets on this connection; a port scanner sends no greeting."""
        greeting = connection.receive(5.0)
        try:
            index, facts = int(greeting["index"]), dict(greeting["facts"])
            host = Host(index, greeting["name"], facts=facts)
        except (KeyError, TypeError, ValueError):
            return connection.close()
        is_new = 0 < index < self._group.count and index not in self.hosts
        self._connections[index if is_new else -1] = connection
        if not is_new:
            raise HostError(f"two processes, or too many, call themselves {host}")
        self.hosts[index] = host

    def _difference(self) -> str:
        """The first fact in which a host differs from host 0, in words; "" if none does."""
        ours = self._me.facts
        for _, host in sorted(self.hosts.items()):
            for key in sorted(ours.keys() | host.facts.keys()):
                value, first = host.facts.get(key, "nothing"), ours.get(key, "nothing")
                if value != first:
                    return f"{host} differs: {key} is {value} there and {first} on host 0"
        return ""

    def _check_in(self, wait: float) -> None:
        """On the other hosts: greets host 0 and waits until all hosts have arrived."""
        until = time.monotonic() + wait
        connection = self._connections[0] = self._connect(until, wait)
        connection.send(index=self._me.index, name=self._me.name, facts=self._me.facts)
        # Host 0 waits as long, and may have started later.
        answer = connection.receive(max(until - time.monotonic(), 0) + wait)
        if "names" not in answer:
            reason = f"host 0 ({self._group.address}) has ended, or hangs, before all hosts arrived"
            raise HostError(answer.get("end", reason), answer.get("code", RESTART))
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

    # During a run.

    def _send_all(self, **message: Any) -> None:
        for connection in self._connections.values():
            connection.send(**message)

    def _beat(self) -> None:
        while not self._has_ended and self._passed < _LAST:
            time.sleep(_TICK)
            self._me.activity = str(watchdog.activity())
            known = self.hosts.values() if self._group.index == 0 else [self._me]
            self._send_all(activities=[(host.index, host.activity) for host in known])
            for index in self._connections:
                host = self.hosts[index]
                host.silent += _TICK  # no clock: a process that was itself stopped blames nobody
                if host.silent > self.silence:
                    self._lose(host, f"has not been heard of for {self.silence:.0f} s")

    def _listen(self, index: int) -> None:
        host, connection = self.hosts[index], self._connections[index]
        while message := connection.receive():
            host.silent = 0.0
            for other, activity in message.get("activities", ()):
                if other != self._group.index:
                    self.hosts[other].activity = activity
            if "barrier" in message:
                host.facts, host.barriers = message["facts"], message["barrier"]
                self._open_barrier()
            if "passed" in message:
                self._pass(message["passed"])
            if "end" in message:
                self._follow(message["end"], message["code"])
        connection.close()
        if self._group.index and self._me.barriers == _LAST:
            self._pass(_LAST)  # host 0 has ended, and so may this one
        self._lose(host, "is gone: its process has ended or its machine is lost")

    def _reach(self, number: int, facts: dict[str, Any]) -> None:
        """Waits at the barrier of this number until host 0 knows that all hosts reached it."""
        self._me.facts, self._me.barriers = facts, number
        self._send_all(barrier=number, facts=facts)
        self._open_barrier()
        with self._lock:
            self._lock.wait_for(lambda: self._passed >= number)

    def _open_barrier(self) -> None:
        """On host 0: lets all hosts pass the barrier that every host has reached."""
        with self._lock:  # held until all may pass, so that no host brings its next facts
            reached = min(host.barriers for host in self.hosts.values())
            if self._group.index or reached <= self._passed:
                return
            if difference := self._difference():
                self._follow(f"{difference}: do all hosts see the same files?", 1)
            else:
                self._send_all(passed=reached)
                self._pass(reached)

    def _pass(self, number: int) -> None:
        with self._lock:
            self._passed = max(self._passed, number)
            self._lock.notify_all()

    def _lose(self, host: Host, reason: str) -> None:
        self._follow(f"{host} {reason}; it was {host.activity}", RESTART)

    def _follow(self, message: str, code: int) -> None:
        """Ends this process and all others."""
        if self._is_first_end(message, code):
            if self._group.index == 0:
                time.sleep(_DELIVERY)
            # Elsewhere at once: jax aborts the process a moment after host 0 is gone.
            self._end(message, code)

    def _is_first_end(self, message: str, code: int) -> bool:
        """Sends the reason to end to all others; False if the run has ended already."""
        with self._lock:
            if self._has_ended or self._passed == _LAST:
                return False
            self._has_ended = True
        self._send_all(end=message, code=code)
        return True
