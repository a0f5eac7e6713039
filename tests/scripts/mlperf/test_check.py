"""The verdict about results: it is that of MLPerf's checkers, and in which words."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import mlperf as rules
from benchmarks.ncf.ratings import ML_20M
from benchmarks.resnet import mlperf as mlperf_resnet
from common.errors import UserError
from configs import mlperf_resnet50 as recipes
from engine import mlperf
from scripts.mlperf import check as mlperf_check
from scripts.mlperf import logs as mlperf_logs
from tests.helpers.mlperf_fixture import RULESETS, Clock, make_package, mlperf_config, write_run
from tests.test_main import ROOT

# Logs of MLPerf's rounds, as training_results_v0.5 and _v0.6 publish them: ROUND/[SYSTEM/]NAME.
REAL = Path(os.environ.get("MLPERF_LOGS", ROOT.parent / "shared" / "data" / "mlperf_logs"))


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    root = tmp_path_factory.mktemp("package")
    make_package(root)
    return root


@pytest.fixture
def copy(package, tmp_path):
    """One that may be spoiled."""
    shutil.copytree(package, tmp_path / "copy")
    return tmp_path / "copy"


def result(root: Path, index: int) -> Path:
    return root / "results" / "tpu-v3-8" / "resnet" / f"result_{index}.txt"


def verdict(root: Any, ruleset: str = "") -> mlperf_check.Result:
    (outcome,) = mlperf_check.check([str(root)], ruleset)
    return outcome


def edit(path: Path, pattern: str, text: str) -> None:
    before = path.read_text()
    after = re.sub(pattern, text, before)
    assert after != before
    path.write_text(after)


# --- The verdict.


@pytest.mark.parametrize("ruleset", RULESETS)
def test_five_good_runs_pass(ruleset, package, capsys):
    before = {path: path.read_bytes() for path in package.rglob("*") if path.is_file()}
    assert mlperf_check.main([str(package), f"--ruleset={ruleset}"]) == 0
    line = f"PASS resnet on tpu-v3-8, rules {ruleset}: 5 runs, olympic mean 35.00 epochs, 360.00 m"
    assert capsys.readouterr().out == f"{line}inutes\n"
    assert {path: path.read_bytes() for path in package.rglob("*") if path.is_file()} == before


@pytest.mark.long
def test_all_of_it_may_lie_on_gs(gcs, package):
    root = f"{gcs.bucket()}/some/runs"
    make_package(root)
    outcome = verdict(root)
    assert outcome.errors == [] and (outcome.epochs, outcome.minutes) == (35, 360)
    here = json.loads((package / "summary.json").read_text())
    assert json.loads(gcs.read(f"{root}/summary.json")) == here
    assert here["olympic_mean"] == {"epochs": 35, "minutes": 360}


# A pattern of a line in result_1.txt, what takes its place, and a word of the fault.
FAULTS = [
    (r'.*"lars_opt_momentum".*\n', "", "'lars_opt_momentum'"),
    (r'"seed", "value": 1\b', '"seed", "value": 2', "result_2.txt logs seed 2"),
    (r'weight_decay", "value": 5e-05', 'weight_decay", "value": 3e-05', "'lars_opt_weight_decay'"),
    (r'"global_batch_size", "value": 1632', '"global_batch_size", "value": 1', "Batch sizes in"),
    (r'"key": "run_start"', '"key: "run_start"', "is damaged"),
    (r'.*"key": "run_start".*\n', "", "'run_start'"),
    (r":::MLLOG", "MLLOG", "result_1.txt: no line is one of MLPerf's log"),
]


@pytest.mark.parametrize(("pattern", "text", "says"), FAULTS)
def test_a_planted_fault_is_found(pattern, text, says, copy, capsys):
    edit(result(copy, 1), pattern, text)
    assert mlperf_check.main([str(copy)]) == 1
    head, *faults = capsys.readouterr().out.splitlines()
    assert head.startswith("FAIL resnet on tpu-v3-8, rules 4.0.0: 5 runs")
    assert any(says in fault for fault in faults)
    assert not [fault for fault in faults if tempfile.gettempdir() in fault]


def test_four_runs_are_too_few(copy):
    result(copy, 4).unlink()
    assert any("found 4, expected 5" in fault for fault in verdict(copy).errors)


def test_runs_that_converge_too_early_are_found(copy):
    """RCP: the mean of 35 epochs may be 33.80 at the least, and all of these have 31."""
    for i in range(5):
        edit(result(copy, i), r'"value": 0\.75, (.*"epoch_num": 31)', r'"value": 0.7605, \1')
        edit(result(copy, i), r'(?s)(\n[^\n]*"eval_stop"[^\n]*"epoch_num": 31\}\}).*?("run_stop")',
             r'\1\n:::MLLOG {"namespace": "", "time_ms": 1800000000000, "event_type": '
             r'"INTERVAL_END", "key": \2')  # fmt: skip
    outcome = verdict(copy)
    (fault,) = outcome.errors
    assert outcome.epochs == 31 and fault.startswith("RCP Test Failed")


def test_runs_that_are_a_little_early_are_scaled(tmp_path):
    """A mean of 34.67 epochs, where that of the reference is 35.15 and the least is 34.31."""
    early = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.7601]
    make_package(tmp_path, "mlperf_resnet50:3264", [early, early, *[[0.1, *early]] * 3])
    outcome = verdict(tmp_path)
    assert outcome.errors == [] and outcome.scale == pytest.approx(35.15 / 34.67, abs=1e-3)
    assert outcome.minutes == pytest.approx((8 + 9 + 9) / 3 * 40)
    assert str(outcome).endswith("346.67 minutes, scaled by 1.0141 351.54 minutes")


@pytest.mark.parametrize("name", [*recipes.POINTS, *(n for n in recipes.ENTRIES if n != "v0.5")])
def test_every_recipe_passes(name, tmp_path):
    """With the target at the evaluation that its reference, or entry, expects."""
    epochs = recipes.ENTRIES[name][2] if name in recipes.ENTRIES else recipes.POINTS[name][0]
    count = -(-int(-(-epochs // 1)) // 4)
    make_package(tmp_path, f"mlperf_resnet50:{name}", [[0.5] * (count - 1) + [0.7601]] * 5)
    outcome = verdict(tmp_path)
    assert outcome.errors == [] and outcome.epochs == -(-epochs // 1) + (name == "v0.7-4096")
    run = mlperf_logs.load(result(tmp_path, 0))
    logged = [epoch for epoch, _ in run.evals]
    assert logged == [logged[0] + 4 * i for i in range(count)]
    config: Any = recipes.get_config(str(name))
    warmup = run.values["lars_opt_learning_rate_warmup_epochs"]
    assert warmup == pytest.approx(config.warmup_epochs, abs=1e-2)
    span, batch = map(int, config.bn_span.split("/"))
    assert (run.values["model_bn_span"], run.values["global_batch_size"]) == (span, batch)


def test_the_epochs_of_the_entry_in_jax_are_its_own(tmp_path):
    """Of 19.75 steps: 4, 8, ..., and a warm-up of exactly 33; other lengths count by images."""
    make_package(tmp_path, "mlperf_resnet50:v0.7-65536", [[0.5] * 21 + [0.7601]])
    run = mlperf_logs.load(result(tmp_path, 0))
    assert [epoch for epoch, _ in run.evals] == list(range(4, 89, 4))
    assert run.values["lars_opt_learning_rate_warmup_epochs"] == 33
    for steps, epoch in ((1817, 19.75), (1700, 1_281_167 / 65536), (4000, 1_281_167 / 65536)):
        recipe = mlperf_config("mlperf_resnet50:v0.7-65536", train_steps=str(steps)).to_dict()
        counts: Any = {"train": 1_281_167, "eval": 50_000}
        run = rules.Run("mllog", recipe, counts, steps, None, 64, {})
        assert mlperf_resnet.steps_per_epoch(run) == epoch


def test_one_run_may_miss_the_target_and_not_two(copy):
    for i in (1, 2):
        edit(result(copy, i), "0.7601", "0.7401")
        edit(result(copy, i), '"status": "success"', '"status": "aborted"')
        outcome = verdict(copy)
        if i == 1:
            assert outcome.errors == [] and outcome.epochs == pytest.approx((35 + 35 + 39) / 3)
    faults = [fault for fault in outcome.errors if "eval_accuracy" in fault]
    assert [fault.split(":")[0] for fault in faults] == ["result_1.txt", "result_2.txt"]
    assert outcome.epochs is None and outcome.minutes is None


def test_a_single_log_is_judged_by_what_it_says(tmp_path, monkeypatch, capsys):
    """Wherever it is: the name of the benchmark is in it, and with it the ruleset."""
    counts = {"num_train_images": 117_266, "num_eval_images": 5_000}
    config = mlperf_config("mlperf_ssd:1024", **counts, mlperf={"clear_caches": True})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mlperf, "clear_caches", lambda: True)
    for scores, word in (([0.1, 0.2, 0.235], "PASS"), ([0.1, 0.2, 0.22], "FAIL")):
        write_run(config, str(tmp_path), scores, Clock())
        assert mlperf_check.main(["mlperf.log"]) == int(word == "FAIL")
        head = f"{word} ssd on {tmp_path.parent.name}, rules 1.1.0: 1 runs"
        assert capsys.readouterr().out.startswith(head)
        (tmp_path / "mlperf.log").unlink()


# --- Damaged folders.


DESCRIPTION = "systems/tpu-v3-8.json"
ALL = [f"results/tpu-v3-8/resnet/result_{i}.txt" for i in range(5)]


@pytest.mark.parametrize(
    ("names", "content", "message"),
    [
        (ALL, None, "no run has ended: there is no result_*.txt"),
        ([DESCRIPTION], None, f"{DESCRIPTION} does not exist"),
        ([DESCRIPTION], b"{", "the package checker failed: JSONDecodeError"),
        ([DESCRIPTION], b'{"division": "closed"}', "System description checker failed for"),
    ],
)
def test_what_is_damaged_is_one_line(names, content, message, copy, capsys):
    for folder in ("results", "results/tpu-v3-8"):
        (copy / folder / ".DS_Store").write_bytes(b"\0\xff")
    assert verdict(copy).errors == []
    for name in names:
        (copy / name).unlink() if content is None else (copy / name).write_bytes(content)
    assert mlperf_check.main([str(copy)]) == 1
    printed = capsys.readouterr()
    head, fault = printed.out.splitlines()
    assert head.startswith("FAIL resnet on tpu-v3-8") and fault.strip().startswith(message)
    assert printed.err == ""


def test_nothing_is_said_twice(copy):
    """A key is missing in two runs: the package is then not in order, which is no news."""
    for i in (1, 2):
        edit(result(copy, i), r'.*"lars_opt_momentum".*\n', "")
    faults = verdict(copy).errors
    assert [fault.split(":")[0] for fault in faults] == ["result_1.txt", "result_2.txt"]


def test_a_folder_of_several_benchmarks(package, tmp_path, capsys):
    """Each has its folder; one without a result counts. The folder's name is no pattern."""
    root = tmp_path / "runs[1]"
    shutil.copytree(package, root / "resnet")
    (root / "resnet" / "request.json").touch()
    assert mlperf_check.main([str(root)]) == 0
    assert capsys.readouterr().out.startswith("PASS resnet on tpu-v3-8")
    (root / "ssd").mkdir()
    (root / "ssd" / "request.json").touch()
    assert mlperf_check.main([str(root)]) == 1
    passed, failed, why = capsys.readouterr().out.splitlines()
    assert passed.startswith("PASS resnet") and failed.startswith("FAIL ssd on no system")
    assert why.startswith("  no run has ended")


