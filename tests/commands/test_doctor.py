"""The doctor, with each thing broken in turn."""

import importlib.metadata
import json
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import pytest

import benchmarks
import train
from benchmarks.part import Part
from commands import doctor
from common.errors import UserError, one_line
from engine import devices
from engine.cluster import guard
from engine.cluster.hosts import ProcessGroup
from engine.plan import read_settings
from tests.conftest import make_tiny_config, opened


@pytest.fixture
def diagnose(tiny_records, tmp_path, monkeypatch, capsys):
    """Runs the doctor on the tiny job with changes: (exit code, {check: [findings]})."""
    for name in ("TPU_WORKER_HOSTNAMES", "TPU_GRPC_URL", "JAX_COORDINATOR_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "_LOCK", str(tmp_path / "lock"))

    def run(workdir=str(tmp_path / "run"), hosts=None, **overrides):
        capsys.readouterr()
        config = make_tiny_config(**{"data_dir": tiny_records, **overrides})
        code = doctor.run(read_settings(config, workdir), True, False, hosts)
        by_check = {}
        for finding in json.loads(capsys.readouterr().out):
            by_check.setdefault(finding["check"], []).append(finding)
        return code, by_check

    return run


@pytest.fixture
def refusal(tiny_records, tmp_path):
    """What the tiny job with changes says when it ends at its start."""

    def run(**overrides):
        config = make_tiny_config(**{"data_dir": tiny_records, **overrides})
        with pytest.raises(UserError) as refused:
            train.train_and_evaluate(read_settings(config, str(tmp_path / "refused")))
        return one_line(refused.value)

    return run


def faults(findings):
    return {check for check, rows in findings.items() for row in rows if row["status"] == "fail"}


def test_nothing_is_wrong(diagnose):
    code, findings = diagnose()
    assert code == 0
    assert not faults(findings)
    assert {"versions", "devices", "workdir", "data", "memory"} <= findings.keys()
    assert "90 images to train, 23 to evaluate" in findings["data"][0]["text"]
    assert "8 x cpu" in findings["devices"][0]["text"]
    assert "2 per device" in findings["devices"][0]["text"]


@pytest.mark.usefixtures("nothing_held_out")
def test_nothing_is_wrong_where_nothing_is_held_out(diagnose):
    code, findings = diagnose(patience=3)
    assert code == 0 and not faults(findings)
    assert "90 images to train, 0 to evaluate" in findings["data"][0]["text"]


@pytest.mark.parametrize(
    ("overrides", "check", "message"),
    [
        ({"data_dir": "/nowhere"}, "data", "'/nowhere': there is no such folder"),
        ({"num_label_classes": 3}, "data", "num_label_classes"),
        ({"train_batch_size": 12}, "devices", "train_batch_size=12"),
        ({"bn_span": 3}, "devices", "bn_span=3"),
        ({"resnet_depth": 51}, "devices", "resnet_depth=51"),
    ],
)
def test_what_the_config_asks_for_cannot_be(diagnose, overrides, check, message):
    """What several checks need fails once."""
    code, findings = diagnose(**overrides)
    (row,) = [row for rows in findings.values() for row in rows if row["status"] == "fail"]
    assert code == 1 and row["check"] == check
    assert message in row["text"] and "\n" not in row["text"]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_finding_is_a_line_with_its_remedy(as_json, monkeypatch, capsys):
    def fail(case):
        yield doctor.Finding("ok", "many")
        raise OSError("gone\nand away")

    slow = doctor.Finding("warn", "slow", "buy")
    monkeypatch.setattr(doctor, "_CHECKS", {"devices": lambda case: [slow], "data": fail})
    monkeypatch.setattr(doctor, "_FIXES", {"data": "mend"})
    settings: Any = None
    assert doctor.run(settings, as_json) == 1
    out = capsys.readouterr().out
    if as_json:
        row = {"status": "fail", "check": "data", "text": "gone", "fix": "mend"}
        assert json.loads(out) == [{**slow._asdict(), "check": "devices"}, row]
    else:
        assert out == (
            "WARN  devices: slow\n       -> buy\nFAIL  data: gone\n       -> mend\n"
            "doctor: 1 of 2 checks failed, 1 warned\n"
        )


@pytest.mark.parametrize(
    ("versions", "chips", "statuses"),
    [
        ({"jaxlib": "0.9"}, 0, ["ok"]),
        ({"jaxlib": "0.9"}, 4, ["ok", "fail"]),
        ({"jaxlib": "0.9", "libtpu": "1"}, 4, ["ok"]),
        ({"jaxlib": "0.9", "libtpu": "1", "tensorflow": "2"}, 0, ["ok", "warn"]),
        ({"jaxlib": "0.9", "libtpu": "1", "tensorflow": "2"}, 4, ["ok", "fail"]),
    ],
)
def test_versions(versions, chips, statuses, monkeypatch):
    def version(name):
        if name != "jax" and name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions.get(name, "0.9")

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(devices, "tpu_chips", lambda: chips)
    monkeypatch.setattr(importlib.metadata, "version", version)
    case: Any = None
    first, *rest = findings = list(doctor._versions(case))
    assert [f.status for f in findings] == statuses and all(f.fix for f in rest)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")  # its lock has the full tensorflow
    assert not any("tensorflow is" in f.text for f in doctor._versions(case))
    text = f", jax 0.9, jaxlib {versions['jaxlib']}, libtpu {versions.get('libtpu', 'absent')}, "
    assert text in first.text


@pytest.mark.parametrize(("size", "statuses"), [(90, ["ok"]), (91, ["ok", "warn"])])
def test_a_batch_of_more_than_an_epoch(size, statuses):
    case: Any = types.SimpleNamespace(
        settings=types.SimpleNamespace(train_batch_size=size),
        splits=("train", "eval"),
        open_data=lambda: types.SimpleNamespace(
            unit="images",
            num_examples=lambda split: 90,
            declared_examples=lambda split: 0,
            part=Part(),
        ),
    )
    assert [finding.status for finding in doctor._data(case)] == statuses


@pytest.mark.parametrize(("needed", "status"), [(2_200_000_000, "ok"), (2_200_000_004, "fail")])
def test_the_input_may_take_four_fifths_of_the_free_memory(needed, status, monkeypatch):
    case: Any = types.SimpleNamespace(
        settings=types.SimpleNamespace(
            train_batch_size=4, eval_batch_size=8, config={"train": 1, "eval": 2}
        ),
        splits=("train", "eval"),
        open_data=lambda: types.SimpleNamespace(
            host_bytes=lambda split, *_: {(split,): needed // 2}
        ),
    )
    monkeypatch.setattr(guard, "memory_free", lambda: 2_750_000_000)
    (finding,) = doctor._memory(case)
    assert finding.status == status and ("--config.train" in finding.fix) == (status == "fail")
    assert finding.text == "input needs about 2.2 GB of this host, 2.8 GB are free"


@pytest.mark.parametrize(
    ("overrides", "status", "message"),
    [
        ({"init_env": "MLP_GCS_RESNET_CHECKPOINT"}, "warn", "begin at random"),
        ({"freeze": "stem"}, "fail", "config.freeze='stem' would freeze random weights"),
    ],
)
def test_weights_that_the_run_misses_or_refuses(overrides, status, message, diagnose):
    code, findings = diagnose(**overrides)
    (finding,) = findings["initial weights"]
    assert (code, finding["status"]) == (int(status == "fail"), status)
    assert message in finding["text"]


@pytest.mark.parametrize(
    "overrides",
    [
        {"train_steps": "abc"},
        {"eval_offset": "1 epoch", "steps_per_eval": ""},
        {"warmup_epochs": 1000.0},
        {"moving_average_decay": 0.9, "moving_average_every": 1000},
        {"profile_steps": "100:200"},
        {"init_without": "nonsense"},
        {"freeze": "nonsense"},
        {"patience": 2, "steps_per_eval": "1 epoch", "train_steps": "3"},
        {"mlperf": {"format": "mllog"}},
        {"mlperf": {"format": "mllog", "org": "x"}, "target": 0.7, "stop_at_target": True},
        {"mlperf": {"format": "mllog", "org": "x"}, "target": 0.8, "stop_at_target": True},
    ],
)
def test_the_doctor_refuses_what_the_start_of_a_run_refuses(overrides, diagnose, refusal):
    code, findings = diagnose(**overrides)
    failed = [row["text"] for rows in findings.values() for row in rows if row["status"] == "fail"]
    assert code == 1 and refusal(**overrides) in failed
    assert len(failed) == 1 or "freeze" in overrides  # weights at random may not be frozen either


def test_the_plan_is_made_without_data_too(diagnose):
    assert faults(diagnose(data_dir="/nowhere")[1]) == {"data"}
    for overrides in ({"train_steps": "abc"}, {"init_without": "x"}, {"profile_steps": "9"}):
        assert faults(diagnose(data_dir="/nowhere", **overrides)[1]) == {"data", "plan"}
    _, findings = diagnose(profile_steps="1:3", data_dir="/nowhere")  # steps are not known
    assert faults(findings) == {"data"}


def test_the_checkpoint_that_a_run_would_continue(diagnose, calm_run, tmp_path):
    workdir = str(shutil.copytree(calm_run[0], tmp_path / "begun"))
    code, findings = diagnose(workdir=workdir)
    assert code == 0 and "initial weights" not in findings
    (row,) = findings["checkpoint"]
    assert row["status"] == "ok" and "from step 12" in row["text"]
    code, findings = diagnose(workdir=workdir, base_learning_rate=0.7)
    assert [row["status"] for row in findings["checkpoint"]] == ["ok", "warn"]
    assert "config.base_learning_rate was" in findings["checkpoint"][1]["text"]
    code, findings = diagnose(workdir=workdir, num_filters=8)
    assert faults(findings) == {"checkpoint"} and code == 1
    assert "holds another model" in findings["checkpoint"][0]["text"]


def test_a_run_that_resumes_needs_no_other_weights(diagnose, tmp_path):
    (tmp_path / "begun" / "checkpoints" / "3").mkdir(parents=True)
    _, findings = diagnose(freeze="stem", workdir=str(tmp_path / "begun"))
    assert faults(findings) == {"checkpoint"} and "initial weights" not in findings


def test_a_workdir_that_cannot_be_written(diagnose, tmp_path, monkeypatch):
    """The doctor leaves nothing behind there, nor in the folder of temporary files."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    code, findings = diagnose(workdir=str(tmp_path / "file" / "run"))
    assert code == 1
    assert faults(findings) == {"workdir"}
    assert str(tmp_path / "file") in findings["workdir"][0]["text"]
    assert "choose another --workdir" in findings["workdir"][0]["fix"]
    assert list(temporary.iterdir()) == []


def test_a_workdir_that_cannot_be_reached_is_said_once(diagnose, monkeypatch):
    """As gs:// without a network: each call there fails with other words."""

    def no_network(self):
        raise OSError("no network, when reading metadata")

    def cannot_write(case):
        raise OSError("no network, when writing")

    monkeypatch.setattr(doctor.Case, "resumes", property(no_network))
    _, findings = diagnose()
    assert faults(findings) == {"checkpoint"}  # and "initial weights", whose words are the same
    monkeypatch.setitem(doctor._CHECKS, "workdir", cannot_write)
    _, findings = diagnose()
    assert faults(findings) == {"workdir"}


def test_the_memory_that_the_input_needs(tiny_records, tmp_path):
    config = make_tiny_config(tiny_records)
    stored = sum(path.stat().st_size for path in Path(tiny_records).glob("train-*"))
    shuffle, batches = 3 * 64 * stored // 90, 8 * 16 * 16 * 16 * 3
    for hosts in (1, 4):
        expected = {
            ("shuffle_buffer_size",): shuffle // hosts,
            ("train_batch_size", "image_size"): batches // hosts,
        }
        benchmark = opened(benchmarks.load(config, str(tmp_path)))
        assert benchmark.host_bytes("train", 16, hosts) == expected
        expected = {("eval_batch_size", "image_size"): batches // hosts}
        assert benchmark.host_bytes("eval", 16, hosts) == expected


def test_a_tpu_that_cannot_be_used(diagnose, monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "tpu_chips", lambda: 4)
    code, findings = diagnose()
    assert code == 1
    assert faults(findings) == {"versions"}  # the test requirements have no libtpu
    assert "scripts/setup.sh tpu" in findings["versions"][1]["fix"]
    monkeypatch.delenv("JAX_PLATFORMS")
    _, findings = diagnose()
    assert "4 TPU chip(s) but jax runs on the CPU" in findings["devices"][0]["text"]


def test_who_holds_the_tpu(diagnose, monkeypatch, tmp_path):
    lock = tmp_path / "lock"
    lock.write_text("")
    _, findings = diagnose()
    assert "TPU in use" not in findings  # there is none: a compiler for absent TPUs holds it
    monkeypatch.setattr(devices, "tpu_chips", lambda: 4)
    _, findings = diagnose()
    assert findings["TPU in use"][0]["status"] == "warn"
    hold = f"import sys, time; f = open({str(lock)!r}); print('held', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", hold]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        code, findings = diagnose()
        process.kill()
    assert code == 1
    text = f"by pid {process.pid} ({' '.join(command)[:80]})"
    assert findings["TPU in use"][0]["text"] == text


def test_a_host_that_does_not_come_is_named(diagnose, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(doctor, "_HOSTS_WAIT", 0.3)
    names = ("127.0.0.1", "10.0.0.7")
    code, findings = diagnose(hosts=(ProcessGroup(f"127.0.0.1:{port}", 2, 0, names), {}))
    assert code == 1
    row = findings["hosts"][0]
    assert "1 of 2 hosts arrived; host 1 (10.0.0.7) did not within" in row["text"]
    assert f"tcp:{port}" in row["fix"]
