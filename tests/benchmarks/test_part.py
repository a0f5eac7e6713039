"""A part of the training data has the share of each class, whole groups, and smaller parts."""

import collections

import numpy as np
import pytest

import train
from benchmarks.part import Part
from benchmarks.records import labels_and_groups
from benchmarks.resnet.preparation.examples import tf_example
from common.data.shards import Shards, read_records, read_some
from common.errors import CheckpointError, ConfigError
from engine.plan import read_settings
from tests.conftest import make_tiny_config
from tests.helpers.preparation import write_shards

FRACTIONS = (1 / 16, 1 / 8, 0.3, 1 / 2, 0.9)


def test_each_class_gives_its_share():
    labels = np.repeat(np.arange(5), (800, 100, 10, 3, 1))
    np.random.default_rng(0).shuffle(labels)
    for fraction in FRACTIONS:
        counts = np.bincount(labels[Part(fraction).choose(len(labels), labels)], minlength=5)
        expected = np.maximum(1, np.floor(fraction * np.bincount(labels) + 0.5))
        np.testing.assert_array_equal(counts, expected)


def test_smaller_parts_are_in_larger_ones():
    labels = np.arange(1000) % 7
    groups = np.array([f"film {i // 13}" for i in range(1000)])
    for arguments in ((), (labels,), (labels, groups), (None, groups)):
        parts = [Part(fraction).choose(1000, *arguments) for fraction in (*FRACTIONS, 1.0)]
        assert parts[-1].all()
        for small, large in zip(parts, parts[1:], strict=False):
            assert (small <= large).all()


def test_groups_stay_together():
    names = [f"film {i}" for i in range(60) for _ in range(1 + i % 9)]
    groups = np.random.default_rng(1).permutation(names)
    for fraction in FRACTIONS:
        kept = Part(fraction, 3).choose(len(groups), None, groups)
        states = collections.defaultdict(set)
        for name, is_kept in zip(groups.tolist(), kept.tolist(), strict=True):
            states[name].add(is_kept)
        assert all(len(state) == 1 for state in states.values())
        assert abs(kept.sum() - fraction * len(groups)) <= 9


def test_another_seed_draws_another_part():
    same, other = (Part(0.5, seed).choose(200) for seed in (0, 1))
    np.testing.assert_array_equal(Part(0.5, 0).choose(200), same)
    assert 50 < (same != other).sum() < 150


@pytest.fixture
def filmed(tmp_path):
    """A folder with two files of 40 images, of which three at a time are of one film."""
    rows = [
        tf_example(b"\xff\xd8\xff", 1 + i % 3, "n", f"{i}.jpg", (8, 8), "", f"film {i // 3}")
        for i in range(40)
    ]
    write_shards(str(tmp_path), "train", rows, 2)
    return tuple(sorted(str(path) for path in tmp_path.glob("train-*")))


def test_labels_and_groups_are_those_of_the_examples(filmed, tmp_path):
    shards = Shards(filmed, (18, 19), ((1, 5), (0,)))
    labels, groups = labels_and_groups(shards, str(tmp_path / "a.json"), "image/class/label")
    examples = [i for i in range(40) if i not in (1, 5, 20)]
    assert labels is not None and groups is not None
    assert labels.tolist() == [1 + i % 3 for i in examples]
    assert groups.tolist() == [f"film {i // 3}" for i in examples]
    assert labels_and_groups(shards, str(tmp_path / "b.json"))[0] is None


def test_only_some_records_are_read(filmed):
    shards = Shards(filmed, (18, 20), ((1, 5), ()))
    every = read_some(shards, range(38))
    kept = np.random.default_rng(2).random(38) < 0.4
    part = shards.only(kept)
    assert part.total == kept.sum() and sum(part.counts) == part.total
    chosen = [record for record, is_kept in zip(every, kept, strict=True) if is_kept]
    assert read_some(part, range(part.total)) == chosen
    for number, example in enumerate(np.flatnonzero(kept).tolist()):
        assert part.place(number) == shards.place(example)
    segments = np.array([[0, 0, part.counts[0]], [1, 0, part.counts[1]]])
    assert [*read_records(part, segments).as_numpy_iterator()] == chosen


def test_a_run_says_its_part_and_another_part_is_another_run(tiny_records, tmp_path, caplog):
    caplog.set_level("INFO")
    config = make_tiny_config(tiny_records, train_fraction=0.5, train_steps="2")
    train.train_and_evaluate(read_settings(config, str(tmp_path)))
    (line,) = [text for text in caplog.messages if text.startswith("data: ")]
    assert "46 images" in line and "config.train_fraction=0.5 of 90" in line
    config.train_fraction = 1.0
    with pytest.raises(CheckpointError, match=r"train_fraction=1 .*/checkpoints/2 .* --workdir"):
        train.train_and_evaluate(read_settings(config, str(tmp_path)))


def test_a_part_of_nothing_is_refused(tiny_records):
    for values, key in (({"dataset": "fake"}, "dataset"), ({"mlperf.format": "mllog"}, "mlperf")):
        config = make_tiny_config(tiny_records, train_fraction=0.5)
        config.update_from_flattened_dict(values)
        with pytest.raises(ConfigError, match=f"config.train_fraction=0.5: .*{key}"):
            read_settings(config).load_benchmark("")
