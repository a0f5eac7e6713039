"""The verdict about results: which faults it finds, and in which words."""

import json
import re
import runpy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

import benchmarks
from benchmarks import mlperf as rules
from benchmarks.resnet import mlperf as mlperf_resnet
from common.errors import UserError
from configs import mlperf_resnet50 as recipes
from scripts.mlperf import check as mlperf_check
from scripts.mlperf import logs as mlperf_logs
from scripts.mlperf import official
from tests.helpers.mlperf_fixture import RULESETS, make_package, mlperf_config
from tests.test_main import ROOT


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


def verdict(root: Any, ruleset: str = "") -> mlperf_check.Verdict:
    (outcome,) = mlperf_check.check(str(root), ruleset)
    return outcome


def edit(path: Path, pattern: str, text: str, count: int = 0) -> None:
    before = path.read_text()
    after = re.sub(pattern, text, before, count=count)
    assert after != before
    path.write_text(after)


# --- The verdict.


@pytest.mark.parametrize("ruleset", RULESETS)
def test_five_good_runs_pass(ruleset, package):
    outcome = verdict(package, ruleset)
    assert outcome.faults == [] and outcome.notes == []
    assert (outcome.runs, outcome.epochs, outcome.minutes) == (5, 35, 9 * 40)
    assert str(outcome).startswith(f"PASS resnet on tpu-v3-8, rules {ruleset}: ")


@pytest.mark.parametrize(
    ("epochs", "minutes", "scale", "words"),
    [
        (35.0, 8.0, 1.25, "mean 35.00 epochs, 8.00 minutes, scaled by 1.2500 10.00 minutes"),
        (35.0, 8.0, 1.0, "mean 35.00 epochs, 8.00 minutes"),
        *((35.0, None, 1.0, "no olympic mean"), (None, 8.0, 1.0, "no olympic mean")),
    ],
)
def test_the_head_of_a_verdict(epochs, minutes, scale, words):
    about = "tpu", "resnet", "4.0.0", 5, epochs, minutes, scale
    passed = str(mlperf_check.Verdict(*about, [], ["note"]))
    assert passed.startswith("PASS resnet on tpu, rules 4.0.0: 5 runs, ")
    assert passed.endswith(f"{words}\n  note")
    failed = str(mlperf_check.Verdict(*about, ["fault"], ["note"]))
    assert failed.startswith("FAIL ") and failed.endswith(f"{words}\n  fault\n  note")


@pytest.mark.parametrize(
    ("epochs", "period", "is_regular"),
    [
        *(([4.0, 8.0, 12.0], 4, True), ([1.0, 5.0], 4, True), ([4.0], 4, True), ([], 4, True)),
        *(([0.0, 4.0], 4, False), ([0.5, 4.5], 4, True), ([5.0, 9.0], 4, False)),
        *(([4.0, 9.0], 4, False), ([7.0, 7.5], 0, True), ([2.0], 1, False)),
    ],
)
def test_the_distance_of_evaluations(epochs, period, is_regular):
    run = mlperf_logs.Run({}, [(epoch, 0.5) for epoch in epochs])
    faults = list(mlperf_check._check_spacing(run, period))
    apart = "1 epoch apart" if period == 1 else "4 epochs apart"
    assert not faults if is_regular else apart in faults[0]


def test_the_target_ends_a_run():
    entry: Any = rules.entry("resnet")

    def faults(*scores: float, success: bool) -> list[str]:
        run = mlperf_logs.Run({}, [(4 * k, v) for k, v in enumerate(scores, 1)], success=success)
        return list(mlperf_check._check_success(run, entry))

    late = "the target was reached at epoch {}, and the run had to stop there"
    below = "success is claimed, but the last score is below 0.759"
    assert faults(0.7, 0.759, success=True) == faults(0.7, 0.7, success=False) == []
    assert faults(success=False) == [] and faults(success=True) == [below]
    assert faults(0.758, success=True) == [below]
    assert faults(0.7, 0.76, 0.77, success=True) == [late.format(8)]
    assert faults(0.76, 0.7, success=True) == [below, late.format(4)]


def test_without_the_checkers(package, monkeypatch, capsys):
    monkeypatch.setattr(official, "available", lambda: False)
    assert mlperf_check.main([str(package)]) == 1
    assert "pip install mlperf-logging" in capsys.readouterr().err


