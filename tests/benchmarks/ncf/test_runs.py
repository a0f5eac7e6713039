"""Made-up ratings, runs that come near their ceiling, and the command line."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import predict
import train
from benchmarks.base import Target
from benchmarks.ncf.preparation import ratings
from benchmarks.ncf.ratings import ML_20M
from commands.report.record import Record
from common import keys
from common.errors import DataError, UserError
from configs import ncf, ncf_synthetic
from engine import evaluate, locations
from engine.checkpoint import model_source
from engine.evaluate import examining
from engine.plan import read_settings
from scripts import prepare
from tests.conftest import resolved
from tests.test_train import assert_same_state, state_on_disk


def test_counts_add_up_and_are_bounded():
    for users, items, total in ((100, 100, 2000), (100, 400, 3333), (50, 120, 1500)):
        counts = ratings.World(users, items, total).counts
        assert counts.sum() == total and counts.min() >= 20 and counts.max() <= items * 3 // 4


def test_picks_are_drawn_as_the_model_says():
    """Of three items with two drawn: the chance of each set, by hand."""
    draw, p = np.random.default_rng(0), [0.2, 0.3, 0.5]
    picks = [ratings.pick(draw, np.log(p), 2) for _ in range(20_000)]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        expected = p[a] * p[b] / (1 - p[a]) + p[b] * p[a] / (1 - p[b])
        actual = np.mean([set(row) == {a, b} for row in picks])
        assert actual == pytest.approx(expected, abs=0.02)
    assert np.mean([row[0] < row[1] for row in picks]) == pytest.approx(0.5, abs=0.02)


def test_the_ceiling_is_chance_if_users_have_no_taste():
    world = ratings.World(600, 1200, 12_000)
    world._taste[:] = 0
    world._popularity[:] = np.random.default_rng(0).normal(size=1200) * 1e-6
    actual = world.baselines(np.zeros(1200, np.int64))
    assert actual["popularity_hr_at_10"] == 0  # all the same: ties are lost
    kinds = 1200 * (1 - (1 - 1 / 1200) ** 999)  # different items in 999 draws
    assert actual["ceiling_hr_at_10"] == pytest.approx(10 / (kinds + 1), abs=0.02)


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    """(the folder of a small set of ratings, the last line of the preparation)."""
    folder = tmp_path_factory.mktemp("made")
    arguments = ["--users=700", "--items=300", "--ratings=35000", f"--out={folder}"]
    return str(folder), prepare.make("ratings", arguments)


def test_made_ratings_have_movielens_form(made_up, tmp_path):
    folder, output = made_up
    lines = Path(folder, "ratings.csv").read_text().splitlines()
    assert lines[0] == "userId,movieId,rating,timestamp" and len(lines) == 35_001
    rows = [line.split(",") for line in lines[1:]]
    pairs = [(int(user), int(item)) for user, item, _, _ in rows]
    assert pairs == sorted(set(pairs))
    assert {stars for _, _, stars, _ in rows} == {str(k / 2) for k in range(1, 11)}
    assert min(np.bincount([user for user, _ in pairs])[1:]) >= 20
    known = json.loads(Path(folder, "baselines.json").read_text())
    assert f"{known['ceiling_hr_at_10']:.3f} at best" in output
    prepare.make("ratings", ["--users=700", "--items=300", "--ratings=35000", f"--out={tmp_path}"])
    for name in ("ratings.csv", "baselines.json"):  # a function of the arguments
        assert (tmp_path / name).read_bytes() == Path(folder, name).read_bytes()


@pytest.mark.parametrize(
    "arguments", [["--ratings=100"], ["--ratings=99999999"], ["--users=0"], ["--items=x"]]
)
def test_arguments_that_cannot_work(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        prepare.make("ratings", ["--out=x", *arguments])
    message = capsys.readouterr().err
    assert caught.value.code == 2
    assert message.startswith("prepare ratings: argument") and message.count("\n") == 1


@pytest.mark.long
def test_training_comes_near_the_ceiling_and_far_beyond_popularity(made_up, tmp_path):
    """A run of train.py on a small set comes more than half of the way to the ceiling."""
    folder, _ = made_up
    config = ncf_synthetic.get_config()
    config.update({"num_users": 700, "num_items": 300, "num_ratings": 35_000})
    config.update({"data_dir": folder, "train_batch_size": 1024, "train_steps": "4 epochs"})
    config.update({"steps_per_eval": "4 epochs", "steps_per_checkpoint": "", "gmf_dim": 8})
    config.update({"compilation_cache": "", "mlp_layers": (16, 16, 8), "base_learning_rate": 0.01})
    scores = train.train_and_evaluate(read_settings(config.lock(), str(tmp_path)))
    known = json.loads(Path(folder, "baselines.json").read_text())
    low, high = known["popularity_hr_at_10"], known["ceiling_hr_at_10"]
    assert high - low > 0.2
    assert low + 0.5 * (high - low) < scores["hr_at_10"] < high + 0.04  # four standard errors / 2


# --- Tiny runs.


TINY: dict[str, Any] = {
    **{"min_ratings": 2, "eval_negatives": 20, "train_batch_size": 16, "eval_batch_size": 8},
    **{"train_steps": "12", "steps_per_eval": "4", "log_step_count_steps": "4", "gmf_dim": 4},
    **{"steps_per_checkpoint": "3", "mlp_layers": (8, 8), "compilation_cache": ""},
}


def settings(workdir, **overrides):
    """The settings of a tiny run in this process."""
    config = ncf.get_config()
    config.update({**TINY, **overrides})
    return read_settings(config.lock(), str(workdir))


@pytest.mark.long
@pytest.mark.parametrize(
    ("held_out", "other"), [("latest", {"eval_holdout": "random"}), ("random", {"seed": 1})]
)
def test_a_run_resumes_bit_for_bit(held_out, other, tiny_ratings, tmp_path, caplog):
    """It is not evaluated on other held-out items, which it was trained on."""
    at_once, in_parts = tmp_path / "at_once", tmp_path / "in_parts"
    keys = {"data_dir": tiny_ratings, "stop_at_target": False, "eval_holdout": held_out}
    with caplog.at_level("INFO", logger="tpu_suite"):
        train.train_and_evaluate(settings(at_once, **keys))
        assert "1 of 24 users" in caplog.text and "fewer than 2 ratings" in caplog.text
        train.train_and_evaluate(settings(in_parts, **keys, train_steps="7"))
        train.train_and_evaluate(settings(in_parts, **keys))
    assert "resuming at step 7" in caplog.text
    assert_same_state(state_on_disk(at_once, 12), state_on_disk(in_parts, 12))
    with pytest.raises(DataError, match=f"held_out: '{held_out}.* in the checkpoint, 'random"):
        evaluate.evaluate(settings(in_parts, **{**keys, **other}), "latest", 0)


@pytest.mark.parametrize(
    ("keys", "sizes", "target", "patience"),
    [({}, None, 0.0, 3), ({"target": 0.5}, None, 0.5, 0), ({}, "those of the data", 0.635, 0)],
)
def test_mlperfs_target_is_for_ml_20m(
    keys, sizes, target, patience, tiny_ratings, tmp_path, monkeypatch
):
    if sizes:
        loaded: Any = settings(tmp_path, data_dir=tiny_ratings).load_benchmark("")
        loaded.open("train")
        data = loaded.data
        counts = data.num_users, data.num_items, data.num_positives + data.num_users
        monkeypatch.setattr(
            "benchmarks.ncf.settings.ML_20M", dict(zip(ML_20M, counts, strict=True))
        )
    config = settings(tmp_path, data_dir=tiny_ratings, **keys)
    benchmark = config.load_benchmark("")
    assert benchmark.open("train") > 0
    assert (benchmark.targets[0].value, benchmark.default_patience) == (target, patience)
    assert len(benchmark.run_notes(1, True)) == bool(patience)


@pytest.mark.long
def test_a_run_on_own_ratings_ends_when_its_score_stops_rising(tiny_ratings, tmp_path, caplog):
    keys = {"data_dir": tiny_ratings, "train_steps": "400", "base_learning_rate": 0.01}
    with caplog.at_level("INFO", logger="tpu_suite"):
        train.train_and_evaluate(settings(tmp_path, **keys))
        train.train_and_evaluate(settings(tmp_path, **keys))
    assert "stopped because 3 evaluations brought no better hr at 10" in caplog.text
    assert "already finished: " in caplog.text and "target" not in caplog.messages[-1]
    for told in (model_source.settings(str(tmp_path)), settings(tmp_path, **keys)):
        record = Record.read(told)
        assert record.end.endswith("because 3 evaluations brought no better hr at 10.")
        with examining(told, "latest") as examination:
            evaluated = examination.run.benchmark.targets
        assert record.benchmark.targets == evaluated == (Target("hr_at_10", 0.0),)


@pytest.mark.long
def test_a_last_run_trains_on_everything(tiny_ratings, tmp_path, caplog, capsys):
    """As long as the best evaluation of the first run; it resumes bit for bit."""
    first, at_once, in_parts = (tmp_path / name for name in ("first", "at_once", "in_parts"))
    keys: dict[str, Any] = {"data_dir": tiny_ratings, "stop_at_target": False}
    train.train_and_evaluate(settings(first, **keys, eval_holdout="latest", patience=0))
    lines = map(json.loads, (first / "metrics.jsonl").read_text().splitlines())
    rates = {row["step"]: row["hr_at_10"] for row in lines if row["split"] == "eval"}
    best = min(step for step, rate in rates.items() if rate == max(rates.values()))

    config = ncf.get_config()
    keys |= {"eval_holdout": "none", "steps_of": str(first), "patience": 2}
    config.update({**TINY, **keys, "train_steps": "99 epochs"})
    asked, notes = resolved(config, at_once)
    assert (asked.train_steps, asked.config["train_steps"]) == (str(best), str(best))
    (unlike,) = [note for note in notes if note.startswith(f"unlike {first}: ")]
    assert "config.eval_holdout was 'latest', is now 'none'" in unlike
    with caplog.at_level("INFO", logger="tpu_suite"):
        assert train.train_and_evaluate(asked) == {}
        assert "without effect: config.patience" in caplog.text
        shutil.copytree(at_once, in_parts)
        shutil.rmtree(in_parts / f"checkpoints/{best}")
        (first / "metrics.jsonl").unlink()
        train.train_and_evaluate(resolved(config, in_parts)[0])
        assert f"resuming at step {(best - 1) // 3 * 3}" in caplog.text
    assert_same_state(state_on_disk(at_once, best), state_on_disk(in_parts, best))
    model = model_source.load(str(at_once))
    assert (model.step, model.manifest["num_train_examples"]) == (best, 46 * 5)
    assert '"split": "eval"' not in (at_once / "metrics.jsonl").read_text()

    # One epoch has each row of the file.
    benchmark = asked.load_benchmark("")
    benchmark.open("train")
    (batch,) = itertools.islice(benchmark.train_batches(46 * 5, 0, 1, 0), 1)
    own = [batch[side][batch["label"]] for side in ("user", "item")]
    rows = Path(tiny_ratings, "ratings.csv").read_text().split()[1:-1]
    pairs = {tuple(map(int, row.split(",")[:2])) for row in rows}
    users, items = (sorted(ids) for ids in map(set, zip(*pairs, strict=True)))
    assert {(users[user], items[item]) for user, item in zip(*own, strict=True)} == pairs

    with pytest.raises(DataError, match="config.eval_holdout='none': .* nothing to evaluate"):
        evaluate.evaluate(asked, "latest", 0)
    with pytest.raises(DataError, match="held_out: 'none' in the checkpoint, 'latest' in"):
        evaluate.evaluate(settings(at_once, data_dir=tiny_ratings), "latest", 0)
    capsys.readouterr()
    assert predict.main([f"--workdir={at_once}", "--user=8", "--top=3", "--format=json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert len(row["items"]) == 3
    assert not {item["item"] for item in row["items"]} & {item for user, item in pairs if user == 8}


def test_without_data_one_line_says_so(tmp_path, monkeypatch):
    for name in ("MLP_PATH_GCS_NCF", "TPU_MODEL_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="data_dir=DIR or set MLP_PATH_GCS_NCF$"):
        locations.data_dir(keys.read_config(locations.Keys, ncf.get_config()))
    monkeypatch.setattr(train.Trainer, "_compile", None)
    with pytest.raises(UserError) as caught:
        train.train_and_evaluate(settings(tmp_path, data_dir=str(tmp_path)))
    message = str(caught.value)
    assert message.startswith(f"no ratings in '{tmp_path}'") and "\n" not in message
