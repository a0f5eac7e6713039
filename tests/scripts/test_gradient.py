"""scripts/gradient_job.sh as a host runs it, on disk and on gs://; and what gradient/ holds."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from typing import IO

import pytest
import yaml

from common.errors import UserError
from scripts.job import run as gradient_job
from scripts.job.run import Children, Request, parse_request
from tests.test_gcs_training import rows as rows_on_gs
from tests.test_gcs_training import steps as steps_on_gs
from tests.test_main import ROOT, TINY, environment, wait_for
from tests.test_train import assert_same_state, rows, state_on_disk

Log = int | IO[str]
ENV = {"VIRTUAL_ENV": sys.prefix, "TPU_NAME": "tpu-7", "TPU_GRPC_URL": "grpc://10.0.0.2:8470"}
FLAGS = ["--config=configs/digits.py", *(f"--config.{k}={v}" for k, v in TINY.items())]


def start(model_dir, *flags, log: Log = subprocess.PIPE, **env):
    return subprocess.Popen(
        ["bash", str(ROOT / "scripts" / "gradient_job.sh"), *FLAGS, *flags],
        cwd="/",
        env=environment(**{**ENV, "TPU_MODEL_DIR": model_dir, **env}),
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(model_dir, *flags, **env):
    process = start(model_dir, *flags, **env)
    output, _ = process.communicate()
    return process.returncode, output


def learned(metrics):
    """Of each row what depends on no clock."""
    keys = ("split", "step", "loss", "learning_rate", "top_1_accuracy", "top_5_accuracy")
    return [{k: row[k] for k in keys if k in row} for row in metrics]


def metadata_of(metrics):
    """What gradient-model-metadata.json must say of these rows of metrics.jsonl."""
    evals = [row for row in metrics if row["split"] == "eval"]
    best = max(evals, key=lambda row: (row["top_1_accuracy"], -row["step"]))
    names = ("loss", "top_1_accuracy", "top_5_accuracy", "step")
    return best["step"], {
        **{name: best[name] for name in names},
        **{f"last_{name}": evals[-1][name] for name in names},
    }


def as_dict(metadata):
    assert [set(row) for row in metadata["metrics"]] == [{"name", "numberValue"}] * 8
    return {row["name"]: row["numberValue"] for row in metadata["metrics"]}


@pytest.mark.slow
def test_a_job_on_disk_stopped_by_a_signal_and_typed_again(calm_run, tiny_records, tmp_path):
    model_dir = tmp_path / "model"
    shutil.copytree(tiny_records, model_dir / "input_data")
    (model_dir / "input_data2").mkdir()
    (model_dir / "input_data2" / "train-0").write_text("not ours")
    out = model_dir / "output_data"
    with open(tmp_path / "log", "w") as log:
        process = start(str(model_dir), log=log)
        wait_for(process, out / "metrics.jsonl", '"step": 2')
        process.send_signal(signal.SIGTERM)
        code = process.wait()
    output = (tmp_path / "log").read_text()
    assert code == 143, output
    assert f"training ended with exit code 143: nothing was deleted; {model_dir}" in output
    assert output.count("TPU_GRPC_URL") == 1
    assert sorted(os.listdir(model_dir / "input_data")) == sorted(os.listdir(tiny_records))
    code, output = run(str(model_dir))
    assert code == 0 and "resuming at step" in output, output
    metrics = rows(out)
    assert_same_state(state_on_disk(calm_run[0], 12), state_on_disk(out, 12))
    assert learned(metrics) == learned(rows(calm_run[0]))
    assert sorted(os.listdir(model_dir)) == ["input_data2", "output_data"]
    assert os.listdir(model_dir / "input_data2") == ["train-0"]
    best, expected = metadata_of(metrics)
    assert as_dict(json.loads((out / "gradient-model-metadata.json").read_text())) == expected
    assert {best, 12} <= (kept := set(map(int, os.listdir(out / "checkpoints"))))
    assert len(kept) <= 2
    code, output = run(str(model_dir))
    assert code == 0 and output.startswith("job: already finished") and output.count("\n") == 1


@pytest.mark.slow
def test_a_job_on_gs_that_stages_its_input(gcs, calm_run, tiny_records):
    data, model_dir = gcs.bucket("read"), f"{gcs.bucket()}/some/job"
    gcs.upload(tiny_records, f"{data}/records")
    gcs.write(f"{model_dir}/input_data2/train-0", b"not ours")
    gcs.write(f"{model_dir}/input_data/a train#1//x", b"staged by somebody else")
    code, output = run(model_dir, STAGE_FROM=f"{data}/records")
    assert code == 0 and "staging 6 of 6 files" in output, output
    out = f"{model_dir}/output_data"
    metrics = rows_on_gs(gcs, out)
    assert learned(metrics) == learned(rows(calm_run[0]))
    assert_same_state(state_on_disk(calm_run[0], 12), state_on_disk(out, 12))
    names = [name for name in gcs.names(model_dir) if not name.startswith("output_data/")]
    assert names == ["input_data2/train-0"]
    best, expected = metadata_of(metrics)
    assert as_dict(json.loads(gcs.read(f"{out}/gradient-model-metadata.json"))) == expected
    assert {best, 12} <= set(kept := steps_on_gs(gcs, out)) and len(kept) <= 2
    assert len(gcs.names(f"{data}/records")) == 6
    code, output = run(model_dir, STAGE_FROM=f"{data}/records")
    assert code == 0 and "already finished" in output, output


@pytest.mark.parametrize(
    ("flags", "env", "word"),
    [
        ([], {"TPU_MODEL_DIR": " "}, "TPU_MODEL_DIR is not set"),
        *(
            ([], {"TPU_MODEL_DIR": place}, place)
            for place in ("gs:///x", "gs://b//x", "gs://bk/x/../y", "s3://b/x", "model", __file__)
        ),
        ([], {"STAGE_FROM": "records"}, "STAGE_FROM: 'records'"),
        ([], {"KEEP_INPUT": "2"}, "KEEP_INPUT=2"),
        ([], {"EXPORT_MODEL": "yes"}, "EXPORT_MODEL=yes"),
        ([], {"TPU_WORKER_HOSTNAMES": "a,b"}, "2 hosts"),
        (["-workdir", "x"], {}, "--workdir"),
        (["--mode=eval"], {}, "--mode"),
        (["--config.data_dir=x"], {}, "--config.data_dir"),
        (["--config.keep_checkpoints=2"], {}, "--config.keep_checkpoints"),
    ],
)
def test_refusals_before_anything_is_done(flags, env, word):
    with pytest.raises(UserError) as refused:
        parse_request(flags, {"TPU_MODEL_DIR": "gs://bucket/job", **env})
    assert word in str(refused.value) and "\n" not in str(refused.value)


def test_the_parent_of_the_steps_imports_no_jax():
    """It lives as long as the training, and jax would change the environment of its children."""
    code = "import sys, scripts.job.run; print('jax' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_what_the_environment_asks_for():
    asked = parse_request(["--config.seed=1"], {"TPU_MODEL_DIR": "gs://bucket/", "KEEP_INPUT": "0"})
    flags = ["--config=configs/resnet50.py", "--config.seed=1"]
    assert asked == Request("gs://bucket", flags, False, "")
    asked = parse_request(["--config", "x.py"], {"TPU_MODEL_DIR": "/m", "STAGE_FROM": "/r"})
    assert asked == Request("/m", ["--config", "x.py"], False, "/r")


class Scripted(Children):
    """Runs nothing: answers with exit codes, in order."""

    def __init__(self, *codes):
        super().__init__()
        self.codes, self.commands = list(codes), []

    def run(self, command, env):
        self.commands.append((command[1:], env))
        return self.codes.pop(0)


@pytest.mark.parametrize(
    ("codes", "code", "words"),
    [
        *(([1], 1, "preparing ended with exit code 1"), ([3], 0, "")),
        ([0, 1], 1, "the doctor ended with exit code 1"),
        ([0, 0, 143], 143, "training ended with exit code 143"),
        ([0, 0, 0, 137], 137, "finishing ended with exit code 137"),
        ([0, 0, 0, 0], 0, ""),
    ],
)
def test_the_order_of_the_steps_and_their_exit_codes(codes, code, words, capfd, monkeypatch):
    monkeypatch.setenv("TPU_GRPC_URL", "grpc://x")
    children = Scripted(*codes)
    request = Request("/m", ["--config=c.py"], True, "/r")
    assert gradient_job.run(request, children) == code
    error = capfd.readouterr().err
    assert words in error and error.count("\n") == bool(code)
    ours = ["--workdir=/m/output_data", "--config.data_dir=/m/input_data"]
    ours.append("--config.keep_checkpoints=1")
    steps, flags = ["-m", "scripts.job.steps"], ["--", "--config=c.py"]
    assert [command for command, _ in children.commands] == [
        [*steps, "begin", "/m", "--keep_input", "--stage_from=/r", *flags],
        ["main.py", "--config=c.py", *ours, "--mode=doctor"],
        ["main.py", "--config=c.py", *ours, "--mode=train_and_eval"],
        [*steps, "finish", "/m", "--keep_input", *flags],
    ][: len(codes)]
    has_url = ["TPU_GRPC_URL" in env for _, env in children.commands]
    assert has_url == [True, False, True, True][: len(codes)]


@pytest.mark.parametrize(("codes", "code"), [([0, 0, 0, 0, 0], 0), ([0, 0, 0, 1], 1)])
def test_a_job_that_exports(codes, code, capfd):
    env = {"TPU_MODEL_DIR": "/m", "EXPORT_MODEL": "1"}
    children = Scripted(*codes)
    assert gradient_job.run(parse_request(["--config=c.py"], env), children) == code
    export = ["main.py", "--mode=export", "--format=savedmodel", "--workdir=/m/output_data"]
    assert children.commands[3][0] == export
    assert ("exporting ended with exit code 1" in capfd.readouterr().err) == bool(code)


def test_signals_go_to_the_child_and_stop_what_follows():
    """Also one that comes while no child is there."""
    children = Children()
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        children.listen()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert children.run(["bash", "-c", "exit 7"], os.environ) == 7
        child = f"trap 'exit 9' TERM; kill -TERM {os.getpid()}; while :; do sleep 0.05; done"
        assert children.run(["bash", "-c", child], os.environ) == 9
        assert children.run(["touch", "/nowhere/x"], os.environ) == 143  # not started
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


# What gradient/ holds.


def executable(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_the_job_command_expands_on_the_jobs_host(tmp_path):
    """Its shell has other values; the platform's command is played by a script that records."""
    here, there, workspace = tmp_path / "here", tmp_path / "there", tmp_path / "workspace"
    for folder in (here, there / "bin", workspace / "scripts"):
        folder.mkdir(parents=True)
    executable(here / "paperspace", f'#!/bin/sh\nprintf "%s\\0" "$@" > {tmp_path}/arguments\n')
    path = f"{here}:{os.environ['PATH']}"
    wrong = {"PATH": path, "TPU_MODEL_DIR": "gs://mine", "TPU_NAME": "mine"}
    command = ["bash", str(ROOT / "gradient" / "job_command.sh")]
    subprocess.run(command, env=environment(**wrong), check=True)
    words = (tmp_path / "arguments").read_text().split("\0")[:-1]
    assert words[:4] == ["jobs", "create", "--machineType", "TPU"]
    job = words[words.index("--command") + 1]
    assert words[words.index("--workspace") + 1] == "git+https://github.com/<OWNER>/<REPO>.git"

    # The host: a stub of the interpreter stands where the active venv's would.
    for name in ("gradient_job.sh", "find_python.sh", "usage.sh"):
        shutil.copy(ROOT / "scripts" / name, workspace / "scripts")
    stub = '#!/bin/sh\n[ "$1" = -c ] || echo "$TPU_MODEL_DIR $@"\n'
    executable(there / "bin" / "python", stub)
    env = environment(**{**ENV, "VIRTUAL_ENV": str(there), "TPU_MODEL_DIR": "gs://a b/job"})
    command = ["bash", "-c", job]
    done = subprocess.run(command, cwd=workspace, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "TPU_NAME=tpu-7 TPU_GRPC_URL=grpc://10.0.0.2:8470 TPU_MODEL_DIR=gs://a b/job",
        "gs://a b/job -m scripts.job.run --config=configs/resnet50.py",
    ]


