"""Hosts as the others know them, and the connections to them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

from errors import parse_json

MESSAGE_BYTES = 1 << 20  # the longest message


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


class Peer:
    """The connection to another process: JSON messages, one per line."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self.writer = reader, writer

    @property
    def is_closed(self) -> bool:
        """Whether the other process has closed the connection, as far as this one knows."""
        return self._reader.at_eof() or self.writer.is_closing()

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
