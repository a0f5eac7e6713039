"""Regularisation: draws of the rows, losses of two labels, refusals; mixing against NumPy.

Mixing has loops over rows with the hash of Python, and scipy's Beta.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import benchmarks
from benchmarks.resnet import architecture
from benchmarks.resnet.input import augment, regularisation
from benchmarks.resnet.settings import PRESETS, Regularisation
from common import hashing
from common.errors import ConfigError
from tests.benchmarks.resnet import networks
from tests.common.test_hashing import plain
from tests.conftest import make_tiny_config, opened
from tests.test_models import make_images, random_variables

ALL = {
    **{"mixup": 0.2, "cutmix": 1.0, "random_erasing": 0.3, "drop_path": 0.2},
    "dropout": 0.25,
    **{"augmentation": "randaugment:1x6:0.5", "blur_pool": True, "batch_norm": "plain"},
    **{"loss": "bce_sum", "head_bias_from_classes": True},
}
SEEDS: Any = np.array([3, -7, 2**31 - 1, 11, 0, 5, 6, 99], np.int32)
MANY: Any = np.random.default_rng(5).integers(-(2**31), 2**31, 20_000, dtype=np.int32)


def make(data_dir: str, cache: Any, **overrides: Any) -> Any:
    config = make_tiny_config(data_dir, **overrides)
    return benchmarks.load(config.lock(), str(cache))


def draws(benchmark, shards, start, count):
    """The leaf "draw" of global batches."""
    benchmark.open("train")
    streams = [benchmark.train_batches(16, k, shards, start) for k in range(shards)]
    return [np.concatenate([next(stream)["draw"] for stream in streams]) for _ in range(count)]


def test_presets_rise_and_keep_the_values_that_are_set():
    light, medium, strong = (Regularisation(augmentation=word).spelled_out for word in PRESETS)
    assert not light.is_used and medium == Regularisation(augmentation="trivialaugment")
    assert strong.mixup == 0.2 and strong.cutmix == 1.0 and strong.random_erasing == 0.25
    mixed = Regularisation(augmentation="strong", mixup=0.4, drop_path=0.1).spelled_out
    assert mixed == dataclasses.replace(strong, mixup=0.4, drop_path=0.1)
    plain = Regularisation(augmentation="randaugment:2x9", cutmix=0.5)
    assert plain.spelled_out == plain


@pytest.mark.long
@pytest.mark.parametrize("repeats", [1, 2])
def test_draws_are_a_function_of_seed_and_step(repeats, tiny_records, tmp_path):
    benchmark = make(tiny_records, tmp_path, mixup=0.2, repeats=repeats)
    complete = draws(benchmark, 1, 0, 8)
    np.testing.assert_array_equal(draws(benchmark, 2, 3, 5), complete[3:])
    assert len({int(each) for batch in complete for each in batch}) == 8 * 16
    assert np.min(complete) >= 0 and np.max(complete) >= 2**30  # 31 bits
    (spec,) = benchmark.batch_spec("eval", 16)
    assert "draw" not in spec
    other = make(tiny_records, tmp_path, mixup=0.2, repeats=repeats, seed=1)
    assert not np.array_equal(draws(other, 1, 0, 1), complete[:1])


@pytest.mark.parametrize(("images", "groups"), [(16, 1), (32, 1), (48, 3), (64, 2), (7, 7)])
def test_at_most_32_images_get_one_operation(images, groups, monkeypatch):
    calls = []
    monkeypatch.setattr(
        augment, "apply", lambda policy, x, draw, groups: calls.append((draw, groups))
    )
    pixels: Any = np.zeros((images, 1, 1, 3), np.uint8)
    seeds: Any = "draws"
    regularisation.augment_images("trivialaugment", pixels, seeds)
    assert calls == [("draws", groups)]


def test_a_dropout_is_before_the_head_and_follows_the_seeds():
    model = networks.make_network(1, num_filters=8, resnet_depth=18)
    variables, images = random_variables(model), make_images(4, 16, 16, 3)
    seeds: Any = np.array([5, -7, 11, 5], np.int32)
    features = np.asarray(model.apply(variables, images, False, method="features"))
    stays = np.asarray(hashing.keep_mask((4, 8), 0.25, seeds, 0x68656164))
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
    benchmark = opened(make(tiny_records, tmp_path, **ALL), "train")
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
        ({"blur_pool": True}, "config.batch_norm='gram': .*blur_pool"),
        ({"drop_path": 0.1}, "config.batch_norm='gram': .*drop_path"),
    ],
)
def test_what_does_not_fit_together_is_refused(overrides, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        make("", tmp_path, **overrides)


def pictures(b=8, h=12, w=10, seed=0) -> Any:
    return np.random.default_rng(seed).normal(size=(b, h, w, 3)).astype(np.float32)


def drawn(seed, site, *words):
    """The number in [0, 1) that the device draws, in Python's integers."""
    return (plain(int(seed), site, *words) >> 8) / 2**24


