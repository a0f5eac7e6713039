"""run_and_time.sh: what it is asked for, what it starts, collects and refuses."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import mlperf as rules
from benchmarks.resnet import mlperf as resnet_mlperf
from common.errors import UserError
from scripts.gradient import Children
from scripts.mlperf import check as mlperf_check
from scripts.mlperf import results as mlperf_logs
from scripts.mlperf import results as mlperf_results
from scripts.mlperf import run as mlperf_run
from tests.helpers.mlperf_fixture import (
    QUICK,
    SCORES,
    TINY_SGD,
    Clock,
    mlperf_config,
    requested,
    write_records,
    write_run,
)
from tests.test_main import environment
from tests.torture import xla_flags

ROOT = Path(__file__).parents[3]


# --- Starting.


DATA = "MLP_PATH_GCS_IMAGENET"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_records(str(tmp_path_factory.mktemp("colours")))


@pytest.fixture
def env(data, tmp_path):
    return {"MLP_GCS_MODEL_DIR": str(tmp_path / "runs"), "MLP_PATH_GCS_IMAGENET": data}


def parse(words: Sequence[str], env: Mapping[str, str]) -> mlperf_run.Request:
    """The only request."""
    (request,) = mlperf_run.parse_requests(words, env)
    return request


def test_what_the_command_line_and_the_environment_say(env):
    request = parse(["--config.target=0.8", "--runs=3", "--seed=7"], env)
    assert request.flags == ["--config=configs/mlperf_resnet50.py:1632", "--config.target=0.8"]
    seeds = request.seeds()
    assert len(set(seeds)) == 3
    assert seeds == parse(["--runs=9", "--seed=7"], env).seeds()[:3]
    words = request.command_line(1)
    assert f"--workdir={env['MLP_GCS_MODEL_DIR']}/run_1" in words and words[-1] == request.flags[-1]


def test_each_benchmark_has_its_data_recipe_and_log(tmp_path):
    env = {"MLP_GCS_MODEL_DIR": str(tmp_path / "runs"), "MLP_PATH_GCS_NCF": str(tmp_path)}
    request = parse(["--benchmark=ncf"], env)
    assert (request.entry.name, request.runs, request.data_dir) == ("ncf", 100, str(tmp_path))
    words = request.command_line(0)
    assert {"--config=configs/ncf.py", "--config.mlperf.format=v0.5"} <= set(words)
    assert "--config.num_ratings=20000263" in words
    for entry in rules.entries().values():
        assert (ROOT / entry.recipe.partition(":")[0]).exists()


def test_a_checkpoint_to_start_from_comes_from_the_environment(env, monkeypatch):
    entry = rules.entry("resnet")
    variable = {"init_variable": "MLP_GCS_RESNET_CHECKPOINT", "init_default": "gs://b/public"}
    monkeypatch.setattr(resnet_mlperf, "ENTRY", dataclasses.replace(entry, **variable))
    assert parse([], env).init_from == "gs://b/public"
    request = parse([], env | {"MLP_GCS_RESNET_CHECKPOINT": "gs://b/resnet34/"})
    assert "--config.init_from=gs://b/resnet34" in request.command_line(0)
    request = mlperf_run.complete_request(request)
    assert mlperf_run.complete_request(request) == request
    write_run(mlperf_config(), f"{request.model_dir}/run_0", [0.1], Clock())
    with pytest.raises(UserError, match="init_from gs://b/resnet34 before, /other now"):
        mlperf_run.complete_request(dataclasses.replace(request, init_from="/other"))


@pytest.mark.parametrize(
    ("changed", "words", "says"),
    [
        ({"MLP_GCS_MODEL_DIR": ""}, [], "MLP_GCS_MODEL_DIR is not set"),
        ({"MLP_GCS_MODEL_DIR": "runs"}, [], "MLP_GCS_MODEL_DIR=runs: give gs://"),
        ({DATA: ""}, ["--benchmark=resnet"], f"{DATA} is not set"),
        ({}, ["ssd", "resnet50"], "'resnet50' is not a benchmark: give some of gnmt, "),
        ({}, ["--config.targte=1"], "no key 'targte'; did you mean target?"),
        ({}, ["--config=configs/none.py"], "configs/none.py: there is no such file"),
        ({}, ["--workdir=x"], "--workdir cannot be given here"),
        ({}, ["--config.seed=1"], "--config.seed cannot be given here"),
        ({}, ["--coordinator=a:1", "--num_processes=2", "--process_id=1"], "2 hosts needs --seed"),
        ({}, ["--coordinator=a:1"], "--process_id missing"),
        ({"MLP_GCS_MODEL_DIR": "/dev/null/runs"}, [], "MLP_GCS_MODEL_DIR=/dev/null/runs"),
    ],
)
def test_what_is_wrong_is_named(changed, words, says, env):
    with pytest.raises(UserError) as caught:
        mlperf_run.parse_requests(words, {**env, **changed})
    assert says in str(caught.value) and "\n" not in str(caught.value)


VARIABLES = {name: entry.variable for name, entry in rules.entries().items()}


@pytest.mark.parametrize("name", VARIABLES)
def test_the_only_data_variable_chooses_the_benchmark(name, tmp_path):
    env = {"MLP_GCS_MODEL_DIR": str(tmp_path), "MLP_GCS_RESNET_CHECKPOINT": "/weights"}
    env |= dict.fromkeys(VARIABLES.values(), "") | {VARIABLES[name]: "/d"}
    request = parse([], env)
    assert (request.benchmark, request.data_dir) == (name, "/d")
    assert request.model_dir == str(tmp_path)


def test_which_benchmark_is_asked_where_no_variable_says(tmp_path):
    with pytest.raises(UserError) as caught:
        mlperf_run.parse_requests([], {"MLP_GCS_MODEL_DIR": str(tmp_path)})
    assert str(caught.value).startswith("which benchmark? no variable")
    assert all(f"{VARIABLES[name]} for {name}" in str(caught.value) for name in VARIABLES)


SIX = ("gnmt", "mask_rcnn", "ncf", "resnet", "ssd", "transformer")


@pytest.fixture
def six(tmp_path):
    """The variables of the published command, all of which are set, and of its other settings."""
    env = {VARIABLES[name]: f"/data/{name}/" for name in SIX}
    env |= {"MLP_GCS_MODEL_DIR": f"{tmp_path}/runs/", "MLP_GCS_RESNET_CHECKPOINT": "/resnet34"}
    return env | {"MLP_GCP_HOST": "vm", "MLP_GCP_ZONE": "us-central1-b", "MLP_TPU_NAME": "tpu"}


def test_all_benchmarks_with_data_have_a_folder_and_a_checkpoint_each(six):
    requests = mlperf_run.parse_requests(["--runs=2", "--seed=7"], six)
    root = six["MLP_GCS_MODEL_DIR"]
    facts = [(r.benchmark, r.model_dir, r.runs, r.seed) for r in requests]
    assert facts == [(name, f"{root}{name}", 2, 7) for name in SIX]
    begins = {r.benchmark: r.init_from for r in requests if r.init_from}
    published = rules.entry("mask_rcnn").init_default
    assert begins == {"ssd": "/resnet34", "mask_rcnn": published}
    assert published.startswith("gs://cloud-tpu-artifacts/resnet/")
    assert parse(["mask_rcnn"], six).init_from == "/resnet34"
    six["MLP_GCS_RESNET_CHECKPOINT"] = rules.entry("ssd").init_default
    assert parse(["mask_rcnn"], six).init_from == published
    del six["MLP_GCS_RESNET_CHECKPOINT"]
    assert parse(["ssd"], six).init_from.endswith("/v0.5.0/resnet34_ssd_checkpoint")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["ssd"], ["ssd"]),
        (["--benchmark=ssd", "--benchmark=gnmt", "--config.target", "0.5"], ["ssd", "gnmt"]),
        (["--runs=3", "ssd", "--config.target", "0.5", "gnmt", "ssd"], ["ssd", "gnmt"]),
    ],
)
def test_names_choose_benchmarks(words, names, six):
    requests = mlperf_run.parse_requests(words, six)
    assert [request.benchmark for request in requests] == names
    root = six["MLP_GCS_MODEL_DIR"].rstrip("/")
    assert requests[0].model_dir == (root if len(names) == 1 else f"{root}/ssd")
    flags = ["--config.target", "0.5"] if len(names) > 1 else []
    assert all(request.flags[1:] == flags for request in requests)


def test_one_of_several_goes_on_in_its_own_folder(six):
    (request, _) = mlperf_run.parse_requests(["ssd", "ncf"], six)
    mlperf_run.complete_request(request)
    assert parse(["ssd"], six).model_dir == request.model_dir


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--config=configs/ssd.py", "--config=configs/ssd.py is for one benchmark, not for ssd, "),
        ("--config.nms_iou=0.4", "gnmt: configs/mlperf_gnmt.py has no key 'nms_iou'"),
    ],
)
def test_what_only_one_benchmark_knows_is_refused_before_any_begins(flag, says, six):
    with pytest.raises(UserError) as caught:
        mlperf_run.parse_requests(["ssd", "gnmt", flag], six)
    assert says in str(caught.value)
    parse(["ssd", flag], six)


def test_of_several_hosts_only_the_first_collects(env):
    for index in (0, 1):
        place = ["--coordinator=a:1", "--num_processes=2", f"--process_id={index}"]
        assert parse(["--seed=1", *place], env).is_first is (index == 0)


# --- The folder remembers what it was begun with.


def test_a_folder_keeps_its_seed(tmp_path):
    first = mlperf_run.complete_request(requested(tmp_path, seed=None))
    again = mlperf_run.complete_request(requested(tmp_path, seed=None, runs=9))
    assert again == dataclasses.replace(first, runs=9)
    other = mlperf_run.complete_request(requested(tmp_path / "other", seed=None))
    assert other.seed != first.seed
    assert mlperf_run.complete_request(requested(tmp_path, seed=first.seed)) == first


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data_dir": "/other"}, "(data /data before, /other now)"),
        ({"benchmark": "ncf"}, "(benchmark resnet before, ncf now)"),
        ({"seed": 8}, "(seed 7 before, 8 now)"),
        ({"flags": ["--config=b.py", "--config.b=1"]}, "(config a.py before, b.py now)"),
        ({"flags": ["--config=a.py"]}, "(flags ['--config.b=1'] before, [] now)"),
    ],
)
def test_another_request_needs_another_folder(changes, says, tmp_path):
    mlperf_run.complete_request(requested(tmp_path))
    with pytest.raises(UserError) as caught:
        mlperf_run.complete_request(requested(tmp_path, **changes))
    output = str(caught.value)
    assert output.startswith(f"MLP_GCS_MODEL_DIR={tmp_path} holds runs of another kind (")
    assert says in output and "\n" not in output


def test_every_host_has_the_same_request(tmp_path):
    """But for its index, and flags may come in any order; only the first host writes it."""
    flags = ["--config=a.py", "--config.b=1"]
    other = ["--config=a.py", "--process_id=1", "--config.b=1"]
    mlperf_run.complete_request(requested(tmp_path, is_first=False, flags=other))
    assert not (tmp_path / mlperf_results.REQUEST_FILE).exists()
    mlperf_run.complete_request(requested(tmp_path, flags=[*flags, "--process_id=0"]))
    mlperf_run.complete_request(requested(tmp_path, is_first=False, flags=other))


def test_a_folder_of_unknown_or_damaged_origin_is_refused(tmp_path):
    (tmp_path / "run_0").mkdir()
    (tmp_path / "run_0" / "mlperf.log").touch()
    with pytest.raises(UserError, match="holds runs, but no request.json"):
        mlperf_run.complete_request(requested(tmp_path))
    (tmp_path / mlperf_results.REQUEST_FILE).write_text("{")
    with pytest.raises(UserError, match="request.json: .*; or give a new MLP_GCS"):
        mlperf_run.complete_request(requested(tmp_path))


# --- Nothing that has run is lost.


class FakeRuns(Children):
    """Stands for the processes: each writes the log of a run that nobody trained."""

    def __init__(self, scores: list[float], codes: list[int] | None = None):
        super().__init__()
        self.scores, self.codes, self.commands = scores, codes or [], []
        self.ill = ""  # the benchmark with which the doctor finds faults

    def run(self, command: Sequence[str], env: Mapping[str, str]) -> int:
        (workdir,) = [w.partition("=")[2] for w in command if w.startswith("--workdir=")]
        if "--mode=doctor" in command:  # it refuses a folder with a run, as main.py does
            is_ill = bool(self.ill) and workdir.endswith(f"/{self.ill}/run_0")
            return int(is_ill or Path(workdir, "mlperf.log").exists())
        self.commands.append(command)
        if self.scores:
            write_run(mlperf_config(seed=len(self.commands)), workdir, self.scores, Clock())
        return self.codes.pop(0) if self.codes else 0


def launch(root: Any, fake: FakeRuns, runs: int = 1, **changes: Any) -> int:
    return mlperf_run.run(requested(root, runs=runs, **changes), fake)


def full(*_: Any) -> Any:
    raise OSError("no space left")


def results(root: Path) -> list[Path]:
    return sorted(root.glob("results/*/resnet/*"))


def test_a_run_that_ended_is_collected_at_the_next_start(tmp_path, monkeypatch, capsys):
    """The launcher dies, or a file system does, between the end of a run and its result."""

    with monkeypatch.context() as patch:
        patch.setattr(mlperf_results, "describe", full)
        with pytest.raises(UserError) as caught:
            launch(tmp_path, FakeRuns(SCORES))
    assert str(caught.value).startswith(f"{tmp_path / 'run_0'}: no space left; remove the cause")
    assert "\n" not in str(caught.value) and not results(tmp_path)
    output = capsys.readouterr().out
    assert "RESULT" not in output

    fake = FakeRuns(SCORES)
    assert launch(tmp_path, fake, runs=2) == 0 and len(fake.commands) == 1  # the second one
    first, second = results(tmp_path)
    lines = first.read_text().splitlines()
    assert lines[0] in output.splitlines() and lines[-1].startswith("RESULT,resnet,0,")
    assert mlperf_logs.load(first).success
    (description,) = (tmp_path / "systems").glob("*.json")
    assert second.name == "result_1.txt"
    for path in (description, tmp_path / "summary.json"):
        assert path.read_text().startswith('{\n  "') and path.read_text().endswith("}\n")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["runs"]) == ["result_0.txt", "result_1.txt"]
    again = FakeRuns([])
    assert launch(tmp_path, again, runs=2) == 0 and again.commands == []


def test_the_system_is_described_with_what_is_known():
    values = {"submission_status": "cloud", "accelerators_per_node": 4}
    known = mlperf_results.describe("x", values | {"accelerator_memory_bytes": 16 * 2**30})
    assert len(known) == 33 and all(type(value) is str for value in known.values())
    assert (known["status"], known["accelerators_per_node"]) == ("Available cloud", "4")
    assert (known["accelerator_memory_capacity"], known["cooling"]) == ("16 GiB", "unknown")


def test_a_run_that_missed_the_target_is_collected_and_one_cut_short_is_not(tmp_path, capsys):
    for scores, count in (([0.1] * 12, 1), (SCORES[:3], 0)):
        root = tmp_path / str(count)
        write_run(mlperf_config(), str(root / "run_0"), scores, Clock())
        fake = FakeRuns([], [1])
        assert launch(root, fake) == (0 if count else 1)
        assert len(results(root)) == count and len(fake.commands) == 1 - count
    assert f"delete {tmp_path / '0' / 'run_0'}, and the same command" in capsys.readouterr().out


def test_what_to_do_about_a_failure_depends_on_what_there_is(tmp_path, capsys):
    assert launch(tmp_path, FakeRuns([], [3])) == 3
    output = capsys.readouterr().out
    assert "exit code 3 before it began; remove the cause" in output and "delete" not in output
    assert launch(tmp_path, FakeRuns(SCORES, [4])) == 4
    output = capsys.readouterr().out
    assert "after its clock had stopped: the same command collects it" in output
    assert launch(tmp_path, FakeRuns([])) == 0 and len(results(tmp_path)) == 1


def start(words: Sequence[str], env: Mapping[str, str], fake: FakeRuns, patch: Any) -> int:
    """What run_and_time.sh does, with stand-ins for the runs."""
    for name, value in env.items():
        patch.setenv(name, value)
    patch.setattr(sys, "argv", ["run_and_time.sh", *words])
    patch.setattr(mlperf_run, "Children", lambda: fake)
    patch.setattr(Children, "listen", lambda self: None)
    return mlperf_run.main()


def test_several_benchmarks_run_one_after_the_other(six, monkeypatch, capsys):
    """It says which first, goes on after a failed one, and says at the end which failed."""
    fake = FakeRuns(SCORES, [0, 3, 0, 0, 1, 0])
    assert start(["--runs=1"], six, fake, monkeypatch) == 3
    root, lines = six["MLP_GCS_MODEL_DIR"], capsys.readouterr().out.splitlines()
    assert lines[0] == "mlperf: 6 benchmarks, one after the other:"
    for name, line in zip(SIX, lines[1:], strict=False):
        config, folder = rules.entry(name).recipe, f"{root}{name}"
        assert line.startswith(f"mlperf:   {name}: 1 runs of --config={config} on /data/{name}")
        assert f", in {folder}" in line
    workdirs = [word for command in fake.commands for word in command if "--workdir" in word]
    assert workdirs == [f"--workdir={root}{name}/run_0" for name in SIX]
    *states, advice = lines[-7:]
    failed = {"mask_rcnn": "failed, exit code 3", "ssd": "failed, exit code 1"}
    words = [f"mlperf: {name}: {failed.get(name, 'done')}, in {root}{name}" for name in SIX]
    assert states == words and "the same command continues" in advice


def test_a_signal_ends_all_of_them(six, monkeypatch, capsys):
    fake = FakeRuns(SCORES, [143])
    fake.stop_signal = 15
    assert start(["ssd", "ncf"], six, fake, monkeypatch) == 143 and len(fake.commands) == 1
    assert "mlperf: ncf: not begun, in" in capsys.readouterr().out


def test_the_doctor_is_asked_before_the_first_run(six, monkeypatch, capsys):
    """About all benchmarks; the others run. Another checkpoint may then take one's place."""
    fake = FakeRuns(SCORES)
    fake.ill = "mask_rcnn"
    assert start(["mask_rcnn", "ncf", "--runs=1"], six, fake, monkeypatch) == 1
    output = capsys.readouterr().out
    weights = rules.entry("mask_rcnn").init_default
    six["MLP_GCS_RESNET_CHECKPOINT"] = "/weights"
    assert "MLP_PATH_GCS_MASKRCNN is /data/mask_rcnn, MLP_GCS_RESNET_CHECKPOINT is " in output
    assert "mlperf: mask_rcnn: failed, exit code 1" in output and "mlperf: ncf: done" in output
    assert len(fake.commands) == 1 and weights.startswith("gs://")
    fake.ill = ""
    assert start(["mask_rcnn", "--runs=1"], six, fake, monkeypatch) == 0
    assert "--config.init_from=/weights" in fake.commands[-1]
    fake.ill = "mask_rcnn"  # of a folder where all runs have ended it is not asked
    assert start(["mask_rcnn", "--runs=1"], six, fake, monkeypatch) == 0