@pytest.mark.parametrize("made", ["", "results", "results/tpu/minigo"])
def test_nothing_to_check(made, tmp_path):
    (tmp_path / made).mkdir(parents=True, exist_ok=True)
    with pytest.raises(UserError, match=f"^{tmp_path} has no results"):
        mlperf_check.main([str(tmp_path)])


# --- Reading.


def test_v05_is_only_read(package, tmp_path):
    scores = [[0.5] * 14 + [0.7501]] * 5
    make_package(tmp_path, "mlperf_resnet50:v0.5", scores, format="v0.5")
    (tmp_path / "results" / "tpu" / "resnet" / "result_3.txt").unlink()
    line = "READ resnet on tpu, logs of v0.5: 4 runs, olympic mean 60.00 epochs, 601.00 minutes"
    assert str(verdict(tmp_path)) == line
    shutil.copy(result(package, 0), tmp_path / "results" / "tpu" / "resnet" / "result_0.txt")
    assert verdict(tmp_path).errors == ["the logs are of several forms: mllog, v0.5"]


def test_single_logs_of_ncf_are_read(tmp_path, clock):
    config, paths = mlperf_config("ncf", **ML_20M, mlperf={"format": "v0.5"}), []
    for index, scores in enumerate([[0.5], [0.5, 0.636]]):
        folder = tmp_path / "tpu" / "ncf" / str(index)
        write_run(config, str(folder), scores, clock)
        paths.append(str((folder / "mlperf.log").rename(folder.parent / f"result_{index}.txt")))
    (outcome,) = mlperf_check.check(paths)
    assert str(outcome).splitlines() == [
        "READ ncf on tpu, logs of v0.5: 2 runs, no olympic mean",
        "  result_0.txt: 41.00 minutes, target NOT reached",
        "  result_1.txt: 81.00 minutes, epoch 2",
    ]


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([1, 2, 3, 4, 100], 3),
        ([None, 1, 2, 3, 4], 3),
        ([None, None, 2, 3, 4], None),
        ([1, 2], None),
    ],
)
def test_olympic_mean(values, mean):
    assert mlperf_logs.olympic(values) == mean


