"""Brings the hosts of a run together at its start, and no other program.

Host 0 listens on the port of the run until the last host has arrived, and never again. It sends a
random challenge to every program that connects. A host answers with a greeting: its number, name,
facts, a challenge of its own, and the HMAC-SHA256 of all of these under the secret of the run.

Without a secret, a host is known by its facts: all of them must be host 0's. Host 0 refuses
everything else and goes on waiting, so that a stranger changes neither the run nor its exit code.
Only a process with the secret can end the run, by other facts or a number that is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import logging
import secrets
import time
from typing import Any

from common.errors import RESTART, HostError, one_line, parse_json, visible
from engine.cluster.hosts import ProcessGroup

MESSAGE_BYTES = 1 << 20  # the longest message
DELIVERY = 0.2  # seconds in which a last message leaves before its process ends
_GREETING_SECONDS = 10.0  # for a process to send its greeting
_PENDING = 64  # connections without a greeting; more than these, or twice the hosts, are closed
_WARNINGS = 20  # refusals that are logged
_RETRY = 10.0  # seconds in which host 0 may answer again after it has closed the connection
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


class _Refusal(Exception):
    """Host 0 refuses a process; `log` says more than the process may know."""

    def __init__(self, message: str, code: int = 1, log: str = ""):
        super().__init__(message)
        self.code, self.log = code, log or message


def proof(secret: bytes, *values: Any) -> str:
    """The HMAC-SHA256 of JSON values, in hexadecimal."""
    return hmac.digest(secret, json.dumps(values, sort_keys=True).encode(), "sha256").hex()


def difference(facts: dict[str, Any], first: dict[str, Any]) -> str:
    """The first fact in which a host differs from host 0, in words; "" if none does."""
    for key in sorted(facts.keys() | first.keys()):
        there, here = facts.get(key, "nothing"), first.get(key, "nothing")
        if there != here:
            return f"{_short(key)} is {_short(there)} there and {_short(here)} on host 0"
    return ""


def _short(value: Any) -> str:
    """A value for one line of a message."""
    text = visible(" ".join(str(value).split()))
    return text if len(text) <= 200 else f"{text[:200]}..."


def _read_greeting(greeting: dict[str, Any]) -> Host:
    """The host that sent a greeting.

    Raises:
      KeyError, TypeError: the greeting lacks a value, or a value is invalid.
    """
    index, name, facts = greeting["index"], greeting["name"], greeting["facts"]
    texts = (name, greeting["challenge"], greeting["proof"])
    if type(index) is not int or not all(isinstance(text, str) for text in texts):
        raise TypeError("a host has a number, a name, a challenge and a proof")
    if not (name.isprintable() and len(name) <= 255 and greeting["proof"].isascii()):
        raise TypeError("names and proofs are printable")
    if not isinstance(facts, dict) or any(isinstance(v, (dict, list)) for v in facts.values()):
        raise TypeError("facts are flat")
    return Host(index, name, facts=facts)


class RollCall:
    """Host 0 waits for the other hosts.

    Attributes:
      hosts: those that have arrived, by number; host 0 is one of them.
      peers: the connections to the others.
    """

    def __init__(self, group: ProcessGroup, me: Host, secret: bytes):
        self._group, self._me, self._secret = group, me, secret
        self.hosts, self.peers = {0: me}, dict[int, Peer]()
        self._challenges: dict[int, str] = {}  # of the other hosts
        self._pending: dict[asyncio.StreamWriter, None] = {}  # the oldest one first
        self._warnings: set[str] = set()  # the lines that are in the log already
        self._refused = ""  # which host of the run may have been refused, and why
        self._complete = asyncio.get_running_loop().create_future()

    async def run(self, wait: float) -> None:
        """Waits until all hosts have arrived, and lets them begin.

        Raises:
          HostError: a host did not arrive within `wait` seconds, or a host with the secret has
            other facts or a number that is taken. All that have arrived learn of it.
        """
        try:
            await self._listen(wait)
            for index, host in sorted(self.hosts.items()):
                if text := difference(host.facts, self._me.facts):
                    raise HostError(f"{self.hosts[index]} differs: {text}")
        except HostError as error:
            for peer in self.peers.values():
                peer.send(end=str(error), code=error.code)
            await asyncio.sleep(DELIVERY)
            for peer in self.peers.values():
                peer.writer.close()
            raise
        names = [self.hosts[index].name for index in range(self._group.count)]
        for index, peer in self.peers.items():
            peer.send(names=names, proof=proof(self._secret, self._challenges[index], names))

    async def _listen(self, wait: float) -> None:
        count, port = self._group.count, int(self._group.address.rpartition(":")[2])
        try:
            server = await asyncio.start_server(
                self._greet, "0.0.0.0", port, limit=MESSAGE_BYTES, backlog=max(count, 256)
            )
        except OSError as error:
            raise HostError(
                f"host 0 cannot listen on port {port} ({error}): does another run use it? Choose "
                "another port with JAX_COORDINATOR_PORT"
            ) from error
        try:
            await asyncio.wait_for(self._complete, wait)
        except TimeoutError as error:
            self._drop_lost()
            names = self._group.names or ("?",) * count
            missing = [f"host {i} ({names[i]})" for i in range(count) if i not in self.hosts]
            raise HostError(
                f"{len(self.hosts)} of {count} hosts arrived; {', '.join(missing)} did not within "
                f"{wait:.0f} s{self._refused}. Start the same command on every host "
                "(gcloud: --worker=all)",
                RESTART,
            ) from error
        finally:
            server.close()
            for writer in self._pending:
                writer.transport.abort()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Adds the host that greets on this connection, or refuses the process."""
        self._pending[writer] = None
        if len(self._pending) > max(_PENDING, 2 * self._group.count):
            next(iter(self._pending)).transport.abort()  # a host greets at once
        peer, challenge, greeting = Peer(reader, writer), secrets.token_hex(), None
        peer.send(challenge=challenge)
        with contextlib.suppress(TimeoutError):
            greeting = await asyncio.wait_for(peer.receive(), _GREETING_SECONDS)
        del self._pending[writer]
        try:
            self._admit(peer, greeting or {}, challenge)
        except _Refusal as reason:
            self._warn((writer.get_extra_info("peername") or "?")[0], reason)
            message = f"host 0 ({self._me.name}) refuses this process: {reason}"
            peer.send(end=message, code=reason.code)
            writer.close()

    def _admit(self, peer: Peer, greeting: dict[str, Any], challenge: str) -> None:
        """Adds the host of this greeting.

        Raises:
          _Refusal: the process is refused; the run goes on waiting.
        """
        try:
            host = _read_greeting(greeting)
        except (KeyError, TypeError) as error:
            raise _Refusal("it sent no valid greeting in time", RESTART) from error
        values = (challenge, greeting["challenge"], host.index, host.name, host.facts)
        if not hmac.compare_digest(greeting["proof"], proof(self._secret, *values)):
            raise _Refusal(
                "its RUN_SECRET differs from host 0's: set the same value on all hosts, or none"
            )
        if self._complete.done():
            raise _Refusal("it came too late", RESTART)
        text = difference(host.facts, self._me.facts)
        if text and not self._secret:  # the process may be a stranger, who must not learn it
            raise _Refusal("its settings differ from host 0's, whose output says where", log=text)
        self._drop_lost()
        if not 0 < host.index < self._group.count or host.index in self.hosts:
            message = f"two processes, or too many, call themselves {host}"
            if not self._secret:
                raise _Refusal(message)
            self.peers[-1] = peer  # so that this process learns of the end
            self._complete.set_exception(HostError(message))
            return
        self.hosts[host.index], self.peers[host.index] = host, peer
        self._challenges[host.index] = greeting["challenge"]
        if len(self.hosts) == self._group.count:
            self._complete.set_result(None)

    def _drop_lost(self) -> None:
        """Forgets hosts that have closed their connection: they may come again."""
        for index in [i for i, peer in self.peers.items() if peer.is_closed]:
            self.peers.pop(index).writer.close()
            del self.hosts[index]

    def _warn(self, address: str, reason: _Refusal) -> None:
        """Logs a refusal once: a stranger may connect again and again, and always differ."""
        if reason.code != RESTART:
            self._refused = f"; a process at {address} was refused: {reason.log}"
        line = f"WARNING ignored {address}, which tried to join this run: {reason.log}"
        if line not in self._warnings and len(self._warnings) <= _WARNINGS:
            self._warnings.add(line)
            is_last = len(self._warnings) > _WARNINGS
            _log.warning("%s", "WARNING no more refusals are logged" if is_last else line)


