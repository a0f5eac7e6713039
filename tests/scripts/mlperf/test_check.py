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
from scripts.mlperf import results as mlperf_logs
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


def verdict(root: Any, ruleset: str = "") -> list[str]:
    """The lines about the only set; the first is the verdict."""
    ((passed, text),) = mlperf_check.check([str(root)], ruleset)
    head, *lines = text.splitlines()
    assert passed == (not head.startswith("FAIL"))
    return [head, *map(str.strip, lines)]


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
    (line,) = verdict(root)
    assert line.startswith("PASS") and line.endswith("mean 35.00 epochs, 360.00 minutes")
    here = json.loads((package / "summary.json").read_text())
    assert json.loads(gcs.read(f"{root}/summary.json")) == here
    assert here["olympic_mean"] == {"epochs": 35, "minutes": 360}


MOMENTUM = (r'.*"lars_opt_momentum".*\n', "", "found 0")

# A pattern of a line in two logs, what takes its place, and words of the fault.
FAULTS = [
    MOMENTUM,
    (r'"seed", "value": .\b', '"seed", "value": 3', "result_2.txt logs seed 3"),
    (r'weight_decay", "value": 5e-05', 'weight_decay", "value": 3e-05', "'lars_opt_weight_decay'"),
    (r'"global_batch_size", "value": 1632', '"global_batch_size", "value": 1', "Batch sizes in"),
    (r'"key": "run_start"', '"key: "run_start"', "is damaged"),
    (r'.*"key": "run_start".*\n', "", "'run_start'"),
    (r":::MLLOG", "MLLOG", "result_1.txt: no line is one of MLPerf's log"),
]


@pytest.mark.parametrize(("pattern", "text", "says"), FAULTS)
def test_a_planted_fault_is_found(pattern, text, says, copy, capsys):
    edit(result(copy, 1), pattern, text)
    edit(result(copy, 2), pattern, text)
    assert mlperf_check.main([str(copy)]) == 1
    head, *faults = capsys.readouterr().out.splitlines()
    assert head.startswith("FAIL resnet on tpu-v3-8, rules 4.0.0: 5 runs")
    assert any(says in fault for fault in faults)
    assert not [fault for fault in faults if tempfile.gettempdir() in fault]


def test_the_rules_accept_one_log_with_a_fault(copy):
    """The checkers say it all the same; alone the log does not pass."""
    edit(result(copy, 1), *MOMENTUM[:2])
    head, *lines = verdict(copy)
    assert head.startswith("PASS") and lines[0].startswith("result_1.txt: Required EXACTLY_ONE")
    assert "1 file does not comply, accepting this under olympic scoring" in lines
    head, *lines = verdict(result(copy, 1))
    assert head.startswith("FAIL") and "'lars_opt_momentum'" in lines[0]


def test_four_runs_are_too_few(copy):
    result(copy, 4).unlink()
    head, *lines = verdict(copy)
    assert head.startswith("FAIL") and any("found 4, expected 5" in line for line in lines)


def test_runs_that_converge_too_early_are_found(copy):
    """RCP: the mean of 35 epochs may be 33.80 at the least, and all of these have 31."""
    for i in range(5):
        edit(result(copy, i), r'"value": 0\.75, (.*"epoch_num": 31)', r'"value": 0.7605, \1')
        edit(result(copy, i), r'(?s)(\n[^\n]*"eval_stop"[^\n]*"epoch_num": 31\}\}).*?("run_stop")',
             r'\1\n:::MLLOG {"namespace": "", "time_ms": 1800000000000, "event_type": '
             r'"INTERVAL_END", "key": \2')  # fmt: skip
    head, fault = verdict(copy)
    assert "mean 31.00 epochs" in head and fault.startswith("RCP Test Failed")


def test_runs_that_are_a_little_early_are_scaled(tmp_path):
    """A mean of 34.67 epochs, where that of the reference is 35.15 and the least is 34.31."""
    early = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.7601]
    make_package(tmp_path, "mlperf_resnet50:3264", [early, early, *[[0.1, *early]] * 3])
    (head,) = verdict(tmp_path)
    minutes, factor, scaled = map(float, re.findall(r"[\d.]+(?= minutes|(?<=1\.\d{4}) )", head))
    assert head.startswith("PASS") and minutes == pytest.approx((8 + 9 + 9) / 3 * 40, abs=0.01)
    assert factor == pytest.approx(35.15 / 34.67, abs=1e-3)
    assert scaled == pytest.approx(minutes * factor, abs=0.1)


