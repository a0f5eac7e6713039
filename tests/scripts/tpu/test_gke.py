"""deploy/jobset.yaml and the program that fills it in."""

from pathlib import Path

import pytest
import yaml

from scripts.tpu import gke

ROOT = Path(__file__).parents[3]
FLAGS = ["--name=resnet", "--image=registry/resnet-tpu:1"]
COMMAND = ["--", "--config=configs/resnet50.py", "--workdir=gs://b/run"]


def filled(*flags):
    return gke.manifest(gke._flags([*FLAGS, *flags, *COMMAND]))


def job_of(whole):
    return whole["spec"]["replicatedJobs"][0]["template"]["spec"]


def test_the_manifest_is_that_of_a_whole_slice_of_four_hosts():
    assert yaml.safe_load((ROOT / "deploy/jobset.yaml").read_text()) == gke.manifest(
        gke._flags(
            ["--name=resnet", "--type=v6e-16"]
            + ["--image=REGION-docker.pkg.dev/PROJECT/REPOSITORY/resnet-tpu:latest", "--"]
            + ["--config=configs/resnet50.py", "--workdir=gs://my-bucket/resnet50"]
        )
    )


@pytest.mark.parametrize(
    ("kind", "label", "topology", "hosts", "chips"),
    [
        ("v6e-1", "tpu-v6e-slice", "1x1", 1, 1),
        ("v6e-8", "tpu-v6e-slice", "2x4", 1, 8),
        ("v5e:4x4", "tpu-v5-lite-podslice", "4x4", 4, 4),
        ("v5p-8", "tpu-v5p-slice", "2x2x1", 1, 4),
        ("v4-32", "tpu-v4-podslice", "2x2x4", 4, 4),
        ("tpu7x-8", "tpu7x", "2x2x1", 1, 4),
        ("tpu7x-128", "tpu7x", "4x4x4", 16, 4),
    ],
)
def test_slices(kind, label, topology, hosts, chips):
    whole = filled(f"--type={kind}", "--spot", "--service_account=trainer")
    job = job_of(whole)
    assert job["parallelism"] == job["completions"] == hosts
    pod = job["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": topology,
        "cloud.google.com/gke-spot": "true",
    }
    assert pod["serviceAccountName"] == "trainer"
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": chips}
    assert container["args"] == COMMAND[1:]


def test_the_exit_codes_that_end_a_run():
    """A user must fix something, or two devices disagree."""
    (rule,) = job_of(filled("--type=v6e-1"))["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [1, 76]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A stand-in for kubectl; `answers` is what it says of the JobSet API."""
    (tmp_path / "kubectl").write_text(
        "#!/bin/bash\n"
        'case "$*" in\n'
        f"  'api-resources --api-group=jobset.x-k8s.io --output=name') cat {tmp_path}/answers ;;\n"
        f"  'apply --filename=-') cat >{tmp_path}/applied; exec bash {tmp_path}/then ;;\n"
        '  *) echo "error: unknown command $*" >&2; exit 2 ;;\n'
        "esac\n"
    )
    (tmp_path / "kubectl").chmod(0o755)
    (tmp_path / "then").write_text("")
    (tmp_path / "answers").write_text("jobsets.jobset.x-k8s.io\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return tmp_path


def run(*flags, command=COMMAND):
    return gke.main([*FLAGS, *flags, *command])


def test_a_run_is_applied(cluster, capsys):
    assert run("--type=v6e-16") == 0
    assert yaml.safe_load((cluster / "applied").read_text()) == filled("--type=v6e-16")
    assert "kubectl delete jobset resnet" in capsys.readouterr().out


def test_a_dry_run_asks_no_cluster(cluster, capsys):
    (cluster / "answers").unlink()
    assert run("--type=v6e-16", "--dry_run") == 0
    assert yaml.safe_load(capsys.readouterr().out) == filled("--type=v6e-16")


@pytest.mark.parametrize(
    ("flags", "command", "word"),
    [
        (["--type=v3-8"], COMMAND, "--type=v3-8"),
        (["--type=v6e-1,v6e-8"], COMMAND, "give one slice of"),
        (["--type=tpu7x-4"], COMMAND, "--type=tpu7x-4"),
        (["--type=v9-16"], COMMAND, "--type=v9-16"),
        (["--type=v6e-1", "--image="], COMMAND, "--image="),
        (["--type=tpu9:2x2"], COMMAND, "--type=tpu9:2x2"),
        (["--type=v6e-1", "--name=A"], COMMAND, "--name=A"),
        (["--type=v6e-1"], ["--", "--workdir=/w"], "--workdir=gs://BUCKET/RUN"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(flags, command, word, cluster, capsys):
    assert run(*flags, command=command) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1 and word in captured.err
    assert not (cluster / "applied").exists()


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ([*FLAGS, "--type=v6e-1", "--workdir=gs://b/r"], "--workdir=gs://b/r"),
        (["--typ=v6e-1", "--imag=x"], "--name"),
    ],
)
def test_arguments_are_refused_in_one_line(flags, word, capsys):
    with pytest.raises(SystemExit) as ended:
        gke.main(flags)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and word in line


def test_a_cluster_without_the_jobset_api(cluster, capsys):
    (cluster / "answers").write_text("")
    assert run("--type=v6e-1") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gke: the cluster has no JobSet API: install it, see https://jobset")
    assert not (cluster / "applied").exists()


def test_a_machine_without_kubectl_and_a_cluster_that_refuses(cluster, capsys, monkeypatch):
    (cluster / "then").write_text("echo 'Error from server: the queue is full' >&2; exit 1")
    assert run("--type=v6e-1") == 1
    line = "gke: kubectl apply: Error from server: the queue is full\n"
    assert capsys.readouterr().err == line
    monkeypatch.setenv("PATH", str(cluster / "empty"))
    assert run("--type=v6e-1") == 1
    assert capsys.readouterr().err.startswith("gke: there is no kubectl here: gcloud components")