@functools.partial(jax.jit, static_argnames=("mixup", "cutmix"))
def mix(images, seeds, mixup=0.0, cutmix=0.0):
    return regularisation.mix(images, jnp.arange(len(images)), seeds, mixup=mixup, cutmix=cutmix)


@pytest.mark.parametrize(
    ("alpha", "error"), [(0.05, 1e-6), (0.1, 1e-6), (0.25, 1e-6), (1.0, 1e-6), (4.0, 4e-4)]
)
def test_quantiles_are_those_of_scipy(alpha, error):
    u = np.concatenate([np.linspace(0, 1, 4001)[:-1], 2.0 ** -np.arange(2, 25)])
    u: Any = (np.floor(u * 2**24) / 2**24).astype(np.float32)  # numbers that are drawn
    x = np.asarray(jax.jit(regularisation._beta, static_argnums=1)(u, alpha), np.float64)
    beta: Any = stats.beta(alpha, alpha)
    assert x.min() >= 0 and x.max() <= 1
    np.testing.assert_allclose(x, beta.ppf(u.astype(np.float64)), rtol=0, atol=error)
    small = (u < 0.5) & (x > 1e-30)  # above, 1 - x is rounded to 2^-24
    np.testing.assert_allclose(beta.cdf(x[small]), u[small], rtol=0, atol=1e-6)


def test_mixup_adds_the_row_before():
    images = pictures()
    mixed = mix(images, SEEDS, mixup=0.2)
    for i, seed in enumerate(SEEDS):
        share = stats.beta.ppf(drawn(seed, 0x6D6979), 0.2, 0.2)
        assert abs(mixed.share[i] - share) < 2e-6
        expected = share * images[i].astype(float) + (1 - share) * images[i - 1]
        np.testing.assert_allclose(mixed.images[i], expected, rtol=0, atol=2e-5)
    assert np.asarray(mixed.labels).tolist() == list(range(8))
    assert np.asarray(mixed.others).tolist() == [7, 0, 1, 2, 3, 4, 5, 6]


def pasted(images, i, seed):
    """Row i with a box of the row before, and the share of it that is left; a loop over pixels."""
    _, h, w, _ = images.shape
    side = np.sqrt(1 - stats.beta.ppf(drawn(seed, 0x6D697A, 0), 1, 1))
    half_h, half_w = int(h * side) // 2, int(w * side) // 2
    y, x = int(drawn(seed, 0x6D697A, 1) * h), int(drawn(seed, 0x6D697A, 2) * w)
    result, left = images[i].copy(), h * w
    for row in range(max(y - half_h, 0), min(y + half_h, h)):
        for column in range(max(x - half_w, 0), min(x + half_w, w)):
            result[row, column] = images[i - 1, row, column]
            left -= 1
    return result, left / (h * w)


