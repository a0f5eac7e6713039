"""Whole runs of a tiny Transformer: golden losses, resuming, files of --mode=eval, translating."""

import importlib
import io
import pathlib
import shutil
import sys
from typing import Any

import numpy as np
import pytest

import run as runs
import train
from modes import evaluating
from scripts import translate
from tests.benchmarks.translation.transformer.test_transformer import TINY
from tests.test_train import assert_same_state, fresh_signals, rows, state_on_disk  # noqa: F401

RUN: dict[str, Any] = {
    **{
        "train_batch_size": 8,
        "eval_batch_size": 8,
        "train_steps": "4",
        "log_step_count_steps": "1",
    },
    **{"steps_per_eval": "4", "steps_per_checkpoint": "2", "warmup_steps": "2", "target": 1.0},
    **{"base_learning_rate": 0.01, "dropout": 0.3},
}
# Of 2026, float32 on a CPU. A drift of the data's order, the dropout, the initial weights, the loss
# or the optimizer would change them.
GOLDEN = [3.187019, 3.163398, 3.168043, 3.018276]


def settings(data: str, workdir: Any, **overrides: Any) -> Any:
    config = importlib.import_module("configs.transformer").get_config()
    config.update({"data_dir": data, **TINY, **RUN, **overrides})
    return runs.read(config.lock(), str(workdir))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_sentences):
    """The workdir of a run of 4 steps."""
    workdir = str(tmp_path_factory.mktemp("trained"))
    train.train_and_evaluate(settings(tiny_sentences, workdir))
    return workdir


def test_golden_losses(trained):
    losses = [row["loss"] for row in rows(trained) if row["split"] == "train"]
    np.testing.assert_allclose(losses, GOLDEN, rtol=1e-4)


def test_a_resumed_run_is_the_same_to_the_bit(trained, tiny_sentences, tmp_path):
    """The checkpoint of step 2 is in the middle of an epoch; there is dropout."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    train.train_and_evaluate(settings(tiny_sentences, tmp_path))
    assert_same_state(state_on_disk(str(tmp_path), 4), state_on_disk(trained, 4))


def test_evaluation_writes_the_translations(trained, tiny_sentences):
    scores = evaluating.evaluate(settings(tiny_sentences, trained), "latest", 0)
    assert 0 <= scores["BLEU"] < 1
    folder = pathlib.Path(trained, "eval")
    texts = folder.joinpath("translations.txt").read_text().split("\n")
    assert len(texts) == 24 and texts[-1] == ""
    assert len(folder.joinpath("translations.tsv").read_text().splitlines()) == 24
    assert "of 23 translations equal" in folder.joinpath("sentences.txt").read_text()


def typed(monkeypatch, capfdbinary, text: bytes, *flags: str) -> list[bytes]:
    """The lines that the tool prints for a text on its standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    translate.main(list(flags))
    return capfdbinary.readouterr().out.split(b"\n")


def test_the_tool_translates_as_the_evaluation_does(
    trained, tiny_sentences, monkeypatch, capfdbinary
):
    """Whatever the other lines are; an empty line stays empty."""
    evaluating.evaluate(settings(tiny_sentences, trained), "latest", 0)
    wanted = pathlib.Path(trained, "eval", "translations.tsv").read_text().splitlines()[1:]
    sources, targets = zip(*(line.split("\t")[:2] for line in wanted), strict=True)
    text = "\ufeff\n" + "\n".join(f" {source}\r" for source in sources[::-1]) + "\n"
    found = typed(monkeypatch, capfdbinary, text.encode(), f"--workdir={trained}", "--batch-size=5")
    assert [line.decode() for line in found] == ["", *targets[::-1], ""]


def test_mistakes_of_the_tool(trained, tiny_sentences, tmp_path, monkeypatch, capfdbinary):
    with pytest.raises(SystemExit, match="there is no .*checkpoints"):
        typed(monkeypatch, capfdbinary, b"", f"--workdir={tmp_path}")
    with pytest.raises(SystemExit, match="line 2 of the input is not UTF-8"):
        typed(monkeypatch, capfdbinary, b"a\n\xff\n", f"--workdir={trained}")
    (tmp_path / "vocab.other").write_text(
        pathlib.Path(tiny_sentences, "vocab.toy.subwords").read_text().replace("'a_'", "'z_'")
    )
    with pytest.raises(SystemExit, match="the vocabulary in .* is not the one of"):
        typed(monkeypatch, capfdbinary, b"", f"--workdir={trained}", f"--data_dir={tmp_path}")
