"""Connects the processes of a run that several hosts share."""

from __future__ import annotations

import os
from typing import Any

import jax

from engine.cluster import processes, watchdog
from engine.cluster.heartbeat import Heartbeat
from engine.cluster.hosts import ProcessGroup
from errors import HostError


def join(group: ProcessGroup, facts: dict[str, Any], wait: float, silence: float) -> None:
    """Waits for the other hosts, compares `facts`, and starts jax on all of them together.

    Call it before anything asks for devices. `Heartbeat` describes the arguments; the secret of the
    run is $RUN_SECRET.

    Raises:
      HostError: a host is missing, a host differs, or jax cannot start.
    """
    watchdog.doing("waiting for all hosts to arrive")
    secret = os.fsencode(os.environ.get("RUN_SECRET", ""))
    end = processes.follow
    heartbeat = Heartbeat(group, facts, wait=wait, silence=silence, end=end, secret=secret)
    processes.joined(heartbeat, group.index)
    tunnel = heartbeat.tunnel
    watchdog.doing("starting jax")
    # Its notifier would take SIGTERM away from engine.cluster.preemption.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            tunnel.address,
            group.count,
            group.index,
            coordinator_bind_address=tunnel.address,
            initialization_timeout=round(wait),
            # Our heartbeat notices earlier; jax's own way to end is to abort with a C++ stack.
            heartbeat_timeout_seconds=max(100, round(3 * silence)),
            shutdown_timeout_seconds=60,
        )
    except RuntimeError as error:
        raise HostError(f"jax cannot start on {group.count} hosts: {error}") from error
    finally:
        tunnel.close()