@pytest.mark.parametrize("name", [*recipes.POINTS, *(n for n in recipes.ENTRIES if n != "v0.5")])
def test_every_recipe_passes(name, tmp_path):
    """With the target at the evaluation that its reference, or entry, expects."""
    epochs = recipes.ENTRIES[name][2] if name in recipes.ENTRIES else recipes.POINTS[name][0]
    count = -(-int(-(-epochs // 1)) // 4)
    make_package(tmp_path, f"mlperf_resnet50:{name}", [[0.5] * (count - 1) + [0.7601]] * 5)
    (head,) = verdict(tmp_path)
    mean = -(-epochs // 1) + (name == "v0.7-4096")
    assert head.startswith("PASS") and f"mean {mean:.2f} epochs" in head
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
        head, *lines = verdict(copy)
        if i == 1:
            assert head.startswith("PASS") and f"mean {(35 + 35 + 39) / 3:.2f} epochs" in head
    faults = [line for line in lines if "eval_accuracy" in line]
    assert [fault.split(":")[0] for fault in faults] == ["result_1.txt", "result_2.txt"]
    assert head.startswith("FAIL") and head.endswith("no olympic mean")


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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (DESCRIPTION, None, "not checked: FileNotFoundError: "),
        (DESCRIPTION, b"{", "not checked: JSONDecodeError"),
        (DESCRIPTION, b'{"division": "closed"}', "System description checker failed for"),
    ],
)
def test_what_is_damaged_is_a_line(name, content, message, copy, capsys):
    for folder in ("results", "results/tpu-v3-8"):
        (copy / folder / ".DS_Store").write_bytes(b"\0\xff")
    assert len(verdict(copy)) == 1
    (copy / name).unlink() if content is None else (copy / name).write_bytes(content)
    assert mlperf_check.main([str(copy)]) == 1
    printed = capsys.readouterr()
    head, fault, *_ = printed.out.splitlines()
    assert head.startswith("FAIL resnet on tpu-v3-8") and fault.strip().startswith(message)
    assert printed.err == ""


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
    passed, failed = capsys.readouterr().out.splitlines()
    assert passed.startswith("PASS resnet") and failed == "FAIL ssd: no run has ended"


def test_rules_without_the_benchmark_pass_nothing(tmp_path):
    """The package checker alone skips such a folder, and is content."""
    folder = tmp_path / "results" / "tpu" / "gnmt"
    write_run(mlperf_config(), str(tmp_path), [0.76], Clock())
    folder.mkdir(parents=True)
    (tmp_path / "mlperf.log").rename(folder / "result_0.txt")
    for ruleset, line in (("4.0.0", "rules 4.0.0 do not have gnmt"), ("", "not checked: FileNot")):
        head, fault, *_ = verdict(tmp_path, ruleset)
        assert head.startswith("FAIL gnmt") and fault.startswith(line)


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
    assert verdict(tmp_path) == [line]
    shutil.copy(result(package, 0), tmp_path / "results" / "tpu" / "resnet" / "result_0.txt")
    assert verdict(tmp_path)[0].startswith("FAIL resnet on tpu, rules 4.0.0: 4 runs")


def test_single_logs_of_ncf_are_read(tmp_path, clock):
    config, paths = mlperf_config("ncf", **ML_20M, mlperf={"format": "v0.5"}), []
    for index, scores in enumerate([[0.5], [0.5, 0.636]]):
        folder = tmp_path / "tpu" / "ncf" / str(index)
        write_run(config, str(folder), scores, clock)
        paths.append(str((folder / "mlperf.log").rename(folder.parent / f"result_{index}.txt")))
    ((_, text),) = mlperf_check.check(paths)
    assert text.splitlines() == [
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
    runs = [
        mlperf_logs.Run(started=0, ended=60 * (value or 9), success=value is not None)
        for value in values
    ]
    assert mlperf_logs.olympic(runs, "minutes") == mean


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


def test_the_epochs_are_those_that_were_trained(tmp_path):
    (tmp_path / "log").write_text(ODD)
    assert mlperf_logs.load(tmp_path / "log").evals == [(1, 20.0), (2, 26.0)]


def test_a_text_without_a_known_line_is_a_fault(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("loss 0.5\n:::MLPv0.4.0 resnet run_start\n")
    assert mlperf_check.main([str(tmp_path / "notes.txt")]) == 1
    head, line = capsys.readouterr().out.splitlines()
    assert head.startswith("FAIL ") and line == "  notes.txt: no line is one of MLPerf's log"


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the published logs, see MLPERF_LOGS")
@pytest.mark.parametrize(
    ("folder", "mean"),
    [
        # Of 2018 there are two runs of each benchmark.
        ("v0.5/resnet", ["183.47 minutes, epoch 62", "183.42 minutes, epoch 62"]),
        ("v0.5/ssd", ["70.75 minutes, epoch 49", "69.30 minutes, epoch 49"]),
        ("v0.5/gnmt", ["26.44 minutes, epoch 2", "26.06 minutes, epoch 2"]),
        ("v0.6/tpu-v3-32/resnet", "60.00 epochs, 42.19 minutes"),
        ("v0.6/tpu-v3-32/ssd", "59.00 epochs, 12.61 minutes"),
        ("v0.6/tpu-v3-32/mask", "15.00 epochs, 107.03 minutes"),
        ("v0.6/tpu-v3-32/transformer", "3.12 epochs, 10.20 minutes"),
        ("v0.6/tpu-v3-32/gnmt", "6.00 epochs, 12.25 minutes"),
        ("v0.6/nvidia/gnmt", ["11.06 minutes, epoch"]),
        ("v0.6/nvidia/ssd", ["12.25 minutes, epoch"]),
    ],
)
def test_published_logs_are_read(folder, mean):
    """Google's and NVIDIA's; the means are those of docs/mlperf.md."""
    system, benchmark = (REAL / folder).parts[-2:]
    ((_, text),) = mlperf_check.check(sorted(map(str, (REAL / folder).iterdir())))
    head, *lines = text.splitlines()
    assert head.startswith(f"READ {benchmark} on {system}, logs of {folder[:4]}: ")
    if isinstance(mean, str):
        assert head.endswith(f"olympic mean {mean}")
    else:
        assert all(each in line for each, line in zip(mean, lines, strict=True))