def test_the_doctor_is_asked_about_the_first_missing_run(six, monkeypatch, capsys):
    """A set goes on behind a run that has ended, and not behind one that was cut short."""
    fake, root = FakeRuns(SCORES), Path(six["MLP_GCS_MODEL_DIR"])
    assert start(["resnet", "--runs=1"], six, fake, monkeypatch) == 0
    assert start(["resnet", "--runs=2"], six, fake, monkeypatch) == 0 and len(fake.commands) == 2
    write_run(mlperf_config(), f"{root}/run_2", SCORES[:3], Clock())
    assert start(["resnet", "--runs=3"], six, fake, monkeypatch) == 1 and len(fake.commands) == 2
    assert f"; delete {root}/run_2, and the same command" in capsys.readouterr().out
    shutil.rmtree(root / "run_2")
    assert start(["resnet", "--runs=3"], six, fake, monkeypatch) == 0 and len(fake.commands) == 3


def test_later_runs_do_not_count_the_data_again(tmp_path):
    index = tmp_path / "run_0" / "data_index"
    index.mkdir(parents=True)
    (index / "train.json").write_text("{}")
    assert launch(tmp_path, FakeRuns(SCORES), runs=2) == 0
    assert (tmp_path / "run_1" / "data_index" / "train.json").read_text() == "{}"


