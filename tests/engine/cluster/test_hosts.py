"""Finding the hosts of a run: flags, jax's variables, Kubernetes, a TPU VM's metadata."""

import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from common.errors import HostError
from engine.cluster import hosts
from engine.cluster.hosts import ProcessGroup
from tests.engine.cluster.meeting import child, free_port

TORCHRUN = {
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "4",
    "RANK": "1",
    "LOCAL_RANK": "1",
}
SRUN = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NODELIST": "node[007-010,12],x1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
MPIRUN = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("JAX_COORDINATOR", "JAX_NUM_", "JAX_PROCESS", "TPU_", "MEGASCALE_")):
            monkeypatch.delenv(name)
        if name.startswith(("JAX_LOCAL", "SLURM_", "OMPI_", "PMI_", "MASTER_")) or name in TORCHRUN:
            monkeypatch.delenv(name)
    yield
    os.environ.pop("JAX_LOCAL_DEVICE_IDS", None)


@pytest.fixture
def vm(monkeypatch):
    """A TPU VM, whose metadata attributes are the returned dict."""
    attributes: dict[str, str] = {}

    class Metadata(BaseHTTPRequestHandler):
        def do_GET(self):
            value = attributes.get(self.path.rpartition("/")[2])
            known = value is not None and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write((value or "").encode())

        def log_message(self, format, *args):
            pass

    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(hosts, "tpu_chips", lambda: 4)
    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
        yield attributes
        server.shutdown()


def test_alone():
    assert hosts.find() is None
    assert hosts.find("10.0.0.2:8476", 1, 0) is None


def test_flags_and_variables(monkeypatch):
    group = ProcessGroup("10.0.0.2:1234", 4, 3)
    assert hosts.find("10.0.0.2:1234", 4, 3) == group
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.9:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "4")
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    assert hosts.find() == ProcessGroup("10.0.0.9:1", 4, 0)
    assert hosts.find("10.0.0.2:1234", 0, 3) == group
    assert hosts.find("10.0.0.2:65535", 2) == ProcessGroup("10.0.0.2:65535", 2, 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("10.0.0.2:1", 4, -1), "--process_id"),
        (("", 4, 0), "--coordinator"),
        (("10.0.0.2:1", 0, 0), "--num_processes"),
        (("10.0.0.2", 4, 0), "--coordinator=10.0.0.2.*host:port"),
        *(((f"a:{port}", 4, 0), "--coordinator=a:.*host:port") for port in ("x", "0", "65536")),
        *(((at, 4, 0), "such as .*or .fd00::2.:8476") for at in ("::1:80", "[]:80", "http://a:80")),
        (("10.0.0.2:1", 4, 4), "--process_id=4.*--num_processes=4"),
    ],
)
def test_incomplete_or_invalid_flags_are_refused(flags, words):
    with pytest.raises(HostError, match=words):
        hosts.find(*flags)


def test_an_ipv6_address_of_process_0():
    assert hosts.find("[fd00::2]:8476", 2, 1) == ProcessGroup("[fd00::2]:8476", 2, 1)