def test_an_error_is_one_line_and_the_exit_code(monkeypatch, capsys):
    def fail(folder, ruleset):
        raise OSError("odd")

    monkeypatch.setattr(mlperf_check, "check", fail)
    assert mlperf_check.main(["folder"]) == 1
    assert capsys.readouterr().err == "ERROR: folder: odd\n"


@pytest.mark.long
def test_all_of_it_may_lie_on_gs(gcs, package):
    root = f"{gcs.bucket()}/some/runs"
    make_package(root)
    outcome = verdict(root)
    assert outcome.faults == [] and (outcome.epochs, outcome.minutes) == (35, 360)
    here = json.loads((package / "summary.json").read_text())
    assert json.loads(gcs.read(f"{root}/summary.json")) == here
    assert here["olympic_mean"] == {"epochs": 35, "minutes": 360}


def test_the_verdict_is_printed_and_is_the_exit_code(package, copy, capsys):
    assert mlperf_check.main([str(package)]) == 0
    assert capsys.readouterr().out.startswith("PASS resnet on tpu-v3-8, rules 4.0.0: 5 runs")
    edit(result(copy, 1), r".*global_batch_size.*\n", "")
    assert mlperf_check.main([str(copy), "--ruleset=1.0.0"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("FAIL") and "global_batch_size" in out


# A pattern of a line in result_1.txt, what takes its place, and a word of the fault.
FAULTS = [
    (r".*\"lars_opt_momentum\".*\n", "", "'lars_opt_momentum'"),
    (r'"epoch_num": 7\b', '"epoch_num": 5', "4 epochs apart, from 4 or before: 3, 5, 11"),
    (r'"eval_samples", "value": 50000', '"eval_samples", "value": 49152', "eval_samples is 49152"),
    (r'"seed", "value": 1\b', '"seed", "value": 2', "result_2.txt logs seed 2"),
    (r'"cache_clear", "value": true', '"cache_clear", "value": false', "cache_clear"),
    (r'weight_decay", "value": 5e-05', 'weight_decay", "value": 3e-05', "'lars_opt_weight_decay'"),
    (r'"global_batch_size", "value": 1632', '"global_batch_size", "value": 1', "result"),
    (r'learning_rate", "value": 7.4', 'learning_rate", "value": 8.5', "the same settings"),
    (r'_division", "value": "closed"', '_division", "value": "open"', "_division is open"),
    (r'"key": "run_start"', '"key: "run_start"', "is damaged"),
]


@pytest.mark.parametrize(("pattern", "text", "says"), FAULTS)
def test_a_planted_fault_is_found(pattern, text, says, copy):
    edit(result(copy, 1), pattern, text)
    outcome = verdict(copy)
    assert [fault for fault in outcome.faults if says in fault and "\n" not in fault]
    assert str(outcome).startswith("FAIL")


def lines(path: Path, key: str) -> list[int]:
    """The numbers of the lines that log a key."""
    rows = path.read_text().splitlines()
    return [i for i, row in enumerate(rows) if f'"key": "{key}"' in row]


@pytest.mark.parametrize(
    ("key", "before", "message"),
    [
        ("run_stop", "eval_start", "eval_accuracy comes after run_stop"),
        ("run_start", "run_stop", "block_start comes before run_start"),
        ("eval_accuracy", "block_start", "an eval_accuracy comes outside of an evaluation"),
    ],
)
def test_events_in_the_wrong_order_are_found(key, before, message, copy):
    path = result(copy, 3)
    rows, number, to = path.read_text().splitlines(), lines(path, key)[0], lines(path, before)[0]
    rows.insert(to - (number < to), rows.pop(number))
    path.write_text("\n".join(rows) + "\n")
    assert f"result_3.txt: {message}" in verdict(copy).faults


@pytest.mark.parametrize(("key", "number"), [("eval_stop", -1), ("block_stop", 0)])
def test_a_missing_end_is_found(key, number, copy):
    path = result(copy, 0)
    rows = path.read_text().splitlines()
    del rows[lines(path, key)[number]]
    path.write_text("\n".join(rows) + "\n")
    assert any(f"has no {key}" in fault for fault in verdict(copy).faults)


def test_four_runs_are_too_few(copy):
    result(copy, 4).unlink()
    assert any("found 4, expected 5" in fault for fault in verdict(copy).faults)


def test_runs_that_converge_too_early_are_found(copy):
    """RCP: the mean of 35 epochs may be 33.80 at the least, and all of these have 31."""
    for i in range(5):
        edit(result(copy, i), r'"value": 0\.75, (.*"epoch_num": 31)', r'"value": 0.7605, \1')
        edit(result(copy, i), r'(?s)(\n[^\n]*"eval_stop"[^\n]*"epoch_num": 31\}\}).*?("run_stop")',
             r'\1\n:::MLLOG {"namespace": "", "time_ms": 1800000000000, "event_type": '
             r'"INTERVAL_END", "key": \2')  # fmt: skip
    outcome = verdict(copy)
    (fault,) = outcome.faults
    assert outcome.epochs == 31 and "31.00 epochs is less than the 33.80 that batch 1632" in fault


def test_runs_that_are_a_little_early_are_scaled(tmp_path):
    """A mean of 34.67 epochs, where that of the reference is 35.15 and the least is 34.31."""
    early = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.7601]
    make_package(tmp_path, "mlperf_resnet50:3264", [early, early, *[[0.1, *early]] * 3])
    outcome = verdict(tmp_path)
    assert outcome.faults == [] and outcome.scale == pytest.approx(35.15 / 34.67, abs=1e-3)
    assert outcome.minutes == pytest.approx((8 + 9 + 9) / 3 * 40)


@pytest.mark.parametrize("name", [*recipes.POINTS, *(n for n in recipes.ENTRIES if n != "v0.5")])
def test_every_recipe_passes(name, tmp_path):
    """With the target at the evaluation that its reference, or entry, expects."""
    epochs = recipes.ENTRIES[name][2] if name in recipes.ENTRIES else recipes.POINTS[name][0]
    count = -(-int(-(-epochs // 1)) // 4)
    make_package(tmp_path, f"mlperf_resnet50:{name}", [[0.5] * (count - 1) + [0.7601]] * 5)
    outcome = verdict(tmp_path)
    assert outcome.faults == [] and outcome.epochs == -(-epochs // 1) + (name == "v0.7-4096")
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
        rate: Any = None
        run = rules.Run("mllog", True, recipe, counts, steps, rate, 64, {})
        assert mlperf_resnet.steps_per_epoch(run) == epoch


def test_one_run_may_miss_the_target_and_not_two(copy):
    for i in (1, 2):
        edit(result(copy, i), "0.7601", "0.7401")
        edit(result(copy, i), '"status": "success"', '"status": "aborted"')
        outcome = verdict(copy)
        if i == 1:
            (note,) = outcome.notes
            assert outcome.faults == [] and note.startswith("result_1.txt: the target was not")
            assert outcome.epochs == pytest.approx((35 + 35 + 39) / 3)
    assert "result_1.txt: the target was not reached" in outcome.faults
    assert "result_2.txt: the target was not reached" in outcome.faults
    assert outcome.epochs is None and outcome.minutes is None


def test_a_description_that_lacks_something_is_found(copy):
    path = copy / "systems" / "tpu-v3-8.json"
    described = json.loads(path.read_text())
    del described["cooling"]
    path.write_text(json.dumps(described))
    assert any("Missing field cooling" in fault for fault in verdict(copy).faults)


# --- v0.5.


@pytest.fixture(scope="module")
def package_v05(tmp_path_factory):
    root = tmp_path_factory.mktemp("v05")
    make_package(root, "mlperf_resnet50:v0.5", [[0.5] * 14 + [0.7501]] * 5, format="v0.5")
    return root


@pytest.fixture
def old(package_v05, tmp_path):
    """Five runs in the format of v0.5, which may be spoiled."""
    shutil.copytree(package_v05 / "results", tmp_path / "old" / "results")
    return tmp_path / "old"


def test_v05_has_no_official_checker(old):
    outcome = verdict(old)
    assert outcome.faults == [] and (outcome.epochs, outcome.minutes) == (60, 15 * 40 + 1)
    (note,) = outcome.notes
    assert note.startswith("v0.5 has no official checker; ")


@pytest.mark.parametrize(
    ("pattern", "text", "says"),
    [
        ("eval_size: 50000", "eval_size: 49152", "result_1.txt: eval_size is 49152, not 50,000"),
        ('"epoch": 7', '"epoch": 8', "result_1.txt: evaluations must be 4 epochs apart"),
        ("0.7501", "0.7401", "result_1.txt: success is claimed"),
        ("random_seed: 1", "random_seed: 2", "its own seed: 0, 2, 2,"),
        (".*run_clear_caches\n", "", "result_1.txt: no run_clear_caches"),
        (".*train_examples.*\n", "", "preproc_num_train_examples is None, not 1,281,167"),
    ],
)
def test_what_is_wrong_with_v05_is_one_line(pattern, text, says, old):
    edit(old / "results" / "tpu" / "resnet" / "result_1.txt", pattern, text)
    (fault,) = verdict(old).faults
    assert says in fault


def test_formats_are_not_mixed(old, package):
    shutil.copy(result(package, 0), old / "results" / "tpu" / "resnet" / "result_0.txt")
    (fault,) = verdict(old).faults
    assert fault.startswith("some results have logs of v0.5 and some do not: result_1.txt, ")
    (old / "results" / "tpu" / "resnet" / "result_0.txt").unlink()
    assert verdict(old).faults == ["number of runs: found 4, expected 5"]


# --- Every benchmark that has an entry.


def ncf_log(seconds: int, scores: list[float]) -> str:
    """A log of v0.5 as NCF's reference implementation would write it, with a few of its tags."""

    def line(key: str, value: Any = None) -> str:
        text = key if value is None else f"{key}: {json.dumps(value)}"
        return f":::MLPv0.5.0 ncf {1.5e9 + seconds:.9f} (ncf.py:1) {text}\n"

    text = line("run_clear_caches") + line("run_start") + line("input_size", 99_308_850)
    text += line("eval_hp_num_users", 138_493)
    for epoch, score in enumerate(scores):
        text += line("train_epoch", epoch) + line("eval_start", epoch)
        text += line("eval_accuracy", {"epoch": epoch, "value": score})
        text += line("eval_size", 138_493) + line("eval_stop", epoch)
    success = "true" if scores[-1] >= 0.635 else "false"
    return text + line("run_stop", {"success": success}) + line("run_final")


@pytest.fixture
def ncf(tmp_path):
    """A hundred runs, of which two missed the target."""
    folder = tmp_path / "results" / "tpu" / "ncf"
    folder.mkdir(parents=True)
    for i in range(100):
        scores = [0.5, 0.6, 0.636 if i > 1 else 0.61]
        (folder / f"result_{i}.txt").write_text(ncf_log(i, scores))
    return tmp_path


def test_ncf_is_checked_by_its_own_facts(ncf):
    """Its log has no seed, it evaluates every epoch, and half of its runs may miss the target."""
    outcome = verdict(ncf)
    assert outcome.faults == [] and (outcome.benchmark, outcome.runs) == ("ncf", 100)
    assert len([note for note in outcome.notes if "which 50 runs may" in note]) == 2
    assert "seeds" not in outcome.notes[-1]
    path = ncf / "results" / "tpu" / "ncf" / "result_7.txt"
    edit(path, "99308850", "99308849")
    edit(path, '"epoch": 1', '"epoch": 3')
    (ncf / "results" / "tpu" / "ncf" / "result_8.txt").unlink()
    assert verdict(ncf).faults == [
        "result_7.txt: input_size is 99308849, not 99,308,850",
        "result_7.txt: evaluations must be 1 epoch apart, from 1 or before: 1, 4, 3",
        "number of runs: found 99, expected 100",
    ]


def test_ncf_has_no_newer_log(ncf, package):
    for path in (ncf / "results" / "tpu" / "ncf").iterdir():
        path.unlink()
    shutil.copy(result(package, 0), ncf / "results" / "tpu" / "ncf" / "result_0.txt")
    (fault,) = verdict(ncf).faults
    assert fault.startswith("MLPerf has only logs of v0.5 for ncf")


def recipe(entry: rules.Entry) -> Any:
    file, _, name = entry.recipe.partition(":")
    get_config = runpy.run_path(str(ROOT / file))["get_config"]
    return get_config(*([name] if name else []))


def test_the_facts_and_the_recipes_agree():
    """Recipes are plain data that import no code, so these numbers stand in both."""
    for entry in rules.entries().values():
        config = recipe(entry)
        for key, number in entry.declares.items():
            assert not number or config[key] in (0, number), key
        assert set(entry.counts) == set(entry.targets)
        assert config.target == next(iter(entry.targets[entry.form].values()))
    entry = rules.entry("resnet")
    config: Any = recipes.get_config("1632")
    declared = {"num_train_images": config.num_train_images}
    assert declared | {"num_eval_images": config.num_eval_images} == entry.declares
    assert config.steps_per_eval == f"{entry.period} epochs"
    benchmark = benchmarks.load(recipe(rules.entry("ncf")), "")
    assert benchmark.nominal_examples("train") == rules.entry("ncf").counts["v0.5"]["input_size"]


# --- Damaged folders.


RESULT, DESCRIPTION = "results/tpu-v3-8/resnet/result_1.txt", "systems/tpu-v3-8.json"
ALL = [f"results/tpu-v3-8/resnet/result_{i}.txt" for i in range(5)]


@pytest.mark.parametrize(
    ("names", "content", "message"),
    [
        ([RESULT], b"\xff\xfe:::MLLOG", "result_1.txt: is damaged: byte 0 is not UTF-8 text"),
        (ALL, None, "results/tpu-v3-8/resnet has no result_*.txt"),
        ([DESCRIPTION], None, f"{DESCRIPTION} does not exist"),
        ([DESCRIPTION], b"{", f"{DESCRIPTION} is not JSON"),
    ],
)
def test_what_is_damaged_is_one_line(names, content, message, copy, capsys):
    for folder in ("results", "results/tpu-v3-8"):
        (copy / folder / ".DS_Store").write_bytes(b"\0\xff")
    assert verdict(copy).faults == []
    for name in names:
        (copy / name).unlink() if content is None else (copy / name).write_bytes(content)
    assert mlperf_check.main([str(copy)]) == 1
    printed = capsys.readouterr()
    head, fault = printed.out.splitlines()
    assert head.startswith("FAIL resnet on tpu-v3-8") and fault.strip().startswith(message)
    assert printed.err == ""


def test_no_message_has_the_place_of_the_copy(copy):
    result(copy, 4).unlink()
    edit(result(copy, 1), r'"seed", "value": 1\b', '"seed", "value": 2')
    edit(result(copy, 2), '"global_batch_size", "value": 1632', '"global_batch_size", "value": 1')
    faults = verdict(copy).faults
    assert len(faults) >= 3 and not [f for f in faults if tempfile.gettempdir() in f]
    assert any(fault.endswith("Batch sizes in files do not match.") for fault in faults)


def test_nothing_is_said_twice(copy):
    """A key is missing in two runs: the package is then not in order, which is no news."""
    for i in (1, 2):
        edit(result(copy, i), r'.*"lars_opt_momentum".*\n', "")
    faults = verdict(copy).faults
    assert [fault.split(":")[0] for fault in faults] == ["result_1.txt", "result_2.txt"]


def test_checking_changes_nothing(package):
    def files() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in sorted(package.rglob("*")) if p.is_file()}

    before = files()
    verdict(package)
    assert files() == before


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
    assert why == "  no run has ended"


@pytest.mark.parametrize("made", ["", "results", "results/tpu/minigo"])
def test_nothing_to_check(made, tmp_path, capsys):
    (tmp_path / made).mkdir(parents=True, exist_ok=True)
    assert mlperf_check.main([str(tmp_path)]) == 1
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith(f"ERROR: {tmp_path}")


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        *(([1, 2, 3, 4, 100], 3), ([5, 1, 3], 3), ([None, 1, 2, 3, 4], 3)),
        *(([None, None, 2, 3, 4], None), ([1, 2], None), ([], None)),
    ],
)
def test_olympic_mean(values, mean):
    assert mlperf_logs.olympic(values) == mean


def test_reading_finds_a_log_among_other_lines():
    row = {"time_ms": 60_000, "key": "run_start", "value": None, "metadata": {}}
    stop = {**row, "time_ms": 120_000, "key": "run_stop", "metadata": {"status": "aborted"}}
    run = mlperf_logs.read(f"step 1\nI0101 :::MLLOG {json.dumps(row)}\n:::MLLOG {json.dumps(stop)}")
    assert run.minutes == 1 and not run.success and run.epochs is None
    assert mlperf_logs.read("").minutes is None
    with pytest.raises(UserError, match="line 2 is damaged"):
        mlperf_logs.read("\n:::MLLOG {}")
