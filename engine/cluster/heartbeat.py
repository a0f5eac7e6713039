"""Connects all hosts of a run through host 0, so that a lost host ends the others with one line.

At the start host 0 listens on the port of the run until the last host has arrived; afterwards jax's
coordinator has that port. Each host greets with its number, its name and its facts, and the facts
must be host 0's. Host 0 refuses any other connection and goes on waiting.

During the run a closed connection shows that a host's process has died, and silence shows that a
host hangs. A host that fails sends the reason. jax's own service would abort the other processes
with a C++ stack, after some seconds or minutes.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Self

from common.errors import FAILED, RESTART, HostError, one_line, parse_json, visible
from engine.cluster import watchdog
from engine.cluster.hosts import ProcessGroup

_TICK = 1.0  # seconds between signs of life
_DELIVERY = 0.2  # seconds in which a last message leaves before its process ends
_GREETING_SECONDS = 10.0  # for a process to send its greeting
_RETRY = 10.0  # seconds in which host 0 may start again after it has closed the connection
_LAST = 1 << 30  # the number of the barrier at the end of a run
_MESSAGE_BYTES = 1 << 20  # the longest message
_log = logging.getLogger("tpu_suite")


def _line(text: str) -> str:
    """What another process has sent, as a part of one line, of at most 1,000 characters."""
    return " ".join(visible(text).split())[:1000]


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

    def difference(self, first: Self) -> str:
        """The first fact in which this host differs from host 0, in words; "" if none does."""
        for key in sorted(self.facts.keys() | first.facts.keys()):
            there, here = self.facts.get(key, "nothing"), first.facts.get(key, "nothing")
            if there != here:
                return _line(f"{self} differs: {key} is {there} there and {here} on host 0")
        return ""


class Peer:
    """The connection to another process: JSON messages, one per line."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    def send(self, **message: Any) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any] | None:
        """The next message; None if the connection is closed, or another program sends there."""
        with contextlib.suppress(OSError, ValueError):
            message = parse_json(await self.reader.readline())
            return message if isinstance(message, dict) else None
        return None


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
    ):
        """Waits until all hosts have arrived with the same facts.

        HostError says which host did not arrive, or that host 0 refuses this one, whose facts
        differ or whose number another process has.

        Args:
          group: the processes of the run.
          facts: flat, of JSON values; must be the same on all hosts.
          wait: seconds to wait for the last host.
          silence: seconds without a sign of life after which a host counts as dead.
          end: called once, in a thread, with (message, exit code) when another host cannot go on;
            should end this process.
        """
        self._group, self.silence, self._end = group, silence, end
        self._me = Host(group.index, _line(socket.gethostname()), facts=facts)
        self.hosts = {group.index: self._me}
        self._peers: dict[int, Peer] = {}  # by host; on host 0 all others, elsewhere host 0
        self._refused: dict[str, str] = {}  # on host 0: why it refused a process, by its address
        self._is_complete = asyncio.Event()  # on host 0: all hosts have arrived
        self._has_ended = False
        self._passed = 0  # the number of barriers that all hosts have reached
        self._is_passed = asyncio.Event()  # the barrier that this host has reached last
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="heartbeat").start()
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

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine in the thread of the connections, and waits for it."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # The start of a run.

    async def _start(self, wait: float) -> None:
        if self._group.index == 0:
            await self._gather(wait)
            names = [self.hosts[index].name for index in range(self._group.count)]
            self._send_all(names=names)
        else:
            names = await self._check_in(wait)
            self.hosts = {index: Host(index, name) for index, name in enumerate(names)}
            self._me = self.hosts[self._group.index]
        works = [self._beat(), *(self._listen(index) for index in self._peers)]
        self._tasks = [asyncio.create_task(work) for work in works]

    async def _gather(self, wait: float) -> None:
        """On host 0: waits until all other hosts have arrived."""
        count, port = self._group.count, int(self._group.address.rpartition(":")[2])
        has_ipv6 = socket.has_dualstack_ipv6()
        try:
            listener = socket.create_server(
                ("", port),
                family=socket.AF_INET6 if has_ipv6 else socket.AF_INET,
                backlog=max(count, 256),
                dualstack_ipv6=has_ipv6,
            )
            server = await asyncio.start_server(self._greet, sock=listener, limit=_MESSAGE_BYTES)
        except OSError as error:
            raise HostError(
                f"host 0 cannot listen on port {port} ({error}): does another run use it? Choose "
                "another port with --coordinator; on a TPU slice with JAX_COORDINATOR_PORT"
            ) from error
        try:
            await asyncio.wait_for(self._is_complete.wait(), wait)
        except TimeoutError as error:
            self._drop_lost()
            names = self._group.names or ("?",) * count
            missing = [f"host {i} ({names[i]})" for i in range(count) if i not in self.hosts]
            refused = [
                f"; a process at {at} was refused: {why}" for at, why in self._refused.items()
            ]
            message = (
                f"{len(self.hosts)} of {count} hosts arrived; {', '.join(missing)} did not within "
                f"{wait:.0f} s{''.join(refused[:3])}. Start the same command on every host "
                "(gcloud: --worker=all)"
            )
            self._send_all(end=message, code=RESTART)
            await asyncio.sleep(_DELIVERY)
            for peer in self._peers.values():
                peer.writer.close()
            raise HostError(message, RESTART) from error
        finally:
            server.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """On host 0: adds the host that greets on this connection, or refuses the process."""
        peer = Peer(reader, writer)
        try:
            greeting: Any = await asyncio.wait_for(peer.receive(), _GREETING_SECONDS)
            host = Host(int(greeting["index"]), _line(greeting["name"]), facts=greeting["facts"])
            reason = self._admit(host, peer)
        except Exception:  # whatever a stranger sends
            reason = "it sent no valid greeting in time"
        if reason:
            address = (writer.get_extra_info("peername") or "?")[0]  # None if it is gone
            address = address.removeprefix("::ffff:")  # of IPv4
            if self._refused.get(address) != reason:
                self._refused[address] = reason
                _log.warning("WARNING ignored %s, which tried to join: %s", address, reason)
            peer.send(end=f"{self._me} refuses this process: {reason}", code=FAILED)
            writer.close()

    def _admit(self, host: Host, peer: Peer) -> str:
        """On host 0: adds a host; returns "", or the reason why its process is refused."""
        self._drop_lost()
        if text := host.difference(self._me):
            return text
        if not 0 < host.index < self._group.count or host.index in self.hosts:
            return f"two processes, or too many, call themselves {host}"
        self.hosts[host.index], self._peers[host.index] = host, peer
        if len(self.hosts) == self._group.count:
            self._is_complete.set()
        return ""

    def _drop_lost(self) -> None:
        """On host 0: forgets hosts that have closed their connection: they may come again."""
        for index, peer in list(self._peers.items()):
            if peer.reader.at_eof() or peer.writer.is_closing():
                peer.writer.close()
                del self._peers[index], self.hosts[index]

    async def _check_in(self, wait: float) -> list[str]:
        """On the other hosts: greets host 0; returns the names of all hosts at the start."""
        me, (address, _, port) = self._me, self._group.address.rpartition(":")
        until, has_ended = time.monotonic() + wait, False
        while True:
            answer, reason = None, "it has closed the connection"
            try:
                async with asyncio.timeout(5.0):
                    host = address.strip("[]")  # an IPv6 address
                    peer = Peer(*await asyncio.open_connection(host, port, limit=_MESSAGE_BYTES))
                peer.send(index=me.index, name=me.name, facts=me.facts)
                # Host 0 waits as long, and may have started so much later.
                answer = await asyncio.wait_for(peer.receive(), 2 * wait)
                names = (answer or {}).get("names")
                if isinstance(names, list) and len(names) == self._group.count:
                    self._peers[0] = peer
                    return names
                peer.writer.close()
                if not has_ended:
                    has_ended, until = True, time.monotonic() + min(wait, _RETRY)
            except (OSError, UnicodeError) as error:  # of a name that no host can have
                reason = one_line(error)
            if answer and "end" in answer:
                raise HostError(_line(str(answer["end"])), answer.get("code", 1))
            if has_ended and time.monotonic() > until:
                raise HostError(
                    f"host 0 ({address}:{port}) has ended before all hosts arrived", RESTART
                )
            if time.monotonic() > until:
                raise HostError(
                    f"host 0 does not answer at {address}:{port} within {wait:.0f} s ({reason}): "
                    f"does the same command run there, and does the firewall open TCP port {port} "
                    "between the hosts?",
                    RESTART,
                )
            await asyncio.sleep(0.5)  # host 0 may start, or start again

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
                reason = f"has not been heard of for {self.silence:.0f} s"
                self._follow(f"{host} {reason}; it was {host.activity}", RESTART)

    async def _listen(self, index: int) -> None:
        host, peer = self.hosts[index], self._peers[index]
        while (message := await peer.receive()) is not None:
            host.silent = 0.0
            for other, activity in message.get("activities", ()):
                if other != self._group.index:
                    self.hosts[other].activity = _line(activity)
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
        reason = "is gone: its process has ended or its machine is lost"
        self._follow(f"{host} {reason}; it was {host.activity}", RESTART)

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
        for _, host in sorted(self.hosts.items()):
            if text := host.difference(self._me):
                self._follow(f"{text}: do all hosts see the same files?", 1)
                return
        self._send_all(passed=reached)
        self._pass(reached)

    def _pass(self, number: int) -> None:
        self._passed = number
        self._is_passed.set()

    # The end of a run.

    def _follow(self, message: str, code: int) -> None:
        """Ends this process and all others."""
        if self._end_others(message, code):
            # On host 0 the message must leave first.
            delay = 0 if self._group.index else _DELIVERY
            self._loop.call_later(delay, self._end, message, code)

    def _end_others(self, message: str, code: int) -> bool:
        """Sends the reason to end to all others; False if the run has ended already."""
        if self._has_ended or self._passed == _LAST:
            return False
        self._has_ended = True
        self._send_all(end=message, code=code)
        return True