def test_a_bare_host_installs_the_packages_first(tmp_path):
    """Of two interpreters: python3 has no packages; what the installation makes is used."""
    (tmp_path / "scripts").mkdir()
    for name in ("gradient_job.sh", "find_python.sh", "usage.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    executable(tmp_path / "python3", "#!/bin/sh\nexit 1\n")
    script = "mkdir -p .venv/bin; printf '#!/bin/sh\\necho runs \"$@\"' > .venv/bin/python"
    setup = f'echo setup "$@"; {script}; chmod +x .venv/bin/python\n'
    (tmp_path / "scripts" / "setup.sh").write_text(setup)
    command = ["bash", str(tmp_path / "scripts" / "gradient_job.sh"), "--config=a b.py"]
    path = f"{tmp_path}:{os.environ['PATH']}"

    def start(**env):
        env = environment(PATH=path, VIRTUAL_ENV="", **env)
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout.splitlines(), done.stderr

    code, lines, error = start()
    assert (code, lines) == (1, []) and error.startswith("ERROR: TPU_MODEL_DIR is not set")
    setup = "setup"  # for what the machine has
    trains = "runs -m scripts.job.run --config=a b.py"
    assert start(TPU_MODEL_DIR="/m") == (0, [setup, trains], "")
    assert start(TPU_MODEL_DIR="/m") == (0, [trains], "")


def test_the_workflow_is_what_its_documentation_shows():
    flow = yaml.safe_load((ROOT / "gradient" / "workflow.yaml").read_text())
    job = flow["jobs"]["train"]
    assert (job["uses"], job["needs"]) == ("container@v1", ["code"])
    assert job["inputs"]["repository"] == "code.outputs.repository"
    flag, script = job["with"]["args"]
    assert flag == "-c" and subprocess.run(["bash", "-n", "-c", script]).returncode == 0
    for word in ("/inputs/records", "/outputs/model", "scripts/gradient_job.sh"):
        assert word in script
    parse_request([], job["env"])
