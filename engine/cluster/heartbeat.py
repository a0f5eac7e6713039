"""Connects all hosts of a run through host 0, so that a lost host ends the others with one line.

A closed connection shows that a host's process has died, and silence shows that a host hangs. A
host that fails sends the reason. jax's own service would abort the other processes with a C++
stack, after minutes or at once.

The connections use the port on which jax's coordinator listens afterwards: firewalls open that
port, and connections made before stay open.

Other programs may reach that port, too. At the start of a run host 0 sends a random challenge to
every process that connects. The process answers with a greeting: its number, its facts, and the
HMAC-SHA256 of the challenge with the secret of the run as the key. The secret may be empty. Host 0
ignores every other connection and goes on waiting.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import logging
import math
import secrets
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
_MESSAGE_BYTES = 1 << 20  # the longest message
_GREETING_BYTES = 1 << 18  # the longest greeting
_GREETING_SECONDS = 10.0  # for one process to send its greeting
_GREETERS = 256  # processes that host 0 greets side by side
_POLL = 0.05  # seconds; host 0 looks so often whether all hosts have arrived
_log = logging.getLogger("tpu_suite")


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
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        self.socket = connection
        self._received = bytearray()
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        with self._lock, contextlib.suppress(OSError):  # the thread that reads will notice
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(
        self, until: float = math.inf, limit: int = _MESSAGE_BYTES
    ) -> dict[str, Any] | None:
        """Waits for the next message.

        Args:
          until: when to give up, as time.monotonic() counts.
          limit: bytes of a message. A longer line counts as several damaged messages.

        Returns:
          The message; {} if it is damaged; None if the connection is closed or the time is over.
        """
        try:
            line = self._line(until, limit)
        except OSError:
            return None
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return {}
        return message if isinstance(message, dict) else {}

    def _line(self, until: float, limit: int) -> bytes:
        """The next line, or about `limit` bytes of a longer one."""
        searched = 0  # bytes without an end of a line
        while (end := self._received.find(b"\n", searched)) < 0 and len(self._received) < limit:
            searched = len(self._received)
            timeout = None if until == math.inf else max(until - time.monotonic(), 0.0)
            self.socket.settimeout(timeout)
            chunk = self.socket.recv(1 << 16)
            if not chunk:
                raise ConnectionError("the other process has closed the connection")
            self._received += chunk
        self.socket.settimeout(None)
        size = end + 1 if end >= 0 else len(self._received)
        line = bytes(self._received[:size])
        del self._received[:size]
        return line

    def close(self) -> None:
        self.socket.close()


def _read_greeting(greeting: dict[str, Any]) -> tuple[Host, bytes]:
    """The host that sent a greeting, and its HMAC.

    Raises:
      KeyError, TypeError, ValueError: the greeting lacks a value, or a value is invalid.
    """
    index, name, facts = greeting["index"], greeting["name"], greeting["facts"]
    if not (type(index) is int and isinstance(name, str) and name.isprintable()):
        raise TypeError("a host has a number and a name")
    if not isinstance(facts, dict) or any(isinstance(v, (dict, list)) for v in facts.values()):
        raise TypeError("facts are flat")
    return Host(index, name, facts=facts), bytes.fromhex(greeting["proof"])


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
        secret: bytes = b"",
    ):
        """Waits until all hosts have checked in with the same facts.

        Args:
          group: the processes of the run.
          facts: flat, of JSON values; must be the same on all hosts.
          wait: seconds to wait for the last host.
          silence: seconds without a sign of life after which a host counts as dead.
          end: called once, in a thread, with (message, exit code) when another host cannot go on;
            should end this process.
          secret: the same on all hosts; host 0 ignores processes with another secret.

        Raises:
          HostError: a host did not check in in time, its facts or its secret differ, or two
            processes of the run have the same number.
        """
        self._group, self.silence, self._end, self._secret = group, silence, end, secret
        self._lock, self._has_ended = threading.Condition(), False
        self._passed = 0  # the number of barriers that all hosts have reached
        self._me = Host(group.index, socket.gethostname(), facts=facts)
        self.hosts = {group.index: self._me}
        self._connections: dict[int, _Connection] = {}
        self._is_roll_open, self._roll_error = True, ""  # on host 0, until all hosts have arrived
        self._warnings: set[str] = set()  # the lines that are in the log already
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
        try:
            server = socket.create_server(("", port), backlog=max(count, _GREETERS))
        except OSError as error:
            raise HostError(
                f"host 0 cannot listen on port {port} ({error}): does another run use it? Choose "
                "another port with JAX_COORDINATOR_PORT"
            ) from error
        with server:
            self._call_roll(server, time.monotonic() + wait)
        with self._lock:
            self._is_roll_open = False
        if self._roll_error:
            raise HostError(self._roll_error)
        if len(self.hosts) < count:
            names = self._group.names or ("?",) * count
            missing = [f"host {i} ({names[i]})" for i in range(count) if i not in self.hosts]
            raise HostError(
                f"{len(self.hosts)} of {count} hosts arrived; {', '.join(missing)} did not within "
                f"{wait:.0f} s. Start the same command on every host (gcloud: --worker=all)",
                RESTART,
            )
        if difference := self._difference():
            raise HostError(difference)
        self._send_all(names=[self.hosts[i].name for i in range(count)])

    def _call_roll(self, server: socket.socket, until: float) -> None:
        """On host 0: greets the processes that connect, each in a thread, until all arrived."""
        threads: list[threading.Thread] = []
        server.settimeout(_POLL)
        while self._is_roll_open and time.monotonic() < until:
            threads = [thread for thread in threads if thread.is_alive()]
            if len(threads) == _GREETERS:
                time.sleep(_POLL)
                continue
            try:
                accepted, (address, _) = server.accept()
                connection = _Connection(accepted)
            except TimeoutError:
                continue
            except OSError:  # the process has hung up, or too many files are open
                time.sleep(_POLL)
                continue
            arguments = (connection, address, until)
            threads.append(threading.Thread(target=self._greet, args=arguments, daemon=True))
            threads[-1].start()

    def _greet(self, connection: _Connection, address: str, until: float) -> None:
        """On host 0: adds the host that greets on this connection, or refuses the process."""
        challenge = secrets.token_hex()
        connection.send(challenge=challenge)
        until = min(until, time.monotonic() + _GREETING_SECONDS)
        greeting = connection.receive(until, _GREETING_BYTES)
        try:
            self._admit(connection, greeting or {}, challenge)
        except HostError as reason:
            self._warn(f"WARNING ignored {address}, which tried to join this run: {reason}")
            message = f"host 0 ({self._me.name}) refuses this process: {reason}"
            connection.send(end=message, code=reason.code)
            connection.close()

    def _admit(self, connection: _Connection, greeting: dict[str, Any], challenge: str) -> None:
        """On host 0: adds the host of this greeting.

        Raises:
          HostError: the process is refused; the run goes on waiting.
        """
        try:
            host, proof = _read_greeting(greeting)
        except (KeyError, TypeError, ValueError) as error:
            raise HostError("it sent no valid greeting in time", RESTART) from error
        if not hmac.compare_digest(proof, self._proof(challenge)):
            raise HostError(
                "its RUN_SECRET differs from host 0's: set the same value on all hosts, or none"
            )
        ours = self._me.facts
        is_of_run = bool(self._secret) or host.facts == ours
        with self._lock:
            if not self._is_roll_open:
                raise HostError("it came too late", RESTART)
            is_free = 0 < host.index < self._group.count and host.index not in self.hosts
            # Without a secret a host that would run something else is known by a fact in common.
            if is_free and (is_of_run or host.facts.items() & ours.items()):
                self.hosts[host.index], self._connections[host.index] = host, connection
                self._is_roll_open = len(self.hosts) < self._group.count
            elif is_of_run:
                self._connections[-1] = connection  # so that this process learns of the end
                self._roll_error = f"two processes, or too many, call themselves {host}"
                self._is_roll_open = False
            else:
                raise HostError("its settings are not those of this run")

    def _proof(self, challenge: str) -> bytes:
        return hmac.digest(self._secret, challenge.encode(), "sha256")

    def _warn(self, line: str) -> None:
        """Writes a line to the log, once: a stranger may connect again and again."""
        with self._lock:
            is_new = line not in self._warnings
            self._warnings.add(line)
        if is_new:
            _log.warning("%s", line)

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
        until = max(until, time.monotonic()) + wait  # host 0 may have started later
        challenge = str((connection.receive(until) or {}).get("challenge"))
        me, proof = self._me, self._proof(challenge)
        connection.send(index=me.index, name=me.name, facts=me.facts, proof=proof.hex())
        answer = connection.receive(until) or {}
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
        while (message := connection.receive()) is not None:
            host.silent = 0.0
            if not message:
                self._warn(f"WARNING ignored a damaged message of {host}")
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
