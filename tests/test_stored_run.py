"""A run that an older version of the program left behind still evaluates and resumes.

An archive of `data` holds a run that stopped at step 4 of 8, and what the same program then
computed up to step 8 (golden.json).
"""

import json
import pathlib
import shutil
import tarfile

import jax
import numpy as np
import pytest

import train
from commands import evaluating
from configs import ncf
from engine.run import read_settings
from tests.conftest import make_tiny_config
from tests.test_train import fresh_signals, rows  # noqa: F401 (a fixture)

FOLDER = pathlib.Path(__file__).parent / "data"
STEPS = {
    **{"train_steps": "8", "steps_per_checkpoint": "4", "steps_per_eval": "4"},
    **{"log_step_count_steps": "2", "keep_checkpoints": 5, "compilation_cache": ""},
}


def resnet(folder):
    return make_tiny_config(
        folder, resnet_depth=18, num_filters=2, moving_average_decay=0.9, **STEPS
    )


def recommender(folder):
    config = ncf.get_config()
    config.update(
        {
            **{"data_dir": folder, "num_users": 23, "num_items": 12, "num_ratings": 46},
            **{"min_ratings": 2, "eval_negatives": 50, "gmf_dim": 4, "mlp_layers": (8, 8, 4)},
            **{"train_batch_size": 24, "eval_batch_size": 8, "base_learning_rate": 0.02},
            **{"stop_at_target": False, **STEPS},
        }
    )
    return config


# By the commit that made the run: the fixture of its data, and its config.
RUNS = {"e107b0f": ("tiny_records", resnet), "0f1bb6c": ("tiny_ratings", recommender)}


@pytest.fixture(autouse=True)
def optimized():
    """The golden values are those of optimized programs."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, False)
    yield
    jax.config.update(name, before)


@pytest.fixture(params=RUNS)
def stored(request, tmp_path):
    """(settings, golden values) of the stored run."""
    with tarfile.open(FOLDER / f"run_of_{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    golden = json.loads((tmp_path / "golden.json").read_text())
    data, make_config = RUNS[request.param]
    config = make_config(request.getfixturevalue(data))
    return read_settings(config, str(tmp_path / "run")), golden


def values(metrics, split, step):
    (row,) = [row for row in metrics if (row["split"], row["step"]) == (split, step)]
    clock = ("second", "seconds", "input_", "decode_busy", "eta_")
    return {k: v for k, v in row.items() if k != "split" and not any(c in k for c in clock)}


def test_an_old_checkpoint_evaluates_to_the_same_scores(stored):
    settings, golden = stored
    scores = evaluating.evaluate(settings, "4", 0.0)
    expected = values(golden["rows"], "eval", 4)
    assert scores == pytest.approx({k: expected[k] for k in scores}, rel=1e-5)


@pytest.mark.long
def test_an_old_run_resumes_to_the_same_metrics(stored):
    settings, golden = stored
    shutil.rmtree(pathlib.Path(settings.workdir) / "eval", ignore_errors=True)
    train.train_and_evaluate(settings)
    metrics = rows(settings.workdir)
    for split, step in (("train", 6), ("train", 8), ("eval", 8)):
        got, expected = values(metrics, split, step), values(golden["rows"], split, step)
        assert got.keys() == expected.keys()
        for name in expected:
            # Another kind of CPU rounds elsewhere, and a ReLU near 0 then moves a whole gradient.
            rtol = 2e-2 if name == "gradient_norm" else 1e-3
            np.testing.assert_allclose(got[name], expected[name], rtol=rtol, err_msg=name)