def test_cutmix_pastes_a_box_of_the_row_before():
    images = pictures()
    mixed = mix(images, SEEDS, cutmix=1.0)
    shares = set()
    for i, seed in enumerate(SEEDS):
        result, share = pasted(images, i, seed)
        np.testing.assert_array_equal(mixed.images[i], result)
        assert abs(mixed.share[i] - share) < 1e-6
        shares.add(share)
    assert len(shares) > 5


def test_both_take_half_of_the_rows_each():
    images = pictures()
    both = mix(images, SEEDS, mixup=0.2, cutmix=1.0)
    one, other = mix(images, SEEDS, mixup=0.2), mix(images, SEEDS, cutmix=1.0)
    cut = [drawn(seed, 0x6D6978) < 0.5 for seed in SEEDS]
    assert len(set(cut)) == 2
    for i, is_cut in enumerate(cut):
        wanted = other if is_cut else one
        np.testing.assert_array_equal(both.share[i], wanted.share[i])
        np.testing.assert_allclose(both.images[i], wanted.images[i], rtol=0, atol=1e-6)
    tiny: Any = np.zeros((len(MANY), 1, 1, 3), np.float32)
    share = np.asarray(mix(tiny, MANY, mixup=1.0, cutmix=1.0).share)
    # A pixel is never cut: its box has no whole pixel on each side.
    assert abs((share == 1).mean() - 0.5) < 0.02


def test_nothing_to_mix():
    images = jnp.ones((2, 3, 3, 3))
    mixed = regularisation.mix(images, jnp.arange(2), jnp.arange(2), mixup=0, cutmix=0)
    assert mixed.images is images and mixed.others is None and mixed.share is None


@pytest.mark.parametrize("apply", ["mix", "erase"])
def test_the_dtype_stays_and_a_row_needs_no_other_device(apply):
    images = jnp.asarray(pictures(b=4), jnp.bfloat16)
    seeds = SEEDS[:4]
    functions = {
        "mix": lambda x, s: regularisation.mix(x, s, s, mixup=0.4, cutmix=1.0).images,
        "erase": lambda x, s: regularisation.erase(x, s, 0.7),
    }
    function = jax.jit(functions[apply])
    complete = function(images, seeds)
    assert complete.dtype == jnp.bfloat16
    if apply == "mix":  # rows 1 to 3 have their partners
        images, seeds, complete = images[:3], seeds[:3], complete[:3]
        np.testing.assert_array_equal(function(images, seeds)[1:], complete[1:])
    else:
        parts = [function(images[i : i + 2], seeds[i : i + 2]) for i in (0, 2)]
        np.testing.assert_array_equal(np.concatenate(parts), complete)


def erased(image, seed, probability):
    """The image with a window of zeros, by torchvision's rule."""
    h, w, _ = image.shape
    site, result = 0x6D697B, image.copy()
    if drawn(seed, site, 20) >= probability:
        return result
    for k in range(10):
        area = h * w * (0.02 + 0.31 * drawn(seed, site, 2 * k))
        ratio = np.exp(np.log(0.3) + np.log(11) * drawn(seed, site, 2 * k + 1))
        height, width = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if height < h and width < w:
            y = int(drawn(seed, site, 21) * (h - height + 1))
            x = int(drawn(seed, site, 22) * (w - width + 1))
            result[y : y + height, x : x + width] = 0
            break
    return result


@pytest.mark.parametrize("shape", [(12, 10), (4, 40), (1, 9)])
def test_erasing_is_that_of_torchvisions_rule(shape):
    images: Any = 1 + np.abs(pictures(200, *shape))
    result = np.asarray(jax.jit(regularisation.erase, static_argnums=2)(images, MANY[:200], 0.5))
    for image, seed, one in zip(images, MANY[:200], result, strict=True):
        np.testing.assert_array_equal(one, erased(image, seed, 0.5))
    changed = (result == 0).any(axis=(1, 2, 3)).mean()
    assert changed == 0 if shape[0] == 1 else 0.3 < changed < 0.65
