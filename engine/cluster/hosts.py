"""Finds out which hosts run together: from flags, from the environment or from a TPU slice.

On Google's cloud a VM's metadata server knows the slice, and it says when the VM will go away.
"""

import contextlib
import dataclasses
import os
import signal
import threading
import time
import urllib.request

from common import entry
from common.errors import HostError
from engine.cluster import preemption
from engine.mesh import tpu_chips

# jax 0.8.1 moved its default to a port that Google's firewall rule does not open.
_PORT = "8476"
_NOTICE_PERIOD = 5.0  # seconds between two looks for a notice of preemption


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """The processes of a run, one per host, from the view of one of them."""

    address: str  # "host:port" of process 0
    count: int
    index: int  # of this process, from 0
    names: tuple[str, ...] = ()  # the hosts' names or addresses where the environment has them


def find(
    coordinator: str = "", num_processes: int = 0, process_id: int = -1
) -> ProcessGroup | None:
    """Finds the processes of this run; None if this one runs alone.

    `coordinator` is "host:port" of process 0. A missing value ("", 0, -1) is read from
    $JAX_COORDINATOR_ADDRESS, $JAX_NUM_PROCESSES or $JAX_PROCESS_ID.
    """
    address = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS", "")
    count = str(num_processes or os.environ.get("JAX_NUM_PROCESSES", ""))
    index = str(process_id if process_id >= 0 else os.environ.get("JAX_PROCESS_ID", ""))
    values = {"--coordinator": address, "--num_processes": count, "--process_id": index}
    if not any(values.values()):
        return _on_tpu()
    if missing := [name for name, value in values.items() if not value]:
        raise HostError(
            f"{' and '.join(missing)} missing: a run of several processes needs all of "
            f"{', '.join(values)}"
        )
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise HostError(f"--coordinator={address}: must be host:port, such as 10.0.0.2:{_PORT}")
    if not (count.isdecimal() and index.isdecimal() and int(index) < int(count)):
        raise HostError(f"--process_id={index}: must be from 0 to --num_processes={count} less 1")
    return ProcessGroup(address, int(count), int(index)) if int(count) > 1 else None


def _on_tpu() -> ProcessGroup | None:
    """The processes of a TPU slice; on GKE also of several slices that work together."""
    environment = os.environ
    if environment.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return None
    # Kubernetes sets these variables. A TPU VM's metadata server has attributes instead.
    workers = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    worker = environment.get("TPU_WORKER_ID", "0")
    if not workers and tpu_chips() and not environment.get("TPU_SKIP_MDS_QUERY"):
        workers, worker = _attribute("worker-network-endpoints"), _attribute("agent-worker-number")
    # A worker is an address, or NAME:ID:ADDRESS.
    parts = [text.split(":") for text in (workers or "").split(",") if text]
    names = [part[-1 if len(part) > 2 else 0] for part in parts]
    slices = int(environment.get("MEGASCALE_NUM_SLICES") or 1)
    if len(names) * slices < 2:
        return None
    if len(names) > 1 and not worker:
        raise HostError(
            f"the VM's metadata name {len(names)} hosts and not which of them this one is: set "
            "--coordinator, --num_processes and --process_id"
        )
    first = environment.get("MEGASCALE_COORDINATOR_ADDRESS", "").partition(":")[0] or names[0]
    port = environment.setdefault("JAX_COORDINATOR_PORT", _PORT)
    if not (port.isdecimal() and 0 < int(port) < 65536):
        raise HostError(f"JAX_COORDINATOR_PORT={port}: must be from 1 to 65535, such as {_PORT}")
    index = int(environment.get("MEGASCALE_SLICE_ID") or 0) * len(names) + int(worker or 0)
    known = tuple(names) if slices == 1 else ()
    return ProcessGroup(f"{first}:{port}", len(names) * slices, index, known)


def _attribute(name: str) -> str:
    """The value of an attribute of this VM; "" if the VM has no such attribute."""
    try:
        return vm_metadata(f"instance/attributes/{name}")
    except OSError as error:
        if getattr(error, "code", 0) == 404:
            return ""
        raise HostError(
            f"the VM's metadata server does not answer for {name} ({error}): on a TPU outside "
            "Google's cloud set TPU_SKIP_MDS_QUERY=1"
        ) from error


def vm_metadata(path: str) -> str:
    """What the VM's metadata server knows of `path`; OSError if it does not answer in 10 s."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/{path}", headers={"Metadata-Flavor": "Google"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        return answer.read().decode().strip()


def watch_for_notice() -> None:
    """Looks for a notice of preemption or maintenance, in a thread; it has the effect of SIGTERM.

    Source: Compute Engine's metadata keys `preempted` and `maintenance-event`.
    """

    def watch() -> None:
        while not preemption.requested():
            for key, quiet in (("preempted", "FALSE"), ("maintenance-event", "NONE")):
                with contextlib.suppress(OSError):
                    if (notice := vm_metadata(f"instance/{key}")) not in ("", quiet):
                        entry.note(f"\nthis VM's {key} is {notice}\n")
                        os.kill(os.getpid(), signal.SIGTERM)
                        return
            time.sleep(_NOTICE_PERIOD)

    threading.Thread(target=watch, daemon=True, name="cloud notice").start()
