"""Whole runs of a tiny GNMT: golden losses, resuming, translating; mistakes in a config."""

import importlib
import io
import pathlib
import shutil
import sys
from typing import Any

import jax
import numpy as np
import pytest

import benchmarks
import run as runs
import train
from benchmarks.translation.vocabulary import EOS
from errors import UserError
from modes import evaluating
from scripts import translate
from tests.benchmarks.translation.transformer.test_runs import typed
from tests.test_train import assert_same_state, fresh_signals, rows, state_on_disk  # noqa: F401

TINY: dict[str, Any] = {
    **{"bucket_lengths": (9, 18), "eval_lengths": (9, 18), "max_length": 12, "beam_size": 2},
    **{"num_encoder_layers": 2, "num_decoder_layers": 2, "width": 8, "precision": "float32"},
    **{"init_scale": 0.5, "attention_gain": 1.0, "dropout": 0.3},
    **{"train_batch_size": 8, "eval_batch_size": 8, "train_steps": "4", "warmup_steps": "2"},
    **{"steps_per_eval": "4", "steps_per_checkpoint": "2", "log_step_count_steps": "1"},
    **{"base_learning_rate": 0.01, "target": 1.0},
}
# Of 2026, float32 on a CPU. A drift of the data's order, the dropout, the initial weights, the loss
# or the optimizer would change them.
GOLDEN = [28.155771, 15.600379, 28.222357, 14.029807]


def settings(data: str, workdir: Any, **overrides: Any) -> Any:
    config = importlib.import_module("configs.gnmt").get_config()
    config.update({"data_dir": data, **TINY, **overrides})
    return runs.read(config.lock(), str(workdir))


def make(data: str, **overrides: Any) -> Any:
    config = importlib.import_module("configs.gnmt").get_config()
    config.update({"data_dir": data, **TINY, **overrides})
    return benchmarks.load(config.lock(), "")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_bpe):
    """The workdir of a run of 4 steps."""
    workdir = str(tmp_path_factory.mktemp("trained"))
    train.train_and_evaluate(settings(tiny_bpe, workdir))
    return workdir


def test_golden_losses(trained):
    losses = [row["loss"] for row in rows(trained) if row["split"] == "train"]
    np.testing.assert_allclose(losses, GOLDEN, rtol=1e-4)


