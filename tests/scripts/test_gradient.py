"""A job under Gradient's contract: its steps, what it stages and deletes, on disk and on gs://."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
import tensorflow as tf
from etils import epath

from benchmarks import mlperf as rules
from common.errors import UserError
from engine.checkpoint.checkpointer import Checkpointer
from engine.cluster import preemption
from scripts import gradient
from scripts.gradient import ALREADY_FINISHED, Children, parse_request
from tests.test_main import ROOT, TINY, environment, wait_for
from tests.test_train import assert_same_state, rows, state_on_disk

pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ENV = {"VIRTUAL_ENV": sys.prefix, "TPU_NAME": "tpu-7", "TPU_GRPC_URL": "grpc://10.0.0.2:8470"}
FLAGS = ["--config=configs/digits.py", *(f"--config.{k}={v}" for k, v in TINY.items())]


def start(model_dir, log, **env):
    return subprocess.Popen(
        ["bash", str(ROOT / "scripts" / "gradient_job.sh"), *FLAGS],
        cwd="/",
        env=environment(**{**ENV, "TPU_MODEL_DIR": str(model_dir), **env}),
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(model_dir, **env):
    process = start(model_dir, subprocess.PIPE, **env)
    output, _ = process.communicate()
    return process.returncode, output


def learned(metrics):
    """Of each row what depends on no clock."""
    keys = ("split", "step", "loss", "learning_rate", "top_1_accuracy", "top_5_accuracy")
    return [{k: row[k] for k in keys if k in row} for row in metrics]


def put(path, data):
    """Writes a file on disk or on gs://."""
    path = epath.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def files(folder):
    """All files below a folder on disk or on gs://, relative to it."""
    paths = [f"{top}/{file}" for top, _, files in tf.io.gfile.walk(str(folder)) for file in files]
    return {re.sub("/+", "/", path.removeprefix(str(folder))).lstrip("/") for path in paths}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk", "gs"])
def test_a_job(kind, gcs, calm_run, tiny_records, tmp_path):
    """On disk it reads a user's own input and is stopped by a signal; on gs:// it stages."""
    data = f"{gcs.bucket('read')}/records"
    model_dir = epath.Path(f"{gcs.bucket()}/some/job" if kind == "gs" else tmp_path / "model")
    out = model_dir / "output_data"
    put(model_dir / "input_data2/train-0", b"not ours")
    if kind == "gs":
        gcs.upload(tiny_records, data)
        own = ["a train#1/x"]
        put(model_dir / "input_data/a train#1/x", b"the user's")
        code, output = run(model_dir, STAGE_FROM=data)
        assert code == 0 and "staging 6 files" in output, output
        assert len(gcs.names(data)) == 6
    else:
        own = os.listdir(tiny_records)
        shutil.copytree(tiny_records, model_dir / "input_data")
        with open(tmp_path / "log", "w") as log:
            process = start(model_dir, log)
            wait_for(process, out / "metrics.jsonl", '"step": 2')
            process.send_signal(signal.SIGTERM)
            code = process.wait()
        output = (tmp_path / "log").read_text()
        assert code == 143, output
        assert "training ended with exit code 143: nothing was deleted" in output
        assert sorted(os.listdir(model_dir / "input_data")) == sorted(os.listdir(tiny_records))
        code, output = run(model_dir)
        assert code == 0 and "resuming at step" in output, output
    assert_same_state(state_on_disk(calm_run[0], 12), state_on_disk(out, 12))
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert learned(metrics) == learned(rows(calm_run[0]))
    stays = {"input_data2/train-0", *(f"input_data/{name}" for name in own)}
    assert {name for name in files(model_dir) if not name.startswith("output_data/")} == stays
    evals = [row for row in metrics if row["split"] == "eval"]
    best = max(evals, key=lambda row: (row["top_1_accuracy"], -row["step"]))
    names = ("loss", "top_1_accuracy", "top_5_accuracy", "step")
    expected = {name: best[name] for name in names}
    expected |= {f"last_{name}": evals[-1][name] for name in names}
    written = json.loads((out / gradient.METADATA).read_text())["metrics"]
    assert {row["name"]: row["numberValue"] for row in written} == expected
    kept = {int(path.name) for path in (out / "checkpoints").iterdir()}
    assert {best["step"], 12} <= kept and len(kept) <= 2
    code, output = run(model_dir, STAGE_FROM=data if kind == "gs" else "")
    assert code == 0 and output.startswith("job: already finished") and output.count("\n") == 2
    assert output.endswith("; DELETE_INPUT=1 deletes all of it\n")


