"""Finding the hosts of a run: flags, jax's variables, Kubernetes, a TPU VM's metadata."""

import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from common.errors import HostError
from engine.cluster import hosts
from engine.cluster.hosts import ProcessGroup


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("JAX_COORDINATOR", "JAX_NUM_", "JAX_PROCESS", "TPU_", "MEGASCALE_")):
            monkeypatch.delenv(name)


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
        (("10.0.0.2:1", 4, 4), "--process_id=4.*--num_processes=4"),
    ],
)
def test_incomplete_or_invalid_flags_are_refused(flags, words):
    with pytest.raises(HostError, match=words):
        hosts.find(*flags)


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


def test_a_tpu_without_metadata_says_what_to_do(vm, monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    with pytest.raises(HostError, match="TPU_SKIP_MDS_QUERY=1"):
        hosts.find()