def test_a_resumed_run_is_the_same_to_the_bit(trained, tiny_bpe, tmp_path):
    """The checkpoint of step 2 is in the middle of an epoch; there is dropout."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    train.train_and_evaluate(settings(tiny_bpe, tmp_path))
    assert_same_state(state_on_disk(str(tmp_path), 4), state_on_disk(trained, 4))


def test_evaluation_and_the_tool_translate_alike(trained, tiny_bpe, monkeypatch, capfdbinary):
    """The filler lines of the padded file are not translated; an empty line stays empty."""
    scores = evaluating.evaluate(settings(tiny_bpe, trained), "latest", 0)
    assert 0 <= scores["BLEU"] < 1
    texts = pathlib.Path(trained, "eval", "translations.txt").read_text().split("\n")
    assert len(texts) == 24 and texts[-1] == ""
    sources = pathlib.Path(tiny_bpe, "newstest2014.tok.bpe.32000.padded.en").read_text()
    text = "\n".join(["", *sources.split("\n")[:23][::-1]]) + "\n"
    found = typed(monkeypatch, capfdbinary, text.encode(), f"--workdir={trained}")
    assert [line.decode() for line in found] == ["", *texts[:23][::-1], ""]


def test_dropout_and_buckets_do_not_depend_on_the_cut_into_devices(tiny_bpe):
    benchmark = make(tiny_bpe)
    batch = next(benchmark.train_batches(8, 0, 1, 0))
    params, _ = jax.jit(benchmark.init)(jax.random.key(0))

    @jax.jit
    def loss(batch, key):
        terms, metrics, _ = benchmark.loss(params, {}, batch, jax.random.key(key))
        return terms["cross_entropy"], metrics["token_loss"]

    halves = [{k: v[part] for k, v in batch.items()} for part in (slice(0, 4), slice(4, 8))]
    whole, parts = loss(batch, 0), [loss(half, 7) for half in halves]
    np.testing.assert_allclose(np.sum(parts, axis=0), whole, rtol=1e-6)
    (total, sentences), (_, tokens) = whole
    assert int(sentences) == 8 and int(tokens) == np.count_nonzero(batch["targets"])
    other = loss(batch | {"dropout": batch["dropout"] + 1}, 0)
    assert abs(float(other[0][0]) / float(total) - 1) > 1e-4


def test_the_end_of_the_sentence_may_not_count(tiny_bpe):
    benchmark = make(tiny_bpe, counts_eos=False)
    batch = next(benchmark.train_batches(8, 0, 1, 0))
    params, _ = jax.jit(benchmark.init)(jax.random.key(0))
    _, metrics, _ = benchmark.loss(params, {}, batch, jax.random.key(0))
    assert int(metrics["token_loss"][1]) == np.count_nonzero(batch["targets"] > EOS)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"bucket_lengths": (9, 9)}, "config.bucket_lengths=.9, 9.: must rise"),
        ({"num_train_pairs": 91}, "config.num_train_pairs=91, but .* has 90 pairs of at most 18"),
        (
            {"eval_references": "", "num_eval_sentences": 0},
            "lines that only fill it up, and nothing",
        ),
        ({"num_eval_sentences": 22}, "config.num_eval_sentences=22, but .*newstest2014.de has 23"),
        ({"vocabulary_size": 99}, "config.vocabulary_size=99, but .* has 13 entries"),
        ({"train_source": ""}, "config.train_source='': text needs train_source and train_target"),
        ({"eval_references": "typo.de"}, "config.eval_references='typo.de': there is no such file"),
        ({"train_batch_size": 128}, "config.train_batch_size=128: there are only 90 pairs"),
    ],
)
def test_mistakes_take_one_line(tiny_bpe, overrides, message):
    with pytest.raises(UserError, match=message) as error:
        benchmark = make(tiny_bpe, **overrides)
        for split in ("train", "eval"):
            benchmark.num_examples(split)
        next(benchmark.train_batches(overrides.get("train_batch_size", 8), 0, 1, 0))
    assert "\n" not in str(error.value)


def test_a_log_of_mlperf_needs_the_number_of_pairs(tiny_bpe, tmp_path):
    log = {"mlperf": {"format": "mllog", "org": "us"}, "stop_at_target": True}
    declared = {"num_eval_sentences": 23, "vocabulary_size": 13}
    with pytest.raises(UserError, match="number of examples: give --config.num_train_pairs=N"):
        train.train_and_evaluate(settings(tiny_bpe, tmp_path, **log, **declared))


def test_without_references_the_declared_sentences_are_evaluated(tiny_bpe):
    benchmark = make(tiny_bpe, eval_references="", num_eval_sentences=23)
    assert benchmark.num_examples("eval") == 23 and len(benchmark.references) == 23
    assert "BLEU is against the decoded targets" in benchmark.notes(0, evaluating=True)[0]
    assert make(tiny_bpe).notes(0, evaluating=True) == []


def test_records_must_be_as_many_as_declared(tiny_sentences):
    text = dict.fromkeys(("train_source", "train_target", "eval_source", "eval_target"), "")
    benchmark = make(tiny_sentences, **text, num_eval_sentences=22, eval_references="")
    with pytest.raises(UserError, match="config.num_eval_sentences=22, but .* has 23"):
        benchmark.num_examples("eval")


def test_text_that_is_not_cut_is_told(trained, monkeypatch, capfdbinary):
    text = b"a b c\nplain words\nthat nobody cut\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    translate.main([f"--workdir={trained}"])
    assert b"5 words are not in the vocabulary" in capfdbinary.readouterr().err


def test_vocabularies_that_differ_are_refused(tiny_bpe, tmp_path):
    folder = shutil.copytree(tiny_bpe, tmp_path / "data")
    (folder / "vocab.bpe.32000.de").write_text("<unk>\n<s>\n</s>\na\nb\nq\n")
    with pytest.raises(UserError, match="config.vocabulary_file='vocab.*' matches 2 files that"):
        make(str(folder)).num_examples("train")


def test_records_of_the_transformer_are_read_as_pairs(tiny_sentences):
    text = dict.fromkeys(("train_source", "train_target", "eval_source", "eval_target"), "")
    benchmark = make(tiny_sentences, **text)
    assert (benchmark.num_examples("train"), benchmark.num_examples("eval")) == (90, 23)
    batch = next(benchmark.train_batches(8, 0, 1, 0))
    for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True):
        words = inputs[inputs > EOS].tolist()
        assert targets[targets > EOS].tolist() == words[::-1]  # as the data were made