def test_reading_finds_a_log_among_other_lines(tmp_path):
    row = {"time_ms": 60_000, "key": "run_start", "value": None, "metadata": {}}
    stop = {**row, "time_ms": 120_000, "key": "run_stop", "metadata": {"status": "aborted"}}
    log = tmp_path / "log"
    log.write_text(f"step 1\nI0101 :::MLLOG {json.dumps(row)}\n:::MLLOG {json.dumps(stop)}")
    run = mlperf_logs.load(log)
    assert run.minutes == 1 and not run.success and run.epochs is None
    log.write_text("\n:::MLLOG {}")
    with pytest.raises(UserError, match="line 2 is damaged"):
        mlperf_logs.load(log)


def v06(key, value=None, **metadata):
    """A line of v0.6."""
    return f":::MLL 60.0 {key}: {json.dumps({'value': value, 'metadata': metadata})}\n"


ODD = "".join(  # it counts epochs from 0, repeats one, and evaluates once more behind the stop
    [
        v06("run_start"),
        *(v06("block_start", first_epoch_num=0), v06("eval_start", epoch_num=0)),
        *(v06("eval_accuracy", 20.0, epoch_num=0), v06("eval_start", epoch_num=1)),
        *(v06("eval_accuracy", 26.0, epoch_num=0), v06("run_stop", status="success")),
        v06("eval_accuracy", 27.0, epoch_num=2),
    ]
)