@pytest.mark.parametrize(
    ("variables", "group", "gpus"),
    [
        (TORCHRUN, ProcessGroup(f"node-a:{29500 % 4096 + 61440}", 4, 1), "1"),
        (
            {**TORCHRUN, "MASTER_ADDR": "fd00::2", "JAX_COORDINATOR_PORT": "80"},
            ProcessGroup("[fd00::2]:80", 4, 1),
            "1",
        ),
        (
            {**TORCHRUN, "MASTER_ADDR": "[fd00::2]", "WORLD_SIZE": " 04"},
            ProcessGroup("[fd00::2]:62268", 4, 1),
            "1",
        ),
        ({**TORCHRUN, "JAX_LOCAL_DEVICE_IDS": "2,3"}, ProcessGroup("node-a:62268", 4, 1), "2,3"),
        ({**SRUN, **TORCHRUN}, ProcessGroup("node-a:62268", 4, 1), "1"),
        (SRUN, ProcessGroup(f"node007:{5000 % 4096 + 61440}", 4, 1), None),
        ({**SRUN, "SLURM_NTASKS": "8"}, ProcessGroup("node007:62344", 4, 1), None),
        (MPIRUN, ProcessGroup(f"10.96.0.1:{1531576320 // 4096 % 4096 + 61440}", 2, 1), "1"),
        (
            {**SRUN, **MPIRUN, "OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fd00::3:2,fd00::4]:43370"},
            ProcessGroup("[fd00::3:2]:61441", 2, 1),
            "1",
        ),
    ],
)
def test_what_a_launcher_has_started(variables, group, gpus, monkeypatch, caplog):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    caplog.set_level("INFO", logger="tpu_suite")
    assert hosts.find() == group and not caplog.messages  # process 0 says it
    assert os.environ.get("JAX_LOCAL_DEVICE_IDS") == gpus  # on SLURM jax finds it
    assert hosts.find(num_processes=1) is None
    assert hosts.find("a:80", 2, 0) == ProcessGroup("a:80", 2, 0)
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "0")
    first = hosts.find()
    assert first and first.index == 0
    (note,) = caplog.messages
    assert note.startswith("NOTE ") and f": {group.count} processes train together" in note
    assert group.address in note


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({"SLURM_JOB_ID": "5", "SLURM_NTASKS": "4", "SLURM_NODELIST": "a,b"}, "SLURM_NTASKS=4"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, "SLURM_NTASKS=4"),  # salloc
        ({**SRUN, "SLURM_JOB_ID": "x"}, "SLURM_NTASKS=4"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE=2"),
        ({**TORCHRUN, "MASTER_PORT": "x"}, "invalid literal"),
        *(
            ({**TORCHRUN, name: value}, f"{name}={value}")
            for name, value in {
                "WORLD_SIZE": "abc",
                "RANK": "4",
                "MASTER_ADDR": "tcp://node-a",
                "JAX_COORDINATOR_PORT": "x",
            }.items()
        ),
        ({**SRUN, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST="),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "PMI_SIZE=2"),
        # Open MPI 5: jax 0.10 does not know it, jax 0.12 needs mpi4py
        ({name: x for name, x in MPIRUN.items() if "uri" not in name}, "OMPI_COMM_WORLD_SIZE=2"),
    ],
)
def test_a_process_that_cannot_join_the_others_says_so(variables, word, monkeypatch, caplog):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    caplog.set_level("INFO", logger="tpu_suite")
    assert hosts.find() is None
    (note,) = caplog.messages
    assert note.startswith("NOTE ") and word in note
    for flag in ("--coordinator", "--num_processes", "--process_id"):
        assert flag in note


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "01"}, {"SLURM_NTASKS": "1"}])
def test_one_process_of_a_launcher_is_alone(variables, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hosts.find() is None and not capsys.readouterr().out


JOINS = """
import jax
import sys
from engine import environment
from engine.cluster import hosts, processes
environment.show_log(sys.stdout)
group = hosts.find(*(int(text) if text.isdecimal() else text for text in sys.argv[1:]))
processes.join(group, {}, 60.0, 60.0)
print("of", jax.process_count(), "with", jax.device_count(), "devices:", jax.process_index())
processes.finish(0)
"""


@pytest.mark.parametrize("launcher", ["srun", "torchrun", "mpirun", "IPv6"])
def test_two_processes_find_each_other(launcher, monkeypatch):
    port = str(free_port())
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    here = {"MASTER_ADDR": "localhost", "WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2"}
    here |= {
        "SLURM_STEP_NODELIST": "localhost",
        "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://127.0.0.1:5",
    }
    if launcher != "IPv6":
        monkeypatch.setenv("JAX_COORDINATOR_PORT", port)
        variables = {"srun": SRUN, "torchrun": TORCHRUN, "mpirun": MPIRUN}[launcher]
        for name, value in variables.items():
            monkeypatch.setenv(name, here.get(name, value))
    children = []
    for index in ("0", "1"):
        for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
            monkeypatch.setenv(name, index)
        flags = [f"[::1]:{port}", "2", index] if launcher == "IPv6" else []
        children.append(child(JOINS, *flags))
    for index, process in enumerate(children):
        *note, line = process.communicate()[0].splitlines()
        assert line == f"of 2 with 6 devices: {index}"
        assert len(note) == (launcher != "IPv6" and not index)


def test_kubernetes(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "t-0.svc,t-1.svc,t-2.svc,t-3.svc")
    monkeypatch.setenv("TPU_WORKER_ID", "2")
    names = ("t-0.svc", "t-1.svc", "t-2.svc", "t-3.svc")
    assert hosts.find() == ProcessGroup("t-0.svc:8476", 4, 2, names)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    assert hosts.find() is None
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "t-0.svc,t-1.svc")
    assert hosts.find() is None


@pytest.mark.parametrize(
    "endpoints", ["10.0.0.5,10.0.0.6", "x:unknown:10.0.0.5,y:unknown:10.0.0.6"]
)
def test_a_slice_of_tpu_vms(endpoints, vm, monkeypatch):
    vm |= {"worker-network-endpoints": endpoints, "agent-worker-number": "1"}
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "9999")
    assert hosts.find() == ProcessGroup("10.0.0.5:9999", 2, 1, ("10.0.0.5", "10.0.0.6"))
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    assert hosts.find() is None


def test_a_single_tpu_vm_is_alone(vm):
    assert hosts.find() is None  # no attributes
    vm |= {"worker-network-endpoints": "10.0.0.5", "agent-worker-number": "0"}
    assert hosts.find() is None


def test_a_vm_that_does_not_know_its_number(vm):
    vm["worker-network-endpoints"] = "r-1wjb,r-1z9d"
    with pytest.raises(HostError, match="name 2 hosts.*--process_id"):
        hosts.find()


def test_two_slices_joining(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "t-2.svc,t-3.svc")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "1")
    monkeypatch.setenv("MEGASCALE_COORDINATOR_ADDRESS", "10.0.0.5:8080")
    assert hosts.find() == ProcessGroup("10.0.0.5:8476", 4, 3)


def test_slices_whose_hosts_have_ipv6_addresses(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "x:unknown:[fd00::5],[fd00::6]:8471")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    assert hosts.find() == ProcessGroup("[fd00::5]:8476", 2, 1, ("[fd00::5]", "[fd00::6]"))
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    monkeypatch.setenv("MEGASCALE_COORDINATOR_ADDRESS", "[fd00::5]:8080")
    assert hosts.find() == ProcessGroup("[fd00::5]:8476", 4, 1)


@pytest.mark.parametrize("answer", [b"nonsense\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n\xff\xfe\x80"])
def test_another_program_in_place_of_the_metadata_server(answer, vm, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.getsockname()[1]}")

        def serve():
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(HostError, match="TPU_SKIP_MDS_QUERY=1"):
            hosts.find()


def test_a_tpu_without_metadata_says_what_to_do(vm, monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    with pytest.raises(HostError, match="TPU_SKIP_MDS_QUERY=1"):
        hosts.find()
