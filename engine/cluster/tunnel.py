"""Carries the connections of jax's own service inside those of the hosts.

jax's service knows no secret: any program that reaches its port may end the run. So it listens on a
Unix socket in a folder that only this user can open, and so do the tunnels of the other hosts. A
message {"jax": n, "data": ...} has bytes of connection n of a host, in base64; without data, the
connection is closed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import tempfile
from typing import Any

from engine.cluster.peer import Peer

_BYTES = 1 << 16  # in a message
_PATH = 60  # the longest path of a folder: that of a Unix socket has at most 107 bytes


class Tunnel:
    """One host's end of the connections; `address` is that of jax's service for this process."""

    def __init__(self) -> None:
        parent = tempfile.gettempdir()
        self._folder = tempfile.mkdtemp(prefix="jax-", dir="/tmp" if len(parent) > _PATH else None)
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
            while data := await reader.read(_BYTES):
                peer.send(jax=number, data=base64.b64encode(data).decode())
                await peer.writer.drain()
            peer.send(jax=number, data="")

    def close(self) -> None:
        """Removes the sockets: connections that are open stay, and there will be no others."""
        shutil.rmtree(self._folder, ignore_errors=True)
