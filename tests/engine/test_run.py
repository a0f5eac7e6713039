"""What is checked of the data when a run opens them."""

import types
from typing import Any

import pytest

from benchmarks.part import Part
from common.errors import ConfigError, DataError
from engine.run import check_count, host_bytes


def test_the_data_hold_as_many_examples_as_are_declared():
    declared = {"unit": "texts", "declared_examples": lambda split: 72}
    benchmark: Any = types.SimpleNamespace(**declared, part=Part())
    benchmark.num_examples = lambda split: 72
    check_count(benchmark)
    benchmark.num_examples = lambda split: 71
    with pytest.raises(DataError, match="hold 71 texts to train, declared are 72"):
        check_count(benchmark)
    benchmark.declared_examples = lambda split: 0  # nothing is declared
    check_count(benchmark)
    benchmark.declared_examples, benchmark.part = (lambda split: 142), Part(0.5, complete=142)
    check_count(benchmark)
    benchmark.part = Part(0.5)
    with pytest.raises(ConfigError, match=r"train_fraction=0\.5: .* `self.part.choose`"):
        check_count(benchmark)


def test_the_memory_of_the_input_is_that_of_the_splits():
    def needs(split, size, hosts):
        return {(split, "x"): size * 10 + hosts, ("shared",): size}

    benchmark: Any = types.SimpleNamespace(host_bytes=needs)
    settings: Any = types.SimpleNamespace(train_batch_size=32, eval_batch_size=7)
    train = {("train", "x"): 321, ("shared",): 32}
    assert host_bytes(benchmark, settings, "train") == train
    both = host_bytes(benchmark, settings, "train", "eval")
    assert both == {**train, ("eval", "x"): 71, ("shared",): 7}