async def check_in(
    group: ProcessGroup, me: Host, secret: bytes, wait: float
) -> tuple[Peer, list[str]]:
    """On the other hosts: greets host 0; (the connection, the names of all hosts) at the start.

    Raises:
      HostError: host 0 does not answer, refuses this process or ends the run.
    """
    until, has_answered = time.monotonic() + 2 * wait, False  # host 0 may have started later
    while time.monotonic() < until:
        try:
            peer = await _connect(group, min(wait, _RETRY) if has_answered else wait)
        except HostError:
            if has_answered:
                break
            raise
        has_answered, challenge, answer = True, secrets.token_hex(), {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await _greet(peer, me, secret, challenge)
                answer = await peer.receive() or {}
        names, text = answer.get("names"), answer.get("end")
        signature = str(answer.get("proof")).encode()
        is_of_run = hmac.compare_digest(signature, proof(secret, challenge, names).encode())
        if is_of_run and isinstance(names, list) and len(names) == group.count:
            return peer, names
        peer.writer.close()
        if isinstance(text, str):
            raise HostError(text[:1000], 1 if answer.get("code") == 1 else RESTART)
        await asyncio.sleep(0.5)  # too many strangers, perhaps, or host 0 starts again
    reason = f"host 0 ({group.address}) has ended, or hangs, before all hosts arrived"
    raise HostError(reason, RESTART)


async def _greet(peer: Peer, me: Host, secret: bytes, challenge: str) -> None:
    theirs = (await peer.receive() or {}).get("challenge")
    signature = proof(secret, theirs, challenge, me.index, me.name, me.facts)
    peer.send(index=me.index, name=me.name, facts=me.facts, challenge=challenge, proof=signature)


async def _connect(group: ProcessGroup, wait: float) -> Peer:
    host, _, port = group.address.rpartition(":")
    until = time.monotonic() + wait
    while True:
        try:
            async with asyncio.timeout(5.0):
                return Peer(*await asyncio.open_connection(host, port, limit=MESSAGE_BYTES))
        except OSError as error:
            if time.monotonic() > until:
                raise HostError(
                    f"host 0 does not answer at {group.address} within {wait:.0f} s "
                    f"({one_line(error)}): does the same command run there, and does the "
                    f"firewall open TCP port {port} between the hosts?",
                    RESTART,
                ) from error
            await asyncio.sleep(0.5)
