"""Connections of jax's service, here of an echo, inside those of the hosts."""

import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from engine.cluster.tunnel import Tunnel
from tests.engine.cluster.meeting import Run, hang_up, in_threads


def path_of(line):
    return line.tunnel.address.removeprefix("unix:")


def connect(line):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path_of(line))
    return connection


def serve(line):
    """An echo in the place of jax's service on host 0."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(path_of(line))
    server.listen()

    def echo(connection):
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def accept():
        while True:
            try:
                connection = server.accept()[0]
            except OSError:
                return
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return server


def receive(connection, count):
    """So many bytes; fewer if the connection ends."""
    data = b""
    while len(data) < count and (more := connection.recv(1 << 16)):
        data += more
    return data


def test_hosts_reach_the_service_over_several_connections():
    lines = Run(3).meet()
    with serve(lines[0]), connect(lines[1]) as first, connect(lines[1]) as second:
        with connect(lines[2]) as third:
            for number, connection in enumerate((first, second, third)):
                data = os.urandom(1000) * 3000 + bytes([number])  # more than a message holds
                thread = threading.Thread(target=connection.sendall, args=(data,))
                thread.start()
                assert receive(connection, len(data)) == data
                thread.join()
        first.shutdown(socket.SHUT_WR)
        assert receive(first, 1) == b""  # the echo has ended, and so has this side
        second.sendall(b"still here")
        assert receive(second, 10) == b"still here"
    in_threads(*(line.leave for line in lines))


def test_a_client_may_come_before_the_service():
    lines = Run(2).meet()
    with connect(lines[1]) as early:
        early.sendall(b"x")
        assert receive(early, 1) == b""
    with serve(lines[0]), connect(lines[1]) as again:
        again.sendall(b"x")
        assert receive(again, 1) == b"x"
    in_threads(*(line.leave for line in lines))


@pytest.mark.parametrize("lost", [0, 1])
def test_jax_does_not_learn_of_a_lost_host(lost):
    """It would abort the process before the heartbeat has named the host."""
    run = Run(2)
    lines = run.meet()
    with serve(lines[0]), connect(lines[1]) as connection:
        connection.sendall(b"x")
        assert receive(connection, 1) == b"x"
        hang_up(lines[lost])
        assert "is gone" in run.news[1 - lost].get()[0]
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)


def test_only_this_user_can_open_the_socket_and_it_goes(monkeypatch, tmp_path):
    tunnel = Tunnel()
    folder = Path(tunnel.address.removeprefix("unix:")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    tunnel.close()
    assert not folder.exists()
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    tunnel = Tunnel()
    assert len(tunnel.address) < 100
    tunnel.close()
