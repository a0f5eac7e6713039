"""The table of what the parts of a step cost, from names and cycles as the compiler gives them."""

import types
from typing import Any

import pytest
from PIL import Image

from commands import preflight
from scripts.bench import parts

NAMES = {
    "jit(step)/jvp(Net)/backbone/stage1/conv": (940_000, 940_000),
    "jit(step)/transpose(jvp(Net))/backbone/head/conv": (470_000, 0),
    "jit(step)/jvp(Net)/head/dot": (94_000, 94_000),
    "jit(step)/backbones/add": (188_000, 0),
    "jit(step)/my_head/add": (0, 0),
    "jit(step)/head_2/add": (0, 0),
    "": (188_000, 0),
}


def test_operations_belong_to_the_first_part_in_their_path():
    costs = parts.split(NAMES, ["head", "backbone", "pyramid"], 0.94e9)
    assert costs["backbone"] == pytest.approx((1.0, 1.0))
    assert costs["head"] == pytest.approx((0.6, 0.1))
    assert costs["pyramid"] == (0, 0)
    assert costs["other"] == pytest.approx((0.4, 0))


def test_the_table_and_its_picture(tmp_path):
    costs = parts.split(NAMES, ["backbone", "head"], 0.94e9)
    lines = parts.table(costs).splitlines()
    assert "| head | 0.1 | 5.0% | 0.1 | 0.0 |" in lines
    assert "| other | 0.4 | 20.0% | 0.0 | 0.4 |" in lines
    assert "| backbone | 1.5 | 75.0% | 1.0 | 0.5 |" in lines
    assert "| step | 2.0 | 100.0% | 1.1 | 0.9 |" in lines
    assert lines[-1] == "without products: 45.0% of the step"
    parts.draw({"v3-8": costs, "v5e-8": costs}, str(tmp_path / "parts.png"))
    with Image.open(tmp_path / "parts.png") as picture:
        assert picture.width > 500


@pytest.mark.parametrize("picture", ["", "picture.png"])
def test_the_command(picture, tmp_path, capsys, monkeypatch):
    """One slice that compiles and one that does not, of eight devices each."""
    configs: list[Any] = []

    def inspect(asked, one, steps):
        configs.append(asked)
        train = None if one.name.startswith("v5e") else types.SimpleNamespace(names=NAMES)
        return types.SimpleNamespace(train=train, error="no memory")

    drawn = []
    monkeypatch.setattr(parts, "draw", lambda tables, path: drawn.append((list(tables), path)))
    monkeypatch.setattr(preflight, "inspect", inspect)
    monkeypatch.setattr(parts, "read_settings", lambda config: config)
    flags = ["--config=digits", "--batch_per_device=3", "--parts=head,backbone,neck"]
    flags += [f"--picture={picture}"]
    assert parts.main([*flags, "--tpu=v3-8"]) == 0
    output = capsys.readouterr().out
    assert "no operation has a name with neck: is it misspelled?\nv3:2x2, 3 per device:" in output
    assert "| head | 0.6 |" in output
    assert [(c.train_batch_size, c.eval_batch_size) for c in configs] == [(24, 8)]
    assert drawn == ([(["v3:2x2"], picture)] if picture else [])
    assert parts.main([*flags, "--tpu=v5e-8"]) == 1
    assert capsys.readouterr().out == "v5e:2x4: no memory\n" and len(drawn) == bool(picture)
    with pytest.raises(SystemExit):
        parts.main([*flags, "--tpu=v3-8", "--batch_per_device=0"])
    parts.main([*flags, "--tpu=v3-8", "--batch_per_device=1"])


def test_a_recipe_with_a_name():
    flags = parts._flags(
        ["--config=mlperf_ssd:1024", "--tpu=v3-8", "--batch_per_device=1", "--parts=x"]
    )
    config = parts.config_of(flags, "", 4)
    assert (config.train_batch_size, config.eval_batch_size, config.optimizer) == (4, 4, "sgd")
