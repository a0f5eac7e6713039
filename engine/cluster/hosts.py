"""Finds out which hosts run together: from flags, the environment, a TPU slice or a launcher.

On Google's cloud a VM's metadata server knows the slice, and it says when the VM will go away.
"""

import contextlib
import dataclasses
import http.client
import logging
import os
import re
import signal
import threading
import time
import urllib.request

from jax._src import clusters  # jax.distributed.initialize does not tell what it finds

from common import entry
from common.errors import HostError, one_line
from engine.cluster import preemption
from engine.devices import tpu_chips

_log = logging.getLogger("tpu_suite")
_PORT = "8476"  # of jax before 0.8.1; Google's firewall rule does not open the later one
_NOTICE_PERIOD = 5.0  # seconds between two looks for a notice of preemption
_LAUNCHERS = clusters.OmpiCluster, clusters.SlurmCluster
_LAUNCHED = re.compile(  # the variables of launchers that `_launched` reads
    r"MASTER_(ADDR|PORT)|WORLD_SIZE|RANK|JAX_COORDINATOR_PORT|OMPI_(COMM_WORLD_(SIZE|RANK)|\w+_uri)"
    r"|SLURM_(JOB_ID|STEP_NODELIST|NTASKS|STEP_NUM_TASKS|PROCID)"
)
_PART = re.compile(r"\[[^\[\]]*\]|[^:]+")  # of host:port or NAME:ID:ADDRESS, perhaps of IPv6


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """The processes of a run, one per host, from the view of one of them."""

    address: str  # "host:port" of process 0; an IPv6 address is in brackets
    count: int
    index: int  # of this process, from 0
    names: tuple[str, ...] = ()  # the hosts' names or addresses where the environment has them


def find(
    coordinator: str = "", num_processes: int = 0, process_id: int = -1
) -> ProcessGroup | None:
    """Finds the processes of this run; None if this one runs alone.

    `coordinator` is "host:port" of process 0. A missing value ("", 0, -1) is read from
    $JAX_COORDINATOR_ADDRESS, $JAX_NUM_PROCESSES or $JAX_PROCESS_ID. Without any, the environment of
    a TPU slice or of a launcher counts; what was guessed from the latter is logged.
    """
    address = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS", "")
    count = str(num_processes or os.environ.get("JAX_NUM_PROCESSES", ""))
    index = str(process_id if process_id >= 0 else os.environ.get("JAX_PROCESS_ID", ""))
    values = {"--coordinator": address, "--num_processes": count, "--process_id": index}
    if count == "1":
        return None
    if not any(values.values()):
        if (group := _on_tpu()) or not (launched := _launched()):
            return group
        address, count, index = launched
    elif missing := [name for name, value in values.items() if not value]:
        raise HostError(
            f"{' and '.join(missing)} missing: a run of several processes needs all of "
            f"{', '.join(values)}"
        )
    if not _is_address(address):
        raise HostError(
            f"--coordinator={address}: must be host:port, such as 10.0.0.2:{_PORT} or "
            f"[fd00::2]:{_PORT}"
        )
    if not (count.isdecimal() and index.isdecimal() and int(index) < int(count)):
        raise HostError(f"--process_id={index}: must be from 0 to --num_processes={count} less 1")
    if gpu := os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK"):  # jax's rule; it asks mpi4py for it
        os.environ.setdefault("JAX_LOCAL_DEVICE_IDS", gpu)
    return ProcessGroup(address, int(count), int(index))


def _is_address(text: str) -> bool:
    """Whether it is host:port; an IPv6 address must be in brackets."""
    host, _, port = text.rpartition(":")
    is_host = re.fullmatch(r"\[[^][/\s]+\]|[^][:/\s]+", host)
    return bool(is_host) and port.isdecimal() and 0 < int(port) < 65536


def _launched() -> tuple[str, str, str] | None:
    """(address of process 0, count, index) where a launcher has started several processes."""
    env, port = os.environ, os.environ.get("JAX_COORDINATOR_PORT")
    names = "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"
    sizes = [f"{x}={env[x]}" for x in names if env.get(x, "").lstrip(" 0") not in ("", "1")]
    if not sizes:
        return None
    address, count, index, why = "", "1", "0", ""
    try:
        if all(map(env.get, ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"))):
            # torchrun's MASTER_PORT is taken; like jax for SLURM, use one of the last 4,096.
            port = port or int(env["MASTER_PORT"]) % 2**12 + 2**16 - 2**12
            address, count, index = f"{env['MASTER_ADDR']}:{port}", env["WORLD_SIZE"], env["RANK"]
            env.setdefault("JAX_LOCAL_DEVICE_IDS", env.get("LOCAL_RANK", ""))  # of GPUs
        elif launcher := next((one for one in _LAUNCHERS if one.is_env_present()), None):
            address = launcher.get_coordinator_address(None, port)
            count, index = str(launcher.get_process_count()), str(launcher.get_process_id())
            if launcher is clusters.SlurmCluster:  # a shell in the job is a step of one task
                count = env.get("SLURM_STEP_NUM_TASKS", count)
        count, index = str(int(count)), str(int(index))
        host, _, port = address.rpartition(":")
        address = f"[{host.strip('[]')}]:{port}" if ":" in host else address  # of IPv6
        if count != "1" and not (_is_address(address) and 0 <= int(index) < int(count)):
            raise ValueError(f"no process {index} of {count} can meet the others at {address}")
    except Exception as error:  # of jax, of mpi4py, or a value is no number
        given = [f"{name}={value}" for name, value in env.items() if _LAUNCHED.fullmatch(name)]
        count, why = "1", f" ({', '.join(given)}: {one_line(error)})"
    if count == "1":
        _log.info(
            f"NOTE {sizes[0]}, but this process trains alone{why}. If several are to train "
            "together, start them with srun or torchrun, or give each --coordinator, "
            "--num_processes and --process_id"
        )
        return None
    if index == "0":
        _log.info(
            f"NOTE {sizes[0]}: {count} processes train together, and meet at {address}; with "
            "--num_processes=1 each trains alone"
        )
    return address, count, index


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
    parts = [_PART.findall(text) for text in (workers or "").split(",") if text]
    names = [part[-1 if len(part) > 2 else 0] for part in parts]
    slices = int(environment.get("MEGASCALE_NUM_SLICES") or 1)
    if len(names) * slices < 2:
        return None
    if len(names) > 1 and not worker:
        raise HostError(
            f"the VM's metadata name {len(names)} hosts and not which of them this one is: set "
            "--coordinator, --num_processes and --process_id"
        )
    first = [*_PART.findall(environment.get("MEGASCALE_COORDINATOR_ADDRESS", "")), names[0]][0]
    port = environment.setdefault("JAX_COORDINATOR_PORT", _PORT)
    if not (port.isdecimal() and 0 < int(port) < 65536):
        raise HostError(f"JAX_COORDINATOR_PORT={port}: must be from 1 to 65535, such as {_PORT}")
    index = int(environment.get("MEGASCALE_SLICE_ID") or 0) * len(names) + int(worker or 0)
    hosts = tuple(names) if slices == 1 else ()
    return ProcessGroup(f"{first}:{port}", len(names) * slices, index, hosts)


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
    try:
        with opener.open(request, timeout=10) as answer:
            return answer.read().decode().strip()
    except (http.client.HTTPException, ValueError) as error:  # another program answers
        raise OSError(one_line(error)) from error


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
