"""Connects all hosts of a run through host 0, so that a lost host ends the others with one line.

A closed connection shows that a host's process has died, and silence shows that a host hangs. A
host that fails sends the reason. jax's own service would abort the other processes with a C++
stack, after minutes or at once (docs/design.md).

`rollcall` makes the connections. They also carry those of jax's own service (`Tunnel`), which knows
no secret: any program that reaches its port may end the run. So it listens on a Unix socket in a
folder that only this user can open, and so do the tunnels of the other hosts. A message
{"jax": n, "data": ...} has bytes of connection n of a host, in base64; without data, the connection
is closed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import logging
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from common.errors import RESTART
from engine.cluster import rollcall, watchdog
from engine.cluster.hosts import ProcessGroup
from engine.cluster.rollcall import DELIVERY, Host, Peer

_TICK = 1.0  # seconds between signs of life
_LAST = 1 << 30  # the number of the barrier at the end of a run
_TUNNEL_BYTES = 1 << 16  # of the tunnel, in a message
_LONGEST_FOLDER = 60  # the longest path of a folder: that of a Unix socket has at most 107 bytes
_log = logging.getLogger("tpu_suite")


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
        self._peers: dict[int, Peer] = {}  # by host; on host 0 all others, elsewhere host 0
        self._has_ended = False
        self._passed = 0  # the number of barriers that all hosts have reached
        self._is_passed = asyncio.Event()  # the barrier that this host has reached last
        self._damaged: set[int] = set()  # hosts that have sent a damaged message
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, daemon=True, name="heartbeat").start()
        self._call(self._start(wait))

    def fail(self, message: str, code: int) -> None:
        """Ends all other processes with this message and exit code."""
        if not self._has_ended:
            self._loop.call_soon_threadsafe(self._end_others, f"{self._me}: {message}", code)
            time.sleep(DELIVERY)

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
            time.sleep(DELIVERY)

    def _run(self) -> None:
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine in the thread of the connections, and waits for it."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self, wait: float) -> None:
        """Waits until all hosts have arrived, and begins to listen to them."""
        group, me = self._group, self._me
        if group.index == 0:
            roll = rollcall.RollCall(group, me, self._secret)
            await roll.run(wait)
            self.hosts, self._peers = roll.hosts, roll.peers
        else:
            self._peers[0], names = await rollcall.check_in(group, me, self._secret, wait)
            self.hosts = {i: Host(i, name) for i, name in enumerate(names)}
            self._me = self.hosts[group.index]
        self.tunnel = Tunnel()
        if group.index:
            await self.tunnel.open(self._peers[0])
        works = [self._beat(), *(self._listen(index) for index in self._peers)]
        self._tasks = [asyncio.create_task(work) for work in works]

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
            if not message and index not in self._damaged:
                self._damaged.add(index)
                _log.warning("WARNING ignored a damaged message of %s", host)
            for other, activity in message.get("activities", ()):
                if other != self._group.index:
                    self.hosts[other].activity = activity
            if "barrier" in message:
                host.facts, host.barriers = message["facts"], message["barrier"]
                self._open_barrier()
            if "passed" in message:
                self._pass(message["passed"])
            if "jax" in message:
                await self.tunnel.receive(index, peer, message)
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
        for _, host in sorted(self.hosts.items()):
            if text := rollcall.difference(host.facts, self._me.facts):
                self._follow(f"{host} differs: {text}: do all hosts see the same files?", 1)
                return
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
            # On host 0 the message must leave first.
            self._loop.call_later(0 if self._group.index else DELIVERY, self._end, message, code)

    def _end_others(self, message: str, code: int) -> bool:
        """Sends the reason to end to all others; False if the run has ended already."""
        if self._has_ended or self._passed == _LAST:
            return False
        self._has_ended = True
        self._send_all(end=message, code=code)
        return True


class Tunnel:
    """One host's end of the connections; `address` is that of jax's service for this process."""

    def __init__(self) -> None:
        parent = tempfile.gettempdir()
        self._folder = tempfile.mkdtemp(
            prefix="jax-", dir="/tmp" if len(parent) > _LONGEST_FOLDER else None
        )
        self._path = f"{self._folder}/service"
        self.address = f"unix:{self._path}"
        self._writers: dict[tuple[int, int], asyncio.StreamWriter] = {}  # by host and number
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, peer: Peer) -> None:
        """On the other hosts: takes the place of jax's service, which runs on host 0."""
        numbers = itertools.count()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            number = next(numbers)
            self._writers[0, number] = writer
            await self._send(peer, number, reader)

        self._server = await asyncio.start_unix_server(accept, self._path)

    async def receive(self, host: int, peer: Peer, message: dict[str, Any]) -> None:
        """Passes a message of `host` on; on host 0 its first one opens a connection."""
        number, data = message["jax"], base64.b64decode(message["data"])
        writer = self._writers.get((host, number))
        if writer is None and data and host != 0:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except OSError:  # jax's service has not begun: the client will try again
                peer.send(jax=number, data="")
                return
            self._writers[host, number] = writer
            task = asyncio.create_task(self._send(peer, number, reader))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if writer and data:
            writer.write(data)
        elif writer:
            del self._writers[host, number]
            writer.close()

    async def _send(self, peer: Peer, number: int, reader: asyncio.StreamReader) -> None:
        """Sends what jax writes into a connection, until jax closes it."""
        # A lost host is the heartbeat's business: jax, which would abort, must not learn of it.
        with contextlib.suppress(OSError):
            while data := await reader.read(_TUNNEL_BYTES):
                peer.send(jax=number, data=base64.b64encode(data).decode())
                await peer.writer.drain()
            peer.send(jax=number, data="")

    def close(self) -> None:
        """Removes the sockets: connections that are open stay, and there will be no others."""
        shutil.rmtree(self._folder, ignore_errors=True)