def test_curves_have_the_epochs_that_were_trained(tmp_path, capsys):
    log, picture = tmp_path / "tpu" / "transformer" / "result_0.txt", tmp_path / "curves.svg"
    log.parent.mkdir(parents=True)
    log.write_text(ODD)
    assert mlperf_logs.load(log).evals == [(1, 20.0), (2, 26.0)]
    assert mlperf_check.main([str(log), f"--curves={picture}"]) == 0
    row = capsys.readouterr().out.splitlines()[-1]
    assert row == "| transformer | v0.6 tpu | 2 | 0.0 | -, 0.200, 0.200 |"
    assert "target 0.25" in picture.read_text()
    log.write_text(v06("run_start"))
    for flag, words in ((picture, "has an evaluation"), ("curves.pdf", "ends in .svg or .png")):
        with pytest.raises(UserError, match=words):
            mlperf_check.main([str(log), f"--curves={flag}"])


def test_a_text_without_a_known_line_is_a_fault(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("loss 0.5\n:::MLPv0.4.0 resnet run_start\n")
    assert mlperf_check.main([str(tmp_path / "notes.txt")]) == 1
    head, line = capsys.readouterr().out.splitlines()
    assert head.startswith("FAIL ") and line == "  notes.txt: no line is one of MLPerf's log"


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the published logs, see MLPERF_LOGS")
class TestPublishedLogs:
    """Google's and NVIDIA's; the means are those of docs/mlperf.md."""

    @pytest.mark.parametrize(
        ("name", "minutes", "epochs"),
        [
            ("resnet", (183.47, 183.42), 62),
            ("ssd", (70.75, 69.30), 49),
            ("gnmt", (26.44, 26.06), 2),
        ],
    )
    def test_of_2018(self, name, minutes, epochs):
        outcome = verdict_of_logs(f"v0.5/{name}")
        assert outcome.errors == []
        runs = outcome.runs.values()
        assert [round(run.minutes or 0, 2) for run in runs] == list(minutes)
        assert [run.epochs for run in runs] == [epochs] * 2

    @pytest.mark.parametrize(
        ("name", "minutes", "epochs", "count", "least"),
        [
            ("resnet", 42.19, 60, 5, 0.759),
            ("ssd", 12.61, 59, 5, 0.23),
            ("mask", 107.03, 15, 5, 0.339),
            ("transformer", 10.20, 3.125, 10, 25.0),
            ("gnmt", 12.25, 6, 10, 24.0),
        ],
    )
    def test_googles_of_2019(self, name, minutes, epochs, count, least):
        outcome = verdict_of_logs(f"v0.6/tpu-v3-32/{name}")
        assert outcome.errors == [] and len(outcome.runs) == count
        assert (round(outcome.minutes or 0, 2), outcome.epochs) == (minutes, epochs)
        scores = [run.evals[-1][1] for run in outcome.runs.values()]
        assert min(min(s) if isinstance(s, list) else s for s in scores) >= least
        assert str(outcome).startswith(f"READ {name} on tpu-v3-32, logs of v0.6: {count} runs, ")

    @pytest.mark.parametrize(("name", "minutes"), [("gnmt", 11.06), ("ssd", 12.25)])
    def test_nvidias_of_2019(self, name, minutes):
        outcome = verdict_of_logs(f"v0.6/nvidia/{name}")
        assert str(outcome).startswith(f"READ {name} on nvidia, ")
        (run,) = outcome.runs.values()
        assert run.success and round(run.minutes or 0, 2) == minutes

    def test_the_page_has_their_table(self, tmp_path, capsys):
        logs = [str(path) for path in REAL.glob("v0*/**/result_*.txt") if "nvidia" not in str(path)]
        assert mlperf_check.main([*logs, f"--curves={tmp_path}/curves.svg"]) == 0
        page = (ROOT / "docs" / "mlperf.md").read_text()
        rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
        assert len(rows) == 9
        assert [row for row in rows if row.split(" | ", 2)[2] not in page] == []


def verdict_of_logs(folder: str) -> mlperf_check.Result:
    (outcome,) = mlperf_check.check(sorted(map(str, (REAL / folder).iterdir())))
    return outcome
