"""The table of what the parts of a step cost, from the operations of a program."""

import types
from typing import Any

import pytest

from commands import preflight
from scripts.bench import parts
from tests.engine.forecast.test_estimates import operation

OPERATIONS = [
    operation(0.001, scopes="jit(step)/jvp(Net)/backbone/stage1/conv", flops=1),
    operation(0.00025, scopes="jit(step)/transpose(jvp(Net))/backbone/head/conv", times=2.0),
    operation(0.0001, scopes="jit(step)/jvp(Net)/head/dot", flops=1),
    operation(0.0002, scopes="jit(step)/backbones/add"),
    operation(0.0, scopes="jit(step)/my_head/add"),
    operation(0.0, scopes="jit(step)/head_2/add"),
    operation(0.0002, scopes=""),
]


def test_operations_belong_to_the_first_part_in_their_path():
    costs = parts.split(OPERATIONS, ["head", "backbone", "pyramid"])
    assert costs["backbone"] == pytest.approx((1.0, 1.0))
    assert costs["head"] == pytest.approx((0.6, 0.1))
    assert costs["pyramid"] == (0, 0)
    assert costs["other"] == pytest.approx((0.4, 0))


def test_the_table():
    costs = parts.split(OPERATIONS, ["backbone", "head"])
    lines = parts.table(costs).splitlines()
    assert "| head | 0.1 | 5.0% | 0.1 | 0.0 |" in lines
    assert "| other | 0.4 | 20.0% | 0.0 | 0.4 |" in lines
    assert "| backbone | 1.5 | 75.0% | 1.0 | 0.5 |" in lines
    assert "| step | 2.0 | 100.0% | 1.1 | 0.9 |" in lines
    assert lines[-1] == "without products: 45.0% of the step"


def test_the_command(capsys, monkeypatch):
    """One slice that compiles and one that does not, of eight devices each."""
    configs: list[Any] = []

    def inspect(asked, one, steps):
        configs.append(asked)
        train = None if one.name.startswith("v5e") else types.SimpleNamespace(operations=OPERATIONS)
        return types.SimpleNamespace(train=train, error="no memory")

    monkeypatch.setattr(preflight, "inspect", inspect)
    monkeypatch.setattr(parts, "read_settings", lambda config: config)
    flags = ["--config=digits", "--batch_per_device=3", "--parts=head,backbone,neck"]
    assert parts.main([*flags, "--tpu=v3-8"]) == 0
    output = capsys.readouterr().out
    assert "no operation has a name with neck: is it misspelled?\nv3:2x2, 3 per device:" in output
    assert "| head | 0.6 |" in output
    assert [(c.train_batch_size, c.eval_batch_size) for c in configs] == [(24, 8)]
    assert parts.main([*flags, "--tpu=v5e-8"]) == 1
    assert capsys.readouterr().out == "v5e:2x4: no memory\n"
    parts.main([*flags, "--tpu=v3-8", "--batch_per_device=1", "--config=mlperf_ssd:1024"])
    assert (configs[-1].train_batch_size, configs[-1].optimizer) == (8, "sgd")
