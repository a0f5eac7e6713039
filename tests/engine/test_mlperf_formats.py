"""A run that cannot be MLPerf's is refused before anything is compiled."""

import json
import sys
import types
from typing import Any

import jax
import pytest

import benchmarks
import train
from benchmarks import mlperf as rules
from common.errors import ConfigError, UserError
from engine import mlperf, sharding
from engine.cluster import processes
from engine.plan import read_settings
from tests.helpers.mlperf_fixture import (
    TINY_LARS,
    Clock,
    made_up_mesh,
    mlperf_config,
    tiny,
    write_run,
)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"mlperf": {"org": ""}}, "config.mlperf.org=''"),
        ({"train_steps": "9 weeks"}, "train_steps='9 weeks'"),
        ({"stop_at_target": False}, "--config.stop_at_target=True"),
        ({"target": 0.5}, "config.target=0.5: "),
        ({"learning_rate_schedule": "step"}, "'sgd_opt_end_learning_rate'"),
        ({"weight_decay": 3e-5}, "sgd_opt_weight_decay=3e-05 failed test: is_integer(math.log2("),
        ({"optimizer": "adam"}, "opt_name=adam failed test: v['value'] in ['sgd', 'lars']"),
        ({**TINY_LARS, "lars_epsilon": 1e-6}, "lars_epsilon=1e-06 failed test: v['value'] == 0"),
        ({**TINY_LARS, "mlperf": {"format": "v0.5"}}, "configs/mlperf_resnet50.py:v0.5"),
    ],
)
def test_mistakes_are_refused(overrides, says, tmp_path, monkeypatch):
    """Before the data are read, which may take long."""
    monkeypatch.setattr(train.Trainer, "_compile", lambda *_: 1 / 0)
    with pytest.raises(UserError) as caught:
        config = tiny("/absent", **overrides)
        train.train_and_evaluate(read_settings(config, str(tmp_path)))
    assert says in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / mlperf.LOG).exists()


@pytest.mark.parametrize(
    ("form", "counts", "key"),
    [("mllog", (90, 24), "num_eval_images=24"), ("v0.5", (89, 23), "num_train_images=89")],
)
def test_data_are_refused_before_the_clock(form, counts, key, tiny_records, tmp_path, monkeypatch):
    monkeypatch.setattr(train.Trainer, "_compile", lambda *_: 1 / 0)
    monkeypatch.setattr(mlperf._Writer, "describe", lambda *_: 1 / 0)
    values: dict[str, Any] = dict(zip(("num_train_images", "num_eval_images"), counts, strict=True))
    if form == "v0.5":
        values["learning_rate_schedule"] = "step"
    with pytest.raises(UserError, match=f"config.{key}, but"):
        config = tiny(tiny_records, **values, mlperf={"format": form})
        train.train_and_evaluate(read_settings(config, str(tmp_path)))
    assert not (tmp_path / mlperf.LOG).exists()


def test_a_benchmark_without_a_module_has_no_log(monkeypatch):
    new: Any = types.ModuleType("benchmarks.new")
    new.__path__ = []
    monkeypatch.setitem(sys.modules, "benchmarks.new", new)
    known = {name: f"benchmarks.{name}" for name in ("new", "ncf", "resnet")}
    monkeypatch.setattr(benchmarks, "modules", lambda: known)
    for name in ("new", "absent"):
        with pytest.raises(ConfigError, match=f"'{name}' has no .* these have one: ncf, resnet$"):
            rules.entry(name)
    assert list(rules.entries()) == ["ncf", "resnet"]


def test_a_log_that_cannot_be_written_ends_the_run_in_one_line(tmp_path):
    (tmp_path / "run" / mlperf.LOG).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as caught:
        patch.setattr(mlperf, "check_run", lambda *_: None)
        write_run(mlperf_config(), str(tmp_path / "run"), [], Clock())
    assert str(caught.value).startswith(f"cannot write {tmp_path}/run/{mlperf.LOG}: ")


def test_the_last_words_come_with_any_failure(capsys, monkeypatch):
    """Also if a thread such as the watchdog's ends the process at once."""
    written: list[str] = []
    monkeypatch.setattr(processes, "_exit_now", lambda code: written.append(f"exit {code}"))
    processes.on_failure(lambda: written.append("aborted"))
    processes.follow("a host is lost", 1)
    processes.on_failure(None)
    processes.follow("again", 1)
    assert written == ["aborted", "exit 1", "exit 1"]
    assert "a host is lost" in capsys.readouterr().err


def test_chips_are_counted_and_not_their_cores(monkeypatch):
    def chips(per_chip: int) -> int:
        mesh = made_up_mesh(mlperf_config(), per_chip)
        return mlperf._machine(sharding.num_chips(mesh))["accelerators_per_node"]

    assert (chips(1), chips(2)) == (8, 4)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert (chips(1), chips(2)) == (4, 2)


@pytest.mark.parametrize(
    ("here", "another_missed", "claimed"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_caches_are_dropped_if_they_are_on_every_host(
    here, another_missed, claimed, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(mlperf, "clear_caches", lambda: here)
    monkeypatch.setattr(sharding, "any_process", lambda missed: missed or another_missed)
    config = mlperf_config(mlperf={"clear_caches": True})
    write_run(config, str(tmp_path / "run"), [], Clock())
    text = (tmp_path / "run" / mlperf.LOG).read_text()
    assert f'"cache_clear", "value": {json.dumps(claimed)}' in text
    warned = [r.getMessage() for r in caplog.records if "file caches" in r.getMessage()]
    assert len(warned) == (not claimed)
    for text in warned:
        assert "needs root or sudo -n" in text