@pytest.mark.parametrize(
    ("flags", "env", "word"),
    [
        ([], {"TPU_MODEL_DIR": " "}, "TPU_MODEL_DIR is not set"),
        *(
            ([], {"TPU_MODEL_DIR": place}, place)
            for place in ("gs:///x", "gs:/b/x", "s3://b/x", "model", __file__)
        ),
        ([], {"STAGE_FROM": "records"}, "STAGE_FROM=records"),
        ([], {"KEEP_INPUT": "2"}, "KEEP_INPUT=2"),
        ([], {"DELETE_INPUT": "all"}, "DELETE_INPUT=all"),
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
    code = "import sys, scripts.gradient; print('jax' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_what_the_environment_asks_for():
    asked = parse_request(["--config=c.py"], {"TPU_MODEL_DIR": "gs://bucket/", "KEEP_INPUT": "0"})
    assert (str(asked.output), asked.flags) == ("gs://bucket/output_data", ["--config=c.py"])
    assert (asked.switches, asked.stage_from) == (set(), "")
    env = {"TPU_MODEL_DIR": "/m/", "STAGE_FROM": "/r", "EXPORT_MODEL": "1"}
    asked = parse_request(["--config.seed=1"], env)
    assert (str(asked.input), asked.stage_from) == ("/m/input_data", "/r")
    assert asked.switches == {"EXPORT_MODEL"}
    assert asked.flags == ["--config=configs/resnet50.py", "--config.seed=1"]


class Scripted(Children):
    """Runs nothing: answers with exit codes, in order."""

    def __init__(self, *codes):
        super().__init__()
        self.codes, self.commands = list(codes), []

    def run(self, command, env):
        self.commands.append(command[1:])
        return self.codes.pop(0)


@pytest.mark.parametrize(
    ("codes", "exports", "code", "words"),
    [
        *(([1], "", 1, "preparing ended with exit code 1"), ([3], "", 0, "")),
        ([0, 1], "", 1, "the doctor ended with exit code 1"),
        ([0, 0, 143], "", 143, "training ended with exit code 143"),
        ([0, 0, 0, 1], "1", 1, "exporting ended with exit code 1"),
        ([0, 0, 0, 137], "", 137, "finishing ended with exit code 137"),
        *(([0, 0, 0, 0], "", 0, ""), ([0, 0, 0, 0, 0], "1", 0, "")),
    ],
)
def test_the_order_of_the_steps_and_their_exit_codes(codes, exports, code, words, capfd):
    children, stages = Scripted(*codes), "gs://b" if exports else ""
    env = {"TPU_MODEL_DIR": "/m", "EXPORT_MODEL": exports, "STAGE_FROM": stages}
    request = parse_request(["--config=c.py"], env)
    assert gradient.run(request, children) == code
    error = capfd.readouterr().err
    assert words in error and error.count("\n") == bool(code)
    data = "staged" if stages else "input"
    ours = ["--workdir=/m/output_data", f"--config.data_dir=/m/{data}_data"]
    ours.append("--config.keep_checkpoints=1")
    this, flags = ["-m", "scripts.gradient"], ["--config=c.py"]
    export = ["--mode=export", "--format=savedmodel", "--overwrite"]
    assert (
        children.commands
        == [
            [*this, "begin", *flags],
            ["main.py", *flags, *ours, "--mode=doctor"],
            ["main.py", *flags, *ours, "--mode=train_and_eval"],
            *([["main.py", *export, ours[0]]] if exports else []),
            [*this, "finish", *flags],
        ][: len(codes)]
    )


def test_signals_go_to_the_child_and_stop_what_follows():
    """Also one that comes while no child is there."""
    children = Children()
    before = {s: signal.getsignal(s) for s in preemption.stop_signals()}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        children.listen()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert children.run(["bash", "-c", "exit 7"], os.environ) == 7
        child = f"trap 'exit 9' TERM; kill -USR1 {os.getpid()}; while :; do sleep 0.05; done"
        assert children.run(["bash", "-c", child], os.environ) == 9
        assert children.run(["touch", "/nowhere/x"], os.environ) == 143  # not started
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


# Before and after training.


FLAGS_8 = ["--config=configs/digits.py", "--config.train_steps=8"]
DATA = rules.entry("resnet").files
RECORDS = {"train-00000-of-00002": b"one", "train-00001-of-00002": b"", "validation-0": b"v"}
SCORES = {2: 0.2, 4: 0.9, 6: 0.9, 8: None}  # two equals, the earlier counts; the last is nan


def make_run(workdir):
    """Checkpoints 4 and 8, of one array each."""
    item = {"w": jnp.arange(4.0)}
    checkpoints = Checkpointer(f"{workdir}/checkpoints", keep=2, best=lambda: None)
    for step in (4, 8):
        checkpoints.save(step, item, item, {"target_metric": "accuracy"})
    checkpoints.close()


def metrics():
    rows = [{"split": "train", "step": 8, "loss": 1.0}]
    rows += [{"split": "eval", "step": k, "accuracy": v, "loss": 1.0} for k, v in SCORES.items()]
    return "".join(json.dumps(row) + "\n" for row in rows)


def job(model_dir, flags=FLAGS_8, **env):
    return parse_request(flags, {"TPU_MODEL_DIR": str(model_dir), **env})


def tree(path):
    """{relative path: bytes} of everything below a local folder."""
    paths = [p for p in Path(path).rglob("*") if p.is_file()]
    return {str(p.relative_to(path)): p.read_bytes() for p in paths}


@pytest.fixture
def trained(tmp_path):
    """A model folder on disk whose run has just ended, and neighbours of its input."""
    model_dir = tmp_path / "model"
    put(model_dir / "output_data/metrics.jsonl", metrics().encode())
    make_run(model_dir / "output_data")
    for neighbour in ("input_data2/a", "input_data_old/input_data/b", "input_data.txt", "other"):
        put(model_dir / neighbour, b"not ours")
    return model_dir


@pytest.fixture
def source(tmp_path):
    """A folder for STAGE_FROM."""
    for name, data in {**RECORDS, "train/train-7": b"7", "README": b"r"}.items():
        put(tmp_path / "source" / name, data)
    return str(tmp_path / "source")


def others(model_dir):
    ours = ("input_data/", "staged_data/", "output")
    return {k: v for k, v in tree(model_dir).items() if not k.startswith(ours)}


def copies(model_dir):
    """What the job has copied; its list names these files."""
    files = tree(model_dir / "staged_data")
    listed = json.loads(files.pop(gradient.COPIES, b"{}"))
    assert files.keys() <= listed.keys()
    return files


class Killed(BaseException):
    pass


def killed(*args, **kwargs):
    raise Killed


def test_a_users_own_input_stays(trained, source, capsys):
    """Whether it lies there alone, or beside files that the job copies."""
    own = {"train-00000-of-00002": b"ONE", "validation-0": b"V", "notes/mine": b"m"}
    folder = trained / "input_data"
    for name, data in own.items():
        put(folder / name, data)
    (folder / "empty").mkdir()
    before = others(trained)
    for env in ({}, {"STAGE_FROM": source}):
        (trained / "output_data" / gradient.RECORD).unlink(missing_ok=True)
        assert gradient.begin(job(trained, **env)) == 0
        assert copies(trained) == ({**RECORDS, "train/train-7": b"7"} if env else {})
        gradient.finish(job(trained, **env))
        assert tree(folder) == own and others(trained) == before
        assert (folder / "empty").is_dir() and not (trained / "staged_data").exists()
        line = capsys.readouterr().out.splitlines()[-1]
        assert line.startswith(f"job: {folder} keeps empty and 3 more") and "DELETE_INPUT=1" in line
    assert gradient.begin(job(trained, KEEP_INPUT="1", DELETE_INPUT="1")) == ALREADY_FINISHED
    assert tree(folder) == own and "because of KEEP_INPUT=1" in capsys.readouterr().out
    assert gradient.begin(job(trained, DELETE_INPUT="1")) == ALREADY_FINISHED
    assert "because of DELETE_INPUT=1" in capsys.readouterr().out
    assert not os.path.lexists(folder)
    assert others(trained) == before


def test_finishing_on_disk(trained, source, capsys):
    before = others(trained)
    assert gradient.begin(job(trained, STAGE_FROM=source)) == 0
    assert copies(trained) == {**RECORDS, "train/train-7": b"7"}
    gradient.finish(job(trained))
    assert "deleted 4 files that the job had copied" in capsys.readouterr().out
    assert not os.path.lexists(trained / "staged_data")
    assert others(trained) == before
    assert json.loads((trained / "output_data/gradient-model-metadata.json").read_text()) == {
        "metrics": [
            {"name": "accuracy", "numberValue": 0.9},
            {"name": "loss", "numberValue": 1.0},
            {"name": "step", "numberValue": 4},
            {"name": "last_loss", "numberValue": 1.0},  # its accuracy is nan
            {"name": "last_step", "numberValue": 8},
        ]
    }
    assert gradient.begin(job(trained, STAGE_FROM="/nowhere")) == ALREADY_FINISHED  # stages nothing
    output = capsys.readouterr().out
    assert "already finished" in output and output.count("\n") == 1


@pytest.mark.parametrize("moment", ["metadata", "clear_input", "unlink"])
def test_killed_while_finishing_the_same_command_completes(moment, trained, source, monkeypatch):
    before = others(trained)
    request = job(trained, STAGE_FROM=source)
    assert gradient.begin(request) == 0
    with monkeypatch.context() as patch:
        owner = gradient if hasattr(gradient, moment) else type(epath.Path("/"))
        patch.setattr(owner, moment, killed)
        with pytest.raises(Killed):
            gradient.finish(request)
    if moment == "metadata":  # main.py would say: already finished
        assert len(copies(trained)) == 4
        assert gradient.begin(request) == 0
        gradient.finish(request)
    else:
        assert gradient.begin(request) == ALREADY_FINISHED
    assert not os.path.lexists(trained / "staged_data")
    assert others(trained) == before
    assert (trained / "output_data" / gradient.METADATA).exists()


def test_killed_while_copying_the_same_command_goes_on(trained, source, monkeypatch):
    """With what is missing or cut short; a stranger's file in the folder of the copies stays."""
    request, folder = job(trained, STAGE_FROM=source), trained / "staged_data"
    copyfile = shutil.copyfile

    def dies(original, copy, *args, **kwargs):
        copyfile(original, copy, *args, **kwargs)
        if copies(trained).keys() >= {"validation-0"}:
            put(folder / "validation-0", b"")
            raise Killed
        return copy

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", dies)
        with pytest.raises((Killed, UserError)):
            gradient.begin(request)
    put(folder / "notes/mine", b"m")
    assert gradient.begin(request) == 0
    assert {k: v for k, v in tree(folder).items() if k != gradient.COPIES} == {
        **RECORDS,
        "train/train-7": b"7",
        "notes/mine": b"m",
    }
    gradient.finish(request)
    assert tree(folder) == {"notes/mine": b"m"}


def test_copies_of_another_folder_are_no_copies_of_this_one(trained, source, tmp_path):
    assert gradient.begin(job(trained, STAGE_FROM=source)) == 0
    for name in ("train-00000-of-00002", "train-1"):  # the first of the same size
        put(tmp_path / "other" / name, b"ONE")
    request = job(trained, STAGE_FROM=f"{tmp_path}/other")
    assert gradient.begin(request) == 0
    assert copies(trained) == {"train-00000-of-00002": b"ONE", "train-1": b"ONE"}


def test_the_copies_are_no_source_of_themselves(trained, source):
    folder = trained / "staged_data"
    assert gradient.begin(job(trained, STAGE_FROM=source)) == 0
    copies = tree(folder)
    with pytest.raises(UserError, match="is the job's own folder of copies: give another one"):
        gradient.begin(job(trained, STAGE_FROM=f"{folder}/"))
    assert tree(folder) == copies


def test_a_file_in_the_way_is_never_replaced(trained, source):
    """Unless the job has copied it itself."""
    folder, request = trained / "staged_data", job(trained, STAGE_FROM=source)
    put(folder / "validation-0", b"V")
    with pytest.raises(UserError, match="validation-0 is no copy of this job: move it away"):
        gradient.begin(request)
    assert tree(folder) == {"validation-0": b"V"}
    (folder / "validation-0").unlink()
    assert gradient.begin(request) == 0
    put(f"{source}/validation-0", b"longer")
    assert gradient.begin(request) == 0
    assert (folder / "validation-0").read_bytes() == b"longer"
    gradient.finish(request)
    assert not folder.exists()


@pytest.mark.parametrize("record", ["[]", "5", '"x"', "{}", "x", ""])
def test_a_damaged_record_is_none(record, trained, source):
    put(trained / "output_data" / gradient.RECORD, record.encode())
    assert gradient.begin(job(trained, STAGE_FROM=source)) == 0
    put(trained / "staged_data" / gradient.COPIES, record.encode())
    gradient.finish(job(trained))
    assert len(tree(trained / "staged_data")) == 5


def test_nothing_outside_of_the_copies_is_deleted(trained):
    other = trained / "other"
    for name in ("../other", "x/../../other", str(other)):
        put(trained / "staged_data" / gradient.COPIES, json.dumps({name: None}).encode())
        gradient.finish(job(trained))
        assert other.exists(), name


def test_links_are_not_followed(trained, tmp_path, capsys):
    elsewhere, folder = tmp_path / "elsewhere", trained / "input_data"
    put(elsewhere / "precious", b"precious")
    folder.mkdir()
    (folder / "folder").symlink_to(elsewhere)
    (folder / "file").symlink_to(elsewhere / "precious")
    gradient.finish(job(trained, DELETE_INPUT="1"))
    assert not os.path.lexists(folder)
    folder.symlink_to(elsewhere)
    for delete, end in (("0", "\n"), ("1", r" and cannot delete: .*symbolic link.*\n")):
        gradient.finish(job(trained, DELETE_INPUT=delete))
        line = f"keeps precious, which the job did not copy{end}$"
        assert re.search(line, capsys.readouterr().out)
    assert folder.is_symlink() and tree(elsewhere) == {"precious": b"precious"}


@pytest.mark.long
def test_finishing_on_gs_deletes_these_objects_and_no_other(gcs):
    model_dir, data = f"{gcs.bucket()}/job", f"{gcs.bucket('read')}/data"
    gcs.write(f"{model_dir}/output_data/metrics.jsonl", metrics().encode())
    make_run(f"{model_dir}/output_data")
    neighbours = ["input_data", "input_data2/a", "input_data_old/input_data/b", "up"]
    for name in neighbours:
        gcs.write(f"{model_dir}/{name}", b"not ours")
    own = {
        "input_data/ ",
        "input_data/x y#?%2F%",
        "input_data/\u00e9.*",
        "input_data/input_data/nested",
    }
    for name in {"input_data/", *own}:  # the first marks a folder
        gcs.write(f"{model_dir}/{name}", b"data")
    for name in ("train-0", "validation-0"):
        gcs.write(f"{data}/{name}", b"data")
    request = job(model_dir, STAGE_FROM=data)
    assert gradient.begin(request) == 0
    assert "staged_data/train-0" in gcs.names(model_dir)
    gcs.fault("DELETE .*/staged_data/train-0", status=403)
    with pytest.raises(tf.errors.PermissionDeniedError, match="because a test wants it"):
        gradient.finish(request)

    def left():
        return {n for n in gcs.names(model_dir) if not n.startswith("output_data/")}

    assert gradient.begin(request) == ALREADY_FINISHED
    assert left() == {*neighbours, *own, "input_data/"}
    assert gradient.begin(job(model_dir, DELETE_INPUT="1")) == ALREADY_FINISHED
    assert left() == {*neighbours}
    assert json.loads(gcs.read(f"{model_dir}/output_data/{gradient.METADATA}"))


@pytest.mark.parametrize("kinds", ["disk disk", "disk gs", "gs disk", "gs gs"])
def test_staging_copies_what_is_missing(kinds, gcs, tmp_path):
    source, model_dir = (
        epath.Path(f"{gcs.bucket()}/{name}" if kind == "gs" else tmp_path / name)
        for kind, name in zip(kinds.split(), ("source", "model"), strict=True)
    )
    expected = {**RECORDS, "manifest.json": b"{}", "train/train-1": b"1"}
    for name, data in {**expected, "prepare_state/x": b"x", "README": b"r"}.items():
        put(source / name, data)
    request = job(model_dir, STAGE_FROM=str(source))
    target = request.staged
    gradient.stage(request, DATA)
    names = files(target) - {gradient.COPIES}
    assert {name: (target / name).read_bytes() for name in names} == expected
    put(target / "validation-0", b"w")  # the same size
    (target / "train/train-1").unlink()
    gradient.stage(request, DATA)
    assert files(target) == {*expected, gradient.COPIES}
    assert (target / "validation-0").read_bytes() == b"w"


def test_the_benchmark_of_the_recipe_chooses_what_is_staged(tmp_path):
    """NCF reads ratings; records beside them stay where they are."""
    for name in ("ratings.csv", "ml-20m/ratings.csv", "other/ratings.csv", "train-0"):
        put(tmp_path / "data" / name, b"data")
    for config, expected in (
        (["--config=configs/ncf.py"], {"ratings.csv", "ml-20m/ratings.csv"}),
        (["--seed=1", "-config", "configs/ncf.py"], {"ratings.csv", "ml-20m/ratings.csv"}),
        (["--config=configs/mlperf_resnet50.py:1632"], {"train-0"}),
    ):
        request = job(tmp_path / config[-1], config, STAGE_FROM=str(tmp_path / "data"))
        assert gradient.begin(request) == 0
        assert files(request.staged) == {*expected, gradient.COPIES}
    with pytest.raises(UserError, match="--config=configs/nothing.py: there is no"):
        gradient.begin(job(tmp_path, ["--config=configs/nothing.py"], STAGE_FROM="/nowhere"))


def test_staging_refuses(trained, source, monkeypatch):
    (Path(source) / "empty").mkdir()
    with pytest.raises(UserError, match="holds no files train-"):
        gradient.begin(job(trained, STAGE_FROM=f"{source}/empty"))

    def full(source, target):
        raise OSError("No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(UserError, match="cannot stage .*source/.*: No space left"):
        gradient.begin(job(trained, STAGE_FROM=source))
    assert copies(trained) == {}
