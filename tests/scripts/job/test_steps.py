"""What a job does before and after training: staging, finishing, and deleting its input only."""

import json
import os
import shutil
import types

import jax.numpy as jnp
import pytest

from benchmarks import mlperf as rules
from common.errors import UserError
from engine.checkpoint import Checkpointer
from scripts.job import folder as job_folder
from scripts.job import staging
from scripts.job import steps as job_steps
from scripts.job.folder import BucketFolder, Item, LocalFolder, open_folder
from scripts.job.run import ALREADY_FINISHED
from scripts.job.steps import Job

pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
FLAGS = ["--config=configs/digits.py", "--config.train_steps=8"]
DATA = rules.entry("resnet").files
RECORDS = {"train-00000-of-00002": b"one", "train-00001-of-00002": b"two", "validation-0": b"v"}

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


def put(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def tree(path):
    """{relative path: bytes} of everything below a local folder."""
    contents = {}
    for folder, _, files in os.walk(path):
        for name in files:
            with open(os.path.join(folder, name), "rb") as file:
                contents[os.path.relpath(os.path.join(folder, name), path)] = file.read()
    return contents


@pytest.fixture
def trained(tmp_path):
    """A model folder on disk whose run has just ended, and neighbours of its input."""
    model_dir = str(tmp_path / "model")
    put(f"{model_dir}/output_data/metrics.jsonl", metrics().encode())
    make_run(f"{model_dir}/output_data")
    for name, data in RECORDS.items():
        put(f"{model_dir}/input_data/{name}", data)
    put(f"{model_dir}/input_data/deeper/still/x", b"x")
    os.makedirs(f"{model_dir}/input_data/empty")
    for neighbour in ("input_data2/a", "input_data_old/input_data/b", "input_data.txt", "other"):
        put(f"{model_dir}/{neighbour}", b"not ours")
    assert Job(model_dir, FLAGS, False).begin("") == 0
    return model_dir


def others(model_dir):
    return {k: v for k, v in tree(model_dir).items() if not k.startswith(("input_data/", "output"))}


def test_finishing_on_disk(trained, capsys):
    before = others(trained)
    job = Job(trained, FLAGS, False)
    job.finish()
    assert "deleted the staged input" in (output := capsys.readouterr().out)
    assert "4 files, 0.0 MB" in output
    assert not os.path.lexists(f"{trained}/input_data")
    assert others(trained) == before
    with open(f"{trained}/output_data/gradient-model-metadata.json") as file:
        assert json.load(file) == {
            "metrics": [
                {"name": "accuracy", "numberValue": 0.9},
                {"name": "loss", "numberValue": 1.0},
                {"name": "step", "numberValue": 4},
                {"name": "last_loss", "numberValue": 1.0},  # its accuracy is nan
                {"name": "last_step", "numberValue": 8},
            ]
        }
    assert job.begin("/nowhere") == ALREADY_FINISHED  # stages nothing again
    assert "already finished" in capsys.readouterr().out
    assert not os.path.lexists(f"{trained}/input_data")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", ["metadata", "record", "first", "second", "folders"])
def test_killed_while_finishing_the_same_command_completes(moment, trained, monkeypatch):
    def killed(*args, **kwargs):
        raise Killed

    unlink, delete, calls = os.unlink, LocalFolder.delete, []

    def unlinks(path):
        calls.append(path)
        if len(calls) > (moment == "second"):
            raise Killed
        unlink(path)

    def deletes(self, items):
        patch.setattr(os, *(("rmdir", killed) if moment == "folders" else ("unlink", unlinks)))
        return delete(self, items)

    before = others(trained)
    with monkeypatch.context() as patch:
        if moment == "metadata":
            patch.setattr(job_steps, "metadata", killed)
        elif moment == "record":
            write = LocalFolder.write
            patch.setattr(
                LocalFolder,
                "write",
                lambda self, name, x: (
                    killed() if name == job_steps.RECORD else write(self, name, x)
                ),
            )
        else:
            patch.setattr(LocalFolder, "delete", deletes)
        with pytest.raises(Killed):
            Job(trained, FLAGS, False).finish()
    job = Job(trained, FLAGS, False)
    if moment in ("metadata", "record"):  # main.py would say: already finished
        assert len(tree(f"{trained}/input_data")) == 4
        assert job.begin("") == 0
        job.finish()
    else:
        assert job.begin("") == ALREADY_FINISHED
    assert not os.path.lexists(f"{trained}/input_data")
    assert others(trained) == before
    assert os.path.exists(f"{trained}/output_data/{job_steps.METADATA}")


def test_input_that_came_after_the_job_began_is_never_deleted(trained, capsys):
    put(f"{trained}/input_data/notes", b"mine")
    Job(trained, FLAGS, False).finish()
    assert "such as 'notes', came after the job began" in capsys.readouterr().out
    assert len(tree(f"{trained}/input_data")) == 5
    os.remove(f"{trained}/input_data/notes")
    Job(trained, FLAGS, True).finish()
    assert "KEEP_INPUT=1" in capsys.readouterr().out
    put(f"{trained}/input_data/train-00000-of-00002", b"new")
    assert Job(trained, FLAGS, False).begin("") == ALREADY_FINISHED
    assert "such as 'train-00000-of-00002', came after" in capsys.readouterr().out
    assert len(tree(f"{trained}/input_data")) == 4
    assert Job(trained, [*FLAGS, "--config.seed=1"], False).begin("") == 0
    assert "other flags: --config=configs/digits.py" in capsys.readouterr().out


def test_links_and_mounts_are_not_followed(trained, tmp_path, monkeypatch, capsys):
    put(str(tmp_path / "elsewhere" / "precious"), b"precious")
    os.symlink(tmp_path / "elsewhere", f"{trained}/input_data/folder")
    os.symlink(tmp_path / "elsewhere" / "precious", f"{trained}/input_data/file")
    assert Job(trained, FLAGS, False).begin("") == 0
    folder = LocalFolder(f"{trained}/input_data")
    table = tmp_path / "mountinfo"
    point = f"{os.path.realpath(trained)}/input_data/a\\040b"
    table.write_text(f"1 2 0:3 / / rw - ext4 x rw\n4 1 0:5 / {point} rw - ext4 x rw\n")
    mounts = job_folder._mounts
    monkeypatch.setattr(job_folder, "_mounts", lambda: mounts(str(table)))
    assert "/input_data/a b is a mounted" in folder.why_foreign()
    job = Job(trained, FLAGS, False)
    job.finish()
    assert "is not deleted: " in capsys.readouterr().out
    assert len(folder.files()) == 6
    monkeypatch.undo()
    assert job.begin("") == ALREADY_FINISHED
    assert not os.path.lexists(f"{trained}/input_data")
    assert tree(tmp_path / "elsewhere") == {"precious": b"precious"}
    os.symlink(tmp_path / "elsewhere", f"{trained}/input_data")
    job.finish()
    assert "is a symbolic link" in capsys.readouterr().out
    assert os.path.islink(f"{trained}/input_data")
    assert tree(tmp_path / "elsewhere") == {"precious": b"precious"}
    with pytest.raises(UserError, match="symbolic link"):
        job.begin(str(tmp_path / "elsewhere2"))  # different flags would stage through the link
        staging.stage(open_folder(str(tmp_path / "elsewhere2")), job.input, DATA)


ODD = ["", "a//b", " ", "x y#?%2F%", "../up", "/abs", "é\n.*", "input_data/nested", "train-0"]


def bucket_folder(path):
    folder = open_folder(path)
    assert isinstance(folder, BucketFolder)
    return folder


@pytest.mark.long
def test_finishing_on_gs_deletes_these_objects_and_no_other(gcs):
    model_dir = f"{gcs.bucket()}/job"
    gcs.write(f"{model_dir}/output_data/metrics.jsonl", metrics().encode())
    make_run(f"{model_dir}/output_data")
    neighbours = [
        "input_data",
        "input_data2/a",
        "input_data_old/input_data/b",
        "up",
        "../input_data/x",
    ]
    for name in neighbours:
        gcs.write(f"{model_dir}/{name}", b"not ours")
    folder = bucket_folder(f"{model_dir}/input_data")
    for name in ODD:
        folder.blob(name).upload_from_string(b"data")
    assert set(folder.files()) == set(ODD)
    job = Job(model_dir, FLAGS, False)
    assert job.begin("") == 0
    gcs.fault("DELETE .*/input_data/train-0", status=403)
    with pytest.raises(
        UserError, match="cannot delete in gs://.*/input_data: .*because a test wants it"
    ):
        job.finish()
    assert Job(model_dir, FLAGS, False).begin("") == ALREADY_FINISHED
    left = [n for n in gcs.names(model_dir) if not n.startswith("output_data/")]
    assert sorted(left) == sorted(neighbours)
    assert json.loads(gcs.read(f"{model_dir}/output_data/{job_steps.METADATA}"))


def test_an_object_that_changed_is_left(gcs):
    folder = bucket_folder(f"{gcs.bucket('objects')}/input_data")
    for name in ("a", "b"):
        folder.blob(name).upload_from_string(b"data")
    listed = folder.files()
    folder.blob("a").upload_from_string(b"newer")
    assert folder.delete({**listed, "gone": Item(1, "1")}) == ["a"]
    assert list(folder.files()) == ["a"]


@pytest.fixture(params=["disk to disk", "disk to gs", "gs to disk", "gs to gs"])
def ways(request, tmp_path):
    """(source, target) folders; the source holds records and what is none."""
    kinds = request.param.split(" to ")
    bucket = request.getfixturevalue("gcs").bucket() if "gs" in kinds else ""
    paths = [
        f"{bucket}/{name}" if kind == "gs" else str(tmp_path / name)
        for kind, name in zip(kinds, ("source", "target"), strict=True)
    ]
    source, target = map(open_folder, paths)
    more = {"manifest.json": b"{}", "train/train-1": b"1", "prepare_state/x": b"x", "README": b"r"}
    for name, data in {**RECORDS, **more}.items():
        if isinstance(source, LocalFolder):
            put(f"{source.path}/{name}", data)
        else:
            source.blob(name).upload_from_string(data)
    return source, target


def test_staging_goes_on_where_it_was(ways, capsys):
    source, target = ways
    expected = {*RECORDS, "manifest.json", "train/train-1"}
    staging.stage(source, target, DATA)
    first = target.files()
    assert {k: v.size for k, v in first.items()} == {
        k: v.size for k, v in source.files().items() if k in expected
    }
    assert "staging 5 of 5 files" in (output := capsys.readouterr().out)
    assert "2 other files" in output
    target.delete({"train/train-1": first["train/train-1"]})
    staging.stage(source, target, DATA)
    assert "staging 1 of 5 files" in capsys.readouterr().out
    second = target.files()
    assert second.keys() == first.keys()
    assert {k for k in first if first[k] != second[k]} == {"train/train-1"}


def test_the_benchmark_of_the_recipe_chooses_what_is_staged(tmp_path):
    """NCF reads ratings; records beside them stay where they are."""
    for name in ("ratings.csv", "ml-20m/ratings.csv", "other/ratings.csv", "train-0"):
        put(str(tmp_path / "data" / name), b"data")
    for config in (["--config=configs/ncf.py"], ["-config", "configs/ncf.py"]):
        job = Job(str(tmp_path / config[0]), [*config, "--config.seed=1"], False)
        assert job.begin(str(tmp_path / "data")) == 0
        assert set(job.input.files()) == {"ratings.csv", "ml-20m/ratings.csv"}
    job = Job(str(tmp_path / "resnet"), ["--config=configs/mlperf_resnet50.py:1632"], False)
    assert job.begin(str(tmp_path / "data")) == 0
    assert set(job.input.files()) == {"train-0"}
    with pytest.raises(UserError, match="--config=configs/nothing.py is no recipe"):
        Job(str(tmp_path / "none"), ["--config=configs/nothing.py"], False).begin("/nowhere")


def test_staging_refuses(tmp_path, monkeypatch):
    target = LocalFolder(str(tmp_path / "input_data"))
    put(str(tmp_path / "input_data" / "in" / "train-0"), b"")
    put(str(tmp_path / "input_data2" / "validation-0"), b"")
    for source in ("input_data", "input_data/in"):
        with pytest.raises(UserError, match="is the input folder itself, or a folder in it"):
            staging.stage(LocalFolder(str(tmp_path / source)), target, DATA)
    with pytest.raises(UserError, match="holds no files train-"):
        staging.stage(LocalFolder(str(tmp_path / "input_data2")), target, DATA)
    put(str(tmp_path / "input_data2" / "train-0"), b"data")

    def full(source, target):
        raise OSError("No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(UserError, match="cannot stage .*input_data2/.*: No space left"):
        staging.stage(LocalFolder(str(tmp_path / "input_data2")), target, DATA)
    assert set(target.files()) == {"in/train-0"}


def test_the_command_line(tmp_path, monkeypatch, capsys):
    calls = []

    class Fake:
        def __init__(self, *arguments):
            calls.append(arguments)

        def begin(self, stage_from):
            calls.append(stage_from)
            return 7

        def finish(self):
            if calls[-1][0] == "fails":
                raise UserError("one line")
            if calls[-1][0] == "breaks":
                raise ZeroDivisionError

    monkeypatch.setattr(job_steps, "Job", Fake)
    monkeypatch.setattr(job_steps, "_quiet", lambda: None)
    assert job_steps.main(["begin", "dir", "--stage_from=data", "--", "--x", "--", "y"]) == 7
    assert job_steps.main(["finish", "dir", "--keep_input"]) == 0
    assert calls == [("dir", ["--x", "--", "y"], False), "data", ("dir", [], True)]
    monkeypatch.setattr(job_steps.sys, "argv", ["steps.py", "begin", "other", "--", "z"])
    assert job_steps.main() == 7 and calls[-2:] == [("other", ["z"], False), ""]
    assert job_steps.main(["finish", "fails"]) == 1
    assert capsys.readouterr().err == "ERROR: one line\n"
    with pytest.raises(ZeroDivisionError):
        job_steps.main(["finish", "breaks"])


def test_the_recipe_is_the_value_of_the_flag(tmp_path):
    recipe = tmp_path / "a=b.py"
    recipe.write_text(
        "import types\ndef get_config(x='ncf'):\n    return types.SimpleNamespace(benchmark=x)\n"
    )
    assert job_steps._benchmark([f"--config={recipe}"]) == "ncf"
    plain = recipe.rename(tmp_path / "c.py")
    assert job_steps._benchmark(["--seed=1", "--config", f"{plain}:ssd", "--x"]) == "ssd"


def test_what_is_said_of_an_input_that_is_deleted_or_not(tmp_path, capsys):
    """2.5 TB, of which one file changes meanwhile."""
    items, changed = {"b": Item(2 * 10**12, "1"), "a": Item(5 * 10**11, "1")}, []
    job = Job(str(tmp_path), FLAGS, False)
    job.input = types.SimpleNamespace(  # type: ignore[assignment]
        path="data", why_foreign=str, files=lambda: items, delete=lambda given: changed
    )
    job._clear_input(items)
    expected = "job: deleted the staged input data: 2 files, 2,500,000.0 MB\n"
    assert capsys.readouterr().out == expected
    changed[:] = ["b"]
    with pytest.raises(UserError, match="^data: 'b' has changed meanwhile and is not deleted$"):
        job._clear_input(items)
    job._clear_input({})
    assert "data is not deleted: 2 files there, such as 'a', came" in capsys.readouterr().out
