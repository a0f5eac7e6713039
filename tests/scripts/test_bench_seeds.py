"""Results over several seeds: each run has its own folder; mean and range are printed."""

import json
import subprocess
import types

import pytest

from errors import UserError
from scripts.bench import seeds
from tests.conftest import FIXTURES


def test_the_table_has_mean_and_range():
    scores = {0: {"score": 0.5, "loss": 2.0}, 7: {"score": 0.75, "loss": 1.0}}
    assert seeds.table({**scores, 9: {"score": 1.0, "loss": 0.0}}).splitlines() == [
        "score: mean 0.7500, from 0.5000 to 1.0000 over 3 seeds (0: 0.5000, 7: 0.7500, 9: 1.0000)",
        "loss: mean 1.0000, from 0.0000 to 2.0000 over 3 seeds (0: 2.0000, 7: 1.0000, 9: 0.0000)",
    ]


@pytest.mark.long
def test_runs_of_two_seeds(tiny_texts, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FIXTURES))
    flags = ["--config=tests/fixtures/recipes/languages.py", f"--config.data_dir={tiny_texts}"]
    sizes = ["--config.num_train_texts=72", "--config.num_eval_texts=23"]
    short = ["--config.train_steps=2", "--config.steps_per_eval=2"]
    words = ["--seeds=3,4", f"--out={tmp_path}", "--", *flags, *sizes, *short]
    assert seeds.main(words) == 0
    output = capsys.readouterr().out
    assert "accuracy: mean 0." in output and "over 2 seeds (3: 0." in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seed_3", "seed_4"]


def test_recipes_by_name(tmp_path, capsys, monkeypatch):
    runs = []

    def train(seed, workdir, flags):
        runs.append((workdir, flags))
        return {"score": len(runs) / 10}

    monkeypatch.setattr(seeds, "train", train)
    words = ["--names=plain,mild", "--seeds=3,4", f"--out={tmp_path}", "--"]
    assert seeds.main([*words, "--config=x.py", "--config.num_filters=8"]) == 0
    assert runs == [
        (f"{tmp_path}/{name}/seed_{seed}", [f"--config=x.py:{name}", "--config.num_filters=8"])
        for seed in (3, 4)
        for name in ("plain", "mild")
    ]
    assert capsys.readouterr().out.splitlines() == [
        "plain score: mean 0.2000, from 0.1000 to 0.3000 over 2 seeds (3: 0.1000, 4: 0.3000)",
        "mild score: mean 0.3000, from 0.2000 to 0.4000 over 2 seeds (3: 0.2000, 4: 0.4000)",
    ]


def test_a_run_that_fails_is_named(tmp_path, capfd):
    assert seeds.main(["--seeds=1", f"--out={tmp_path}", "--", "--config=configs/none.py"]) == 1
    assert f"ERROR: the run with seed 1 in {tmp_path}/seed_1 ended" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        seeds.main(["--seeds=one"])


def test_the_last_evaluation_counts_and_the_minutes_are_printed(tmp_path, capsys, monkeypatch):
    commands, clock = [], iter([100.0, 6106.0])

    def run(command, cwd):
        commands.append(command[1:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(seeds.subprocess, "run", run)
    with pytest.raises(UserError, match=f"^the run in {tmp_path} has no evaluation$"):
        seeds.train(5, str(tmp_path), ["--config=x.py"])
    assert commands == [["main.py", "--config=x.py", "--config.seed=5", f"--workdir={tmp_path}"]]
    rows = [{"split": "eval", "step": step, "score": step / 10} for step in (2, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(seeds, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    assert seeds.train(5, str(tmp_path), []) == {"score": 0.4}
    assert capsys.readouterr().out == f"{tmp_path} took 100.1 minutes\n"
