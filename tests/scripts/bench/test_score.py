"""scripts/bench/score.py: peers in PyTorch compute what ours compute, and learn its batches."""

import importlib.util
import json
import types

import jax
import numpy as np
import pytest

from benchmarks.translation.transformer.losses import perfect
from common.errors import ConfigError
from configs import small
from scripts import prepare
from scripts.bench import score
from scripts.bench.peers import torch_networks
from tests.scripts.bench.test_peers import programs, rows

SIZES = {"num_layers": 1, "width": 16, "mlp_width": 32, "num_heads": 2, "dropout": 0.0}


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed")


def run(monkeypatch, config, workdir=""):
    """The program, as its command calls it."""
    values = types.SimpleNamespace(config=config, workdir=workdir, device="cpu")
    monkeypatch.setattr(score, "flags", types.SimpleNamespace(FLAGS=values))
    score.main([])


@pytest.mark.parity
def test_the_transformer_has_our_loss(torch):
    """Also in rows of two sentences and with padding."""
    data = {"vocabulary_size": 50, "num_train_rows": 64, "num_eval_sentences": 8, "row_length": 8}
    made = programs("transformer", **{**SIZES, "num_layers": 2}, **data, train_batch_size=8)
    network = torch_networks.transformer(torch, made.benchmark)
    for x in network.parameters():
        torch.nn.init.normal_(x, std=0.3)
    batch = rows(8, 50)
    for side in ("inputs", "targets"):
        batch[f"{side}_segmentation"][:, 3:] *= 2
        batch[f"{side}_position"][:, 3:] -= 3
    params = jax.tree.map(lambda x: x.detach().numpy(), network.tree())
    shapes = jax.eval_shape(made.benchmark.init, jax.random.key(0))[0]
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda x: x.shape, shapes)
    ((ours, weight),) = made.benchmark.loss(params, {}, batch, None)[0].values()
    with torch.no_grad():
        loss = network({name: torch.tensor(x) for name, x in batch.items()})
    assert float(loss) == pytest.approx(float(ours / weight) + perfect(50, 0.1), rel=1e-5)


@pytest.mark.parity
def test_gnmt_has_our_loss(torch):
    """Also in rows of different lengths."""
    sizes = {"num_encoder_layers": 3, "num_decoder_layers": 3, "width": 16, "dropout": 0.0}
    data = {"vocabulary_size": 50, "num_train_pairs": 64, "num_eval_sentences": 8}
    made = programs("gnmt", **sizes, **data, bucket_lengths=(8,), train_batch_size=8)
    network = torch_networks.gnmt(torch, made.benchmark)
    for x in network.parameters():
        torch.nn.init.normal_(x, std=0.3)
    batch, params = rows(8, 50), jax.tree.map(lambda x: x.detach().numpy(), network.tree())
    shapes = jax.eval_shape(made.benchmark.init, jax.random.key(0))[0]
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda x: x.shape, shapes)
    ((ours, weight),) = made.benchmark.loss(params, {}, batch, None)[0].values()
    with torch.no_grad():
        loss = network(network.inputs(batch, "cpu"))
    assert float(loss) == pytest.approx(float(ours / weight), rel=1e-5)


@pytest.mark.parity
@pytest.mark.long
def test_the_transformer_learns(torch, tmp_path, monkeypatch, capsys):
    """The sentences to evaluate are those of training: it soon knows them by heart."""
    text = [("the cat sat on a mat", "le chat est sur un tapis"), ("one bird", "un oiseau")] * 8
    for side, language in enumerate(("en", "fr")):
        (tmp_path / f"a.{language}").write_text("\n".join(pair[side] for pair in text) + "\n")
    arguments = [
        f"--{split}_{side}={tmp_path}/a.{language}"
        for split in ("train", "eval")
        for side, language in (("source", "en"), ("target", "fr"))
    ]
    prepare.make("text", [*arguments, "--length=64", "--workers=1", f"--out={tmp_path}/records"])
    config = small.get_config("transformer")
    config.update({**SIZES, "data_dir": f"{tmp_path}/records", "row_length": 64})
    config.update({"train_batch_size": 8, "eval_batch_size": 16, "eval_lengths": (16,)})
    config.update({"train_steps": "80", "steps_per_eval": "40", "warmup_steps": "5"})
    config.update({"base_learning_rate": 0.02, "beam_size": 2, "extra_length": 4})
    run(monkeypatch, config)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    titles, _, *steps = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert titles == ["step", "PyTorch: BLEU", "PyTorch: seconds"]
    assert [row[0] for row in steps] == ["40", "80"] and float(steps[1][1]) > 0.9


@pytest.mark.parity
def test_neumf_learns_and_stands_beside_our_run(torch, tmp_path, monkeypatch, capsys):
    prepare.make("ratings", ["--users=300", "--items=99", "--ratings=6000", f"--out={tmp_path}"])
    config = small.get_config("ncf")
    config.update({"data_dir": str(tmp_path), "eval_negatives": 50, "gmf_dim": 8})
    config.update({"mlp_layers": (16, 8), "train_steps": "4 epochs", "steps_per_eval": "2 epochs"})
    config.update({"train_batch_size": 256, "moving_average_decay": 0.9})
    step = round(2 * 5 * 5700 / 256)
    run_rows = [
        {"split": "train", "step": step, "step_seconds": 0.5},
        {"split": "eval", "step": step, "hr_at_10": 0.25, "seconds": 3},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run_rows))
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"seed": 1}))
    run(monkeypatch, config, str(tmp_path))
    printed = capsys.readouterr().out
    lines = [line.split("|") for line in printed.splitlines() if line.startswith("| ")]
    assert float(lines[-1][2]) > 0.3  # at random 10 / 51
    ours = [[cell.strip() for cell in line[4:6]] for line in lines]
    assert ["0.2500", f"{step / 2:.1f}"] in ours
    assert "config.seed is 0" in printed and "config.width" not in printed
    assert f"ours: hr_at_10 0.2500 after {step / 2:.1f} s" in printed


@pytest.mark.parametrize(
    ("recipe", "key", "value"), [("ssd", "benchmark", "ssd"), ("ncf", "optimizer", "lamb")]
)
def test_what_has_no_peer(recipe, key, value):
    config = small.get_config(recipe)
    config[key] = value
    with pytest.raises(ConfigError, match=f"config.{key}='{value}'"):
        score.load_torch(config)


def test_without_pytorch_or_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed: pip install torch"):
        score.load_torch(small.get_config("ncf"))
    with pytest.raises(ConfigError, match=f"--workdir={tmp_path}"):
        score.read_run(str(tmp_path), {})
