"""What cannot be a run of MLPerf's is refused before anything is compiled."""

import subprocess
import sys
from typing import Any

import pytest
from mlperf_fixture import tiny

import train
from engine import mlperf, session


def test_checkpoints_alone_are_a_run(tiny_records, tmp_path):
    (tmp_path / "checkpoints" / "12").mkdir(parents=True)
    with pytest.raises(mlperf.MlperfError, match="may not be resumed"):
        train.train_and_evaluate(tiny(tiny_records), str(tmp_path))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"mlperf": {"format": "mlog"}}, "config.mlperf.format='mlog': use '' or 'mllog' or"),
        ({"mlperf": {"status": "home"}}, "config.mlperf.status='home'"),
        ({"mlperf": {"division": "none"}}, "config.mlperf.division='none'"),
        ({"mlperf": {"org": ""}}, "config.mlperf.org=''"),
        ({"num_eval_images": 0}, "--config.num_train_images=N"),
        ({"stop_at_target": False}, "--config.stop_at_target=True"),
        ({"target": 0.5}, "config.target=0.5: the quality of MLPerf's resnet is 0.759"),
        ({"learning_rate_schedule": "step"}, "config.learning_rate_schedule='step'"),
    ],
)
def test_slips_are_refused(overrides, says, tiny_records, tmp_path, monkeypatch):
    monkeypatch.setattr(train.Trainer, "_compile", lambda *_: 1 / 0)
    with pytest.raises(train.USER_ERRORS) as caught:
        train.train_and_evaluate(tiny(tiny_records, **overrides), str(tmp_path))
    assert says in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / mlperf.LOG).exists()


def test_training_alone_is_refused(tiny_records, tmp_path):
    with pytest.raises(mlperf.MlperfError, match="--mode=train_and_eval"):
        train.train_and_evaluate(tiny(tiny_records), str(tmp_path), evaluating=False)


def test_a_package_that_is_missing_is_named(tiny_records, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlperf_logging.mllog.mllog", None)
    with pytest.raises(mlperf.MlperfError, match="pip install mlperf-logging"):
        train.train_and_evaluate(tiny(tiny_records), str(tmp_path))


def test_a_log_that_cannot_be_written_ends_the_run_in_one_line(tmp_path):
    (tmp_path / mlperf.LOG).mkdir(parents=True)
    file = mlperf._File(str(tmp_path))
    file._text = "a line\n"
    with pytest.raises(mlperf.MlperfError, match=f"cannot write {tmp_path}"):
        file.flush()


def test_the_last_words_come_with_any_failure(capsys):
    """Of a thread such as the watchdog's, too, which ends the process at once."""
    said: list[str] = []
    session.on_failure(lambda: said.append("aborted"))
    session._say("a host is lost")
    session.on_failure(None)
    session._say("again")
    assert said == ["aborted"] and "a host is lost" in capsys.readouterr().err


def test_caches_are_dropped_only_where_that_is_allowed(monkeypatch):
    codes: list[int] = []

    def run(command: list[str], **_: Any) -> Any:
        if command[0] == "sudo":
            raise FileNotFoundError
        assert "drop_caches" in command[-1]
        return subprocess.CompletedProcess(command, codes.pop())

    monkeypatch.setattr(subprocess, "run", run)
    codes[:] = [0]
    assert mlperf.clear_caches() is True
    codes[:] = [1]
    assert mlperf.clear_caches() is False
