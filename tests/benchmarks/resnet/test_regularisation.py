"""ResNet's glue of regularisation: draws of the rows, losses of two labels, refusals."""

from typing import Any

import jax
import numpy as np
import pytest

import benchmarks
from benchmarks.resnet import architecture, regularisation
from errors import ConfigError
from ops.layers import dropout
from tests.benchmarks.resnet import networks
from tests.conftest import make_tiny_config
from tests.test_models import make_images, random_variables

ALL = {
    **{"mixup": 0.2, "cutmix": 1.0, "random_erasing": 0.3, "drop_path": 0.2},
    "dropout": 0.25,
    **{"augmentation": "randaugment:1x6:0.5", "blur_pool": True, "batch_norm": "plain"},
    **{"loss": "bce_sum", "head_bias_from_classes": True},
}


def make(data_dir: str, cache: Any, **overrides: Any) -> Any:
    config = make_tiny_config(data_dir, **overrides)
    return benchmarks.load(config.lock(), str(cache))


def draws(benchmark, shards, start, count):
    """The leaf "draw" of global batches."""
    streams = [benchmark.train_batches(16, k, shards, start) for k in range(shards)]
    return [np.concatenate([next(stream)["draw"] for stream in streams]) for _ in range(count)]


@pytest.mark.long
@pytest.mark.parametrize("repeats", [1, 2])
def test_draws_are_a_function_of_seed_and_step(repeats, tiny_records, tmp_path):
    benchmark = make(tiny_records, tmp_path, mixup=0.2, repeats=repeats)
    complete = draws(benchmark, 1, 0, 8)
    np.testing.assert_array_equal(draws(benchmark, 2, 3, 5), complete[3:])
    assert len({int(each) for batch in complete for each in batch}) == 8 * 16
    other = make(tiny_records, tmp_path, mixup=0.2, repeats=repeats, seed=1)
    assert not np.array_equal(draws(other, 1, 0, 1), complete[:1])


def test_draws_have_31_bits(tiny_records, tmp_path):
    benchmark = make(tiny_records, tmp_path, mixup=0.2)
    values = np.concatenate(draws(benchmark, 1, 0, 4))
    assert values.min() >= 0 and values.dtype == np.int32
    assert values.max() >= 2**30  # of 64 draws
    (spec,) = benchmark.batch_spec("eval", 16)
    assert set(spec) == {"image", "label", "id", "mask"}


def test_copies_are_counted_from_0():
    assert regularisation._copies(np.array([5, 3, 5, 5, 3, 9])).tolist() == [0, 0, 1, 2, 1, 0]


@pytest.mark.parametrize(("images", "groups"), [(16, 1), (32, 1), (48, 3), (64, 2), (7, 7)])
def test_at_most_32_images_get_one_operation(images, groups, monkeypatch):
    calls = []
    monkeypatch.setattr(
        regularisation.augment,
        "apply",
        lambda policy, x, draw, groups: calls.append((draw, groups)),
    )
    pixels: Any = np.zeros((images, 1, 1, 3), np.uint8)
    seeds: Any = "draws"
    regularisation.augmented("trivialaugment", pixels, seeds)
    assert calls == [("draws", groups)]


def test_a_dropout_is_before_the_head_and_follows_the_seeds():
    model = networks.make(1, num_filters=8, resnet_depth=18)
    variables, images = random_variables(model), make_images(4, 16, 16, 3)
    seeds: Any = np.array([5, -7, 11, 5], np.int32)
    features = np.asarray(model.apply(variables, images, False, method="features"))
    stays = np.asarray(dropout.keep((4, 8), 0.25, seeds, 0x68656164))
    assert 0 < stays.sum() < stays.size and (stays[0] == stays[3]).all()
    head = variables["params"]["head"]
    expected = np.where(stays, features / 0.75, 0) @ head["kernel"] + head["bias"]
    apply = architecture.training_apply(model, 0.0, 0.25, seeds)
    logits: Any = apply(variables, images, False)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
    complete: Any = model.apply(variables, images, False)
    np.testing.assert_allclose(complete, features @ head["kernel"] + head["bias"], rtol=1e-5)


@pytest.mark.long
def test_all_of_it_trains(tiny_records, tmp_path):
    """The loss is that of 4 classes with probability 1 / 4 each at first."""
    benchmark = make(tiny_records, tmp_path, **ALL)
    (spec,) = benchmark.batch_spec("train", 16)
    batch = next(benchmark.train_batches(16, 0, 1, 0))
    batch.pop("host_seconds")
    assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
        k: (v.shape, v.dtype) for k, v in spec.items()
    }
    params, state = jax.jit(benchmark.init)(jax.random.key(0))
    np.testing.assert_allclose(params["head"]["bias"], -np.log(4), rtol=1e-6)

    def loss(params):
        total, count = benchmark.loss(params, state, batch, jax.random.key(0))[0]["cross_entropy"]
        return total / count

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    assert 1.5 < float(value) < 3.5  # log(5) + 3 log(5 / 4) = 2.28, beside the head's random part
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"blur_pool": True}, "config.batch_norm='gram': has no form with blur_pool or drop_path"),
        ({"drop_path": 0.1}, "config.batch_norm='gram': has no form with blur_pool or drop_path"),
        ({"augmentation": "randaugment"}, "config.augmentation='randaugment': use"),
        ({"augmentation": "trivialaugment", "decoded_cache": 32}, "config.augmentation='trivial"),
    ],
)
def test_what_does_not_fit_together_is_refused(overrides, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        make("", tmp_path, **overrides)