def test_after_a_failure_there_is_a_summary_of_the_rest(tmp_path, capsys):
    assert launch(tmp_path, FakeRuns(SCORES, [0, 1]), runs=2) == 1
    assert list(json.loads((tmp_path / "summary.json").read_text())["runs"]) == ["result_0.txt"]
    assert ", epoch 35" in capsys.readouterr().out


def test_only_the_first_host_says_when_runs_start_and_end(tmp_path, capsys):
    words = ("STARTING", "ENDING", "RESULT")
    assert launch(tmp_path / "a", FakeRuns(SCORES)) == 0
    output = capsys.readouterr().out
    assert all(output.count(word) == 1 for word in words)
    assert launch(tmp_path / "b", FakeRuns(SCORES), is_first=False) == 0
    output = capsys.readouterr().out
    assert not any(word in output for word in words) and not (tmp_path / "b" / "results").exists()


# --- Whole jobs.


def test_without_packages_the_environment_is_made(tmp_path):
    """By scripts/setup.sh without an argument, of which this one has a stand-in."""
    shutil.copy(ROOT / "run_and_time.sh", tmp_path)
    (tmp_path / "scripts").mkdir()
    for name in ("usage.sh", "find_python.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text("#!/bin/sh\nexit 1\n")
    setup = """mkdir -p .venv/bin; echo "setup with $# arguments"
printf '#!/bin/sh\\necho "python $*"' >.venv/bin/python; chmod +x .venv/bin/python bin/python3"""
    (tmp_path / "scripts" / "setup.sh").write_text(setup)
    (tmp_path / "bin" / "python3").chmod(0o755)

    def run() -> list[str]:
        command = ["bash", str(tmp_path / "run_and_time.sh"), "ssd"]
        env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
        done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    started = "python -m scripts.mlperf.run ssd"
    assert run() == ["setup with 0 arguments", started] and run() == [started]
    shutil.rmtree(tmp_path / ".venv")
    (tmp_path / "scripts" / "setup.sh").write_text("echo 'no network' >&2; exit 7")
    with pytest.raises(AssertionError, match="no network"):
        run()


def run_and_time(env: dict[str, str], *words: str) -> Any:
    tiny = {**TINY_SGD, "mlperf.clear_caches": False, "mlperf.org": "nobody"}
    flags = [f"--config.{key}={value}" for key, value in tiny.items()]
    venv = {"VIRTUAL_ENV": sys.prefix, "XLA_FLAGS": xla_flags(2)}
    return subprocess.run(
        ["bash", "run_and_time.sh", "--config=configs/digits.py", *flags, *words],
        cwd=ROOT,
        env=environment(**env, **QUICK, **venv),
        capture_output=True,
        text=True,
    )


@pytest.mark.long
def test_a_run_from_beginning_to_end(env):
    """The results of a tiny job: the verdict finds what is tiny about it, and nothing else."""
    root = Path(env["MLP_GCS_MODEL_DIR"])
    done = run_and_time(env, "--runs=1")
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = sorted((root / "results" / "2xcpu" / "resnet").iterdir())
    lines = file.read_text().splitlines()
    assert lines[0].startswith("STARTING TIMING RUN AT 20") and lines[0] in done.stdout
    assert lines[-2].startswith("ENDING TIMING RUN AT 20") and lines[-2] in done.stdout
    assert re.fullmatch(r"RESULT,resnet,0,\d+,\S+,20\S+ \S+ [AP]M", lines[-1])
    (row,) = json.loads((root / "summary.json").read_text())["runs"].values()
    assert row["success"] and 0.759 <= row["accuracy"] < 1 and row["epochs"] % 4 == 0
    seed = json.loads((root / "request.json").read_text())["seed"]
    assert [row["seed"]] == requested(root, seed=seed, runs=1).seeds()
    described = json.loads((root / "systems" / "2xcpu.json").read_text())
    assert described["status"].startswith("Research")

    ((passed, text),) = mlperf_check.check([str(root)], "4.0.0")
    assert not passed and "found 1, expected 5" in text
    assert "RCP Test Failed: Missing RCP" in text
