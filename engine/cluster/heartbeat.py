"""Connects all hosts of a run through host 0, so that a lost host ends the others with one line.

A closed connection shows that a host's process has died, and silence shows that a host hangs. A
host that fails sends the reason. jax's own service would abort the other processes with a C++
stack, after minutes or at once (docs/notes/operations.md).

The connections use the port on which jax's coordinator listens afterwards: firewalls open that
port, and connections made before stay open.

Other programs may reach that port, too. At the start of a run host 0 sends a random challenge to
every process that connects. The process answers with a greeting: its number, its facts, and the
HMAC-SHA256 of the challenge with the secret of the run as the key. The secret may be empty. Host 0
ignores every other connection and goes on waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from engine.cluster import watchdog
from engine.cluster.hosts import ProcessGroup
from errors import RESTART, HostError, one_line, parse_json

_TICK = 1.0  # seconds between signs of life
_DELIVERY = 0.2  # seconds in which a last message leaves before its process ends
_LAST = 1 << 30  # the number of the barrier at the end of a run
_MESSAGE_BYTES = 1 << 20  # the longest message
_GREETING_SECONDS = 10.0  # for a process to send its greeting
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


class _Peer:
    """The connection to another process: JSON messages, one per line."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self.writer = reader, writer

    def send(self, **message: Any) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any] | None:
        """The next message; {} if it is damaged or too long; None if the connection is closed."""
        try:
            line = await self._reader.readline()
            message = parse_json(line or "null")
        except OSError:
            return None
        except ValueError:
            return {}
        return message if isinstance(message, dict) else {} if line else None


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
    """The connections of one process; `hosts` knows the activities of all hosts.

    A thread runs the coroutines, and nothing else changes the state.
    """

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
        self._me = Host(group.index, socket.gethostname(), facts=facts)
        self.hosts = {group.index: self._me}
        self._peers: dict[int, _Peer] = {}  # by host; on host 0 all others, elsewhere host 0
        self._has_ended = False
        self._passed = 0  # the number of barriers that all hosts have reached
        self._is_passed = asyncio.Event()  # the barrier that this host has reached last
        self._warnings: set[str] = set()  # the lines that are in the log already
        self._loop = asyncio.new_event_loop()
        self._roll = self._loop.create_future()  # on host 0: done when all hosts have arrived
        threading.Thread(target=self._run, daemon=True, name="heartbeat").start()
        self._call(self._start(wait))

    def fail(self, message: str, code: int) -> None:
        """Ends all other processes with this message and exit code."""
        if not self._has_ended:
            self._loop.call_soon_threadsafe(self._end_others, f"{self._me}: {message}", code)
            time.sleep(_DELIVERY)

    def barrier(self, facts: dict[str, Any] | None = None) -> None:
        """Waits until every host has called it as often as this one.

        If the `facts` of two hosts differ, host 0 ends all of them. (jax's own barrier runs on the
        devices, and on CPUs it gives up after half a minute.)
        """
        self._call(self._reach(self._me.barriers + 1, facts or {}))

    def leave(self) -> None:
        """Waits until every host calls it; afterwards a closed connection means nothing."""
        self._call(self._reach(_LAST, {}))
        if self._group.index == 0:
            time.sleep(_DELIVERY)

    def _run(self) -> None:
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine in the thread of the connections, and waits for it."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # The start of a run.

    async def _start(self, wait: float) -> None:
        try:
            await (self._check_in(wait) if self._group.index else self._await_hosts(wait))
        except HostError as error:
            self._send_all(end=str(error), code=error.code)
            await asyncio.sleep(_DELIVERY)
            for peer in self._peers.values():
                peer.writer.close()
            raise
        works = [self._beat(), *(self._listen(index) for index in self._peers)]
        self._tasks = [asyncio.create_task(work) for work in works]

    async def _await_hosts(self, wait: float) -> None:
        """On host 0: accepts the other hosts, compares their facts and lets them begin."""
        count, port = self._group.count, int(self._group.address.rpartition(":")[2])
        try:
            server = await asyncio.start_server(
                self._greet, "0.0.0.0", port, limit=_MESSAGE_BYTES, backlog=max(count, 256)
            )
        except OSError as error:
            raise HostError(
                f"host 0 cannot listen on port {port} ({error}): does another run use it? Choose "
                "another port with JAX_COORDINATOR_PORT"
            ) from error
        try:
            await asyncio.wait_for(self._roll, wait)
        except TimeoutError as error:
            names = self._group.names or ("?",) * count
            missing = [f"host {i} ({names[i]})" for i in range(count) if i not in self.hosts]
            raise HostError(
                f"{len(self.hosts)} of {count} hosts arrived; {', '.join(missing)} did not within "
                f"{wait:.0f} s. Start the same command on every host (gcloud: --worker=all)",
                RESTART,
            ) from error
        finally:
            server.close()
        if difference := self._difference():
            raise HostError(difference)
        self._send_all(names=[self.hosts[i].name for i in range(count)])

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """On host 0: adds the host that greets on this connection, or refuses the process."""
        peer, challenge, greeting = _Peer(reader, writer), secrets.token_hex(), None
        peer.send(challenge=challenge)
        with contextlib.suppress(TimeoutError):
            greeting = await asyncio.wait_for(peer.receive(), _GREETING_SECONDS)
        try:
            self._admit(peer, greeting or {}, challenge)
        except HostError as reason:
            address = writer.get_extra_info("peername")[0]
            self._warn(f"WARNING ignored {address}, which tried to join this run: {reason}")
            message = f"host 0 ({self._me.name}) refuses this process: {reason}"
            peer.send(end=message, code=reason.code)
            writer.close()

    def _admit(self, peer: _Peer, greeting: dict[str, Any], challenge: str) -> None:
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
        if self._roll.done():
            raise HostError("it came too late", RESTART)
        ours = self._me.facts
        is_of_run = bool(self._secret) or host.facts == ours
        is_free = 0 < host.index < self._group.count and host.index not in self.hosts
        # Without a secret a host that would run something else is known by a fact in common.
        if is_free and (is_of_run or host.facts.items() & ours.items()):
            self.hosts[host.index], self._peers[host.index] = host, peer
            if len(self.hosts) == self._group.count:
                self._roll.set_result(None)
        elif is_of_run:
            self._peers[-1] = peer  # so that this process learns of the end
            message = f"two processes, or too many, call themselves {host}"
            self._roll.set_exception(HostError(message))
        else:
            raise HostError("its settings are not those of this run")

    def _proof(self, challenge: str) -> bytes:
        return hmac.digest(self._secret, challenge.encode(), "sha256")

    def _warn(self, line: str) -> None:
        """Writes a line to the log, once: a stranger may connect again and again."""
        if line not in self._warnings:
            self._warnings.add(line)
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

    async def _check_in(self, wait: float) -> None:
        """On the other hosts: greets host 0 and waits until all hosts have arrived."""
        peer = self._peers[0] = await self._connect(wait)
        me, answer = self._me, {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * wait):  # host 0 may have started later
                challenge = str((await peer.receive() or {}).get("challenge"))
                proof = self._proof(challenge).hex()
                peer.send(index=me.index, name=me.name, facts=me.facts, proof=proof)
                answer = await peer.receive() or {}
        if "names" not in answer:
            reason = f"host 0 ({self._group.address}) has ended, or hangs, before all hosts arrived"
            raise HostError(answer.get("end", reason), answer.get("code", RESTART))
        self.hosts |= {i: Host(i, name) for i, name in enumerate(answer["names"])}
        self._me = self.hosts[self._group.index]

    async def _connect(self, wait: float) -> _Peer:
        host, _, port = self._group.address.rpartition(":")
        until = time.monotonic() + wait
        while True:
            try:
                async with asyncio.timeout(5.0):
                    return _Peer(*await asyncio.open_connection(host, port, limit=_MESSAGE_BYTES))
            except OSError as error:
                if time.monotonic() > until:
                    raise HostError(
                        f"host 0 does not answer at {self._group.address} within {wait:.0f} s "
                        f"({one_line(error)}): does the same command run there, and does the "
                        f"firewall open TCP port {port} between the hosts?",
                        RESTART,
                    ) from error
                await asyncio.sleep(0.5)

    # During a run.

    def _send_all(self, **message: Any) -> None:
        for peer in self._peers.values():
            peer.send(**message)

    async def _beat(self) -> None:
        while not self._has_ended and self._passed < _LAST:
            await asyncio.sleep(_TICK)
            self._tick()

    def _tick(self) -> None:
        """Sends a sign of life, and looks for hosts that have sent none."""
        self._me.activity = str(watchdog.activity())
        known = self.hosts.values() if self._group.index == 0 else [self._me]
        self._send_all(activities=[(host.index, host.activity) for host in known])
        for index in self._peers:
            host = self.hosts[index]
            host.silent += _TICK  # no clock: a process that was itself stopped blames nobody
            if host.silent > self.silence:
                self._lose(host, f"has not been heard of for {self.silence:.0f} s")

    async def _listen(self, index: int) -> None:
        host, peer = self.hosts[index], self._peers[index]
        while (message := await peer.receive()) is not None:
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
        peer.writer.close()
        if self._group.index and self._me.barriers == _LAST:
            self._pass(_LAST)  # host 0 has ended, and so may this one
        self._lose(host, "is gone: its process has ended or its machine is lost")

    async def _reach(self, number: int, facts: dict[str, Any]) -> None:
        """Waits at the barrier of this number until host 0 knows that all hosts reached it."""
        self._is_passed.clear()
        self._me.facts, self._me.barriers = facts, number
        self._send_all(barrier=number, facts=facts)
        self._open_barrier()
        await self._is_passed.wait()

    def _open_barrier(self) -> None:
        """On host 0: lets all hosts pass the barrier that every host has reached."""
        reached = min(host.barriers for host in self.hosts.values())
        if self._group.index or reached <= self._passed:
            return
        if difference := self._difference():
            self._follow(f"{difference}: do all hosts see the same files?", 1)
        else:
            self._send_all(passed=reached)
            self._pass(reached)

    def _pass(self, number: int) -> None:
        self._passed = number
        self._is_passed.set()

    # The end of a run.

    def _lose(self, host: Host, reason: str) -> None:
        self._follow(f"{host} {reason}; it was {host.activity}", RESTART)

    def _follow(self, message: str, code: int) -> None:
        """Ends this process and all others."""
        if self._end_others(message, code):
            # Elsewhere at once: jax aborts the process a moment after host 0 is gone.
            self._loop.call_later(0 if self._group.index else _DELIVERY, self._end, message, code)

    def _end_others(self, message: str, code: int) -> bool:
        """Sends the reason to end to all others; False if the run has ended already."""
        if self._has_ended or self._passed == _LAST:
            return False
        self._has_ended = True
        self._send_all(end=message, code=code)
        return True
