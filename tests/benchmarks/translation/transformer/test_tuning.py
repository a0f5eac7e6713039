"""configs/finetune.py:transformer: other text with the same vocabulary."""

import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import pytest

import benchmarks
import train
from common.errors import ConfigError, UserError
from common.trees import by_name
from configs import finetune, transformer
from engine.checkpoint import model_source
from tests.benchmarks.translation import sentences_fixture
from tests.conftest import resolved

SIZES = {"num_layers": 1, "width": 8, "mlp_width": 16, "num_heads": 2}


def trained(recipe, data_dir, workdir, **values) -> list[str]:
    """Trains 2 steps; returns what is said about the config."""
    config: Any = recipe()
    config.update({"data_dir": str(data_dir), "row_length": sentences_fixture.LENGTH})
    config.update({"eval_lengths": (16,), "train_batch_size": 8, "eval_batch_size": 8})
    config.update({"precision": "float32", "input_streams": 2, "compilation_cache": ""})
    config.update({"train_steps": "2", "warmup_steps": "1", "log_step_count_steps": "1"})
    config.update(values)
    settings, notes = resolved(config, workdir)
    train.train_and_evaluate(settings, evaluating=False)
    return notes


@pytest.fixture(scope="module")
def model(tiny_sentences, tmp_path_factory):
    """A workdir."""
    workdir = tmp_path_factory.mktemp("model") / "run"
    trained(transformer.get_config, tiny_sentences, workdir, **SIZES)
    return workdir


@pytest.mark.long
def test_a_model_is_fine_tuned(model, tiny_sentences, tmp_path):
    """On another pair: the vocabulary is the same, the records and references are not."""
    data = shutil.copytree(tiny_sentences, tmp_path / "data")
    (data / "references.txt").write_text("another language\n" * 23)
    notes = trained(finetune.RECIPES["transformer"], data, tmp_path / "run", init_from=str(model))
    assert {f"config.{key}" for key in SIZES} == {note.partition("=")[0] for note in notes}
    rows = (tmp_path / "run" / "init_from.txt").read_text().splitlines()
    assert rows and {row.partition("\t")[0] for row in rows} == {"taken"}
    before, after = (model_source.load(str(folder)) for folder in (model, tmp_path / "run"))
    far = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), before.params, after.params)
    assert 0 < max(by_name(far).values()) <= 2e-4  # two steps of Adam with at most 1e-4


@pytest.mark.long
@pytest.mark.parametrize("change", ["order", "size"])
def test_another_vocabulary_is_refused(change, model, tiny_sentences, tmp_path):
    data = pathlib.Path(shutil.copytree(tiny_sentences, tmp_path / "data"))
    lines = (data / "vocab.toy.subwords").read_text().splitlines()
    lines[2:4] = lines[3:1:-1] if change == "order" else [*lines[2:4], "'longer'"]
    (data / "vocab.toy.subwords").write_text("\n".join([*lines, ""]))
    with pytest.raises(UserError, match="was trained on other data: vocabulary"):
        trained(finetune.RECIPES["transformer"], data, tmp_path / "run", init_from=str(model))


def test_a_model_must_be_named():
    config = finetune.get_config("transformer").lock()
    with pytest.raises(ConfigError, match=r"config.init_from names no model: give [^\n]*$"):
        benchmarks.load(config, "").check_random_start(1)
