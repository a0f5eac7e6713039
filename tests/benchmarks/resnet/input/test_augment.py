"""RandAugment and TrivialAugment: policies, draws, magnitudes and groups."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from benchmarks.resnet.input import augment, image_ops
from benchmarks.resnet.input.augment import Policy
from tests.benchmarks.resnet.input.test_image_ops import noise
from tests.common.test_hashing import plain

TEXTS = ("randaugment:2x9", "randaugment:2x6:0.5", "trivialaugment")


def pictures(count, size=12):
    return np.stack([noise(size, size, seed=seed) for seed in range(count)])


@functools.cache
def compiled(policy, groups):
    return jax.jit(lambda images, seeds: augment.apply(policy, images, seeds, groups))


def applied(policy, images, seeds, groups):
    result = compiled(policy, groups)(jnp.asarray(images), jnp.asarray(seeds, jnp.int32))
    assert result.shape == images.shape and result.dtype == images.dtype
    return np.asarray(result)


def test_policies():
    grey, mean, black = (128.0, 128.0, 128.0), (124.0, 116.0, 104.0), (0.0, 0.0, 0.0)
    assert [Policy.parse(text) for text in TEXTS] == [
        Policy("tensorflow", 2, 9.0, 0.0, grey),
        Policy("timm", 2, 6.0, 0.5, mean),
        Policy("trivial", 1, 0.0, 0.0, black),
    ]
    assert Policy.parse("randaugment:12x7.5:0").kind == "timm"
    assert [Policy.parse(f"randaugment:{text}").strength for text in ("1x0", "99x10")] == [0, 10]


@pytest.mark.parametrize(
    "text", ["", ":0x9", ":2x-9", ":2x9:", ":2x9:inf", ":1x9:uniform", ":2x10.01", ":1"]
)
def test_refusals(text):
    with pytest.raises(ValueError, match="10.01; use 0 to 10" if "10.01" in text else "2x9'.* or"):
        Policy.parse(f"randaugment{text}")


# The magnitudes that the sources have for strengths of 0, 3, 6 and 10, with the sign +1 and -1.

STRENGTHS = (0.0, 3.0, 6.0, 10.0)
ENHANCED = {image_ops.colour, image_ops.contrast, image_ops.brightness, image_ops.sharpness}
PLAIN = {image_ops.autocontrast, image_ops.equalize}
MOVES = {
    image_ops.shear_x,
    image_ops.shear_y,
    image_ops.translate_x,
    image_ops.translate_y,
    image_ops.rotate,
}
MAGNITUDES = {
    "randaugment:2x9": {
        **dict.fromkeys(ENHANCED, ([0.1, 0.64, 1.18, 1.9],) * 2),
        image_ops.shear_x: ([0, 0.09, 0.18, 0.3], [0, -0.09, -0.18, -0.3]),
        image_ops.shear_y: ([0, 0.09, 0.18, 0.3], [0, -0.09, -0.18, -0.3]),
        image_ops.translate_x: ([0, 30, 60, 100], [0, -30, -60, -100]),
        image_ops.translate_y: ([0, 30, 60, 100], [0, -30, -60, -100]),
        image_ops.rotate: ([0, 9, 18, 30], [0, -9, -18, -30]),
        image_ops.posterize: ([0, 1, 2, 4],) * 2,
        image_ops.solarize: ([0, 76, 153, 256],) * 2,
        image_ops.solarize_add: ([0, 33, 66, 110],) * 2,
    },
    "randaugment:2x6:0.5": {
        **dict.fromkeys(ENHANCED, ([1, 1.27, 1.54, 1.9], [1, 0.73, 0.46, 0.1])),
        image_ops.shear_x: ([0, 0.09, 0.18, 0.3], [0, -0.09, -0.18, -0.3]),
        image_ops.shear_y: ([0, 0.09, 0.18, 0.3], [0, -0.09, -0.18, -0.3]),
        image_ops.translate_x: ([0, 27, 54, 90], [0, -27, -54, -90]),
        image_ops.translate_y: ([0, 27, 54, 90], [0, -27, -54, -90]),
        image_ops.rotate: ([0, 9, 18, 30], [0, -9, -18, -30]),
        image_ops.posterize: ([4, 3, 2, 0],) * 2,
        image_ops.solarize: ([256, 180, 103, 0],) * 2,
        image_ops.solarize_add: ([0, 33, 66, 110],) * 2,
    },
    "trivialaugment": {
        **dict.fromkeys(ENHANCED, ([1, 1.297, 1.594, 1.99], [1, 0.703, 0.406, 0.01])),
        image_ops.shear_x: ([0, 0.297, 0.594, 0.99], [0, -0.297, -0.594, -0.99]),
        image_ops.shear_y: ([0, 0.297, 0.594, 0.99], [0, -0.297, -0.594, -0.99]),
        image_ops.translate_x: ([0, 9, 19, 32], [0, -9, -19, -32]),
        image_ops.translate_y: ([0, 9, 19, 32], [0, -9, -19, -32]),
        image_ops.rotate: ([0, 40.5, 81, 135], [0, -40.5, -81, -135]),
        image_ops.posterize: ([8, 6, 4, 2],) * 2,
        image_ops.solarize: ([255, 178.5, 102, 0],) * 2,
    },
}


@pytest.mark.parametrize("text", MAGNITUDES)
def test_magnitudes(text):
    space = augment._space(Policy.parse(text), 200)
    strengths = jnp.asarray(STRENGTHS, jnp.float32)
    for effect, expected in MAGNITUDES[text].items():
        for sign, values in zip((1.0, -1.0), expected, strict=True):
            ours = jnp.broadcast_to(space[effect](strengths, jnp.full(4, sign)), 4)
            np.testing.assert_allclose(ours, values, rtol=1e-5, atol=1e-5)


def test_the_operations_of_each_source():
    kinds = [set(augment._space(Policy.parse(text), 200)) for text in TEXTS]
    common = {*PLAIN, *ENHANCED, image_ops.posterize, image_ops.solarize, *MOVES}
    assert kinds[0] == kinds[1] == common | {image_ops.invert, image_ops.solarize_add}
    assert kinds[2] == common | {image_ops.identity}


def test_each_of_the_31_strengths_of_trivial_augment_is_as_torchvisions():
    """Its translations are whole numbers, of linspace(0, 32, 31); bits are of 8 - round(k / 5)."""
    space = augment._space(Policy.parse("trivialaugment"), 200)
    k = np.arange(31)
    pixels, bits = (
        np.asarray(jax.jit(space[effect])(jnp.asarray(k, jnp.float32) / 3, jnp.ones(31)))
        for effect in (image_ops.translate_x, image_ops.posterize)
    )
    assert (pixels == 32 * k // 30).all()
    assert (bits == 8 - np.round(k / 5)).all()


def test_draws():
    """Operations, strengths, signs and which images are changed, in 20,000 draws each."""
    seeds = jnp.arange(-10_000, 10_000, dtype=jnp.int32)
    count = jax.vmap(lambda seed: augment.draw_operation(seed, 1, 14))
    shares = np.bincount(np.asarray(count(seeds)), minlength=14) / 20_000
    assert len(shares) == 14 and np.abs(shares - 1 / 14).max() < 5 * (1 / 14 / 20_000) ** 0.5
    first, second = (np.asarray(augment._draw(Policy.parse(TEXTS[1]), seeds, i)) for i in (0, 1))
    for strength, sign, used in (first, second):
        assert abs(strength.mean() - 6) < 0.02 and abs(strength.std() - 0.5) < 0.015
        assert abs((strength < 6 - 0.5 * 1.645).mean() - 0.05) < 0.01  # of a normal distribution
        assert abs(sign.mean()) < 0.04 and set(sign) == {-1, 1} and abs(used.mean() - 0.5) < 0.02
    for values in zip(first, second, strict=True):
        assert abs(np.corrcoef(*values)[0, 1]) < 0.04
    for i in range(3):
        assert abs(np.corrcoef(first[i], first[i - 1])[0, 1]) < 0.04
    strong = np.asarray(augment._draw(Policy("timm", 1, 10.0, 5.0), seeds, 0)[0])
    assert strong.max() == 10 and strong.min() == 0
    trivial = np.asarray(augment._draw(Policy.parse(TEXTS[2]), seeds, 0)[0])
    bins = collections.Counter(np.round(trivial * 3, 3).tolist())
    assert sorted(bins) == list(range(31)) and max(bins.values()) < 800 > 500 < min(bins.values())


def test_draws_are_those_of_pythons_integers():
    """A change would change the runs that are under way."""
    seeds, layer = [5, -7, 2**31 - 1, 123456789], 1
    first = np.array([[plain(seed, 1909, layer, word) for seed in seeds] for word in range(4)])
    chance, side, used = (first[1:] >> 8) / 2**24
    assert [int(augment.draw_operation(jnp.int32(s), layer, 14)) for s in seeds] == [
        number % 14 for number in first[0]
    ]
    kinds = {
        Policy("tensorflow", 2, 9.0): np.full(4, 9.0),
        Policy("timm", 2, 6.0, 0.5): 6 + 0.5 * stats.norm.ppf(chance),
        Policy("trivial", 1): np.floor(31 * chance) / 3,
    }
    for policy, strengths in kinds.items():
        drawn = augment._draw(policy, jnp.asarray(seeds, jnp.int32), layer)
        np.testing.assert_allclose(drawn[0], strengths, rtol=1e-5)
        assert drawn[1].tolist() == np.where(side < 0.5, -1, 1).tolist()
        assert drawn[2].tolist() == ((used < 0.5) | (policy.kind != "timm")).tolist()


@pytest.mark.parametrize("number", [0.0, 0.5])
def test_the_least_draw_is_finite_and_a_half_is_of_the_upper_half(number, monkeypatch):
    monkeypatch.setattr(augment, "uniform", lambda seeds, *_: jnp.full(len(seeds), number))
    strength, sign, used = augment._draw(Policy("timm", 1, 7.5, 0.0), jnp.arange(1), 0)
    is_upper = number == 0.5
    assert (float(strength[0]), float(sign[0])) == (7.5, 1.0 if is_upper else -1.0)
    assert bool(used[0]) != is_upper


@pytest.mark.long
@pytest.mark.parametrize("text", ["randaugment:2x6:0.5", "trivialaugment"])
def test_a_group_is_the_same_however_the_batch_is_cut(text):
    policy, seeds = Policy.parse(text), np.arange(100, 112)
    images = pictures(12)
    together = applied(policy, images, seeds, 3)
    assert (together != images).any()
    for start in (0, 4, 8):
        part = slice(start, start + 4)
        alone = applied(policy, images[part], seeds[part], 1)
        np.testing.assert_allclose(alone.astype(int), together[part], atol=1)


@functools.partial(jax.jit, static_argnums=(0, 3))
def changed_by(effect, row, magnitude, more):
    return effect(row, magnitude, *more)


def expected_row(policy, image, first, seed):
    """One layer of an image: the drawn operation alone, in float32."""
    space = list(augment._space(policy, image.shape[0]).items())
    effect, magnitude = space[int(augment.draw_operation(jnp.int32(first), 0, len(space)))]
    strength, sign, used = augment._draw(policy, jnp.asarray([seed], jnp.int32), 0)
    if not used[0]:
        return image.astype(np.float32)
    more = (policy.fill,) if effect in MOVES else ()
    row = jnp.asarray(image[None], jnp.float32)
    return np.asarray(changed_by(effect, row, magnitude(strength, sign) * jnp.ones(1), more)[0])


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_rows_get_the_operation_of_their_group(dtype):
    policy = dataclasses.replace(Policy.parse("randaugment:1x6:0.5"), fill=(1.0, 2.0, 3.0))
    images, seeds = pictures(12).astype(dtype), np.arange(12) * 7 - 30
    changed = applied(policy, images, seeds, 4)
    for i, row in enumerate(changed):
        expected = expected_row(policy, images[i], seeds[i // 3 * 3], seeds[i])
        np.testing.assert_allclose(row, expected, atol=0.51 if dtype == "uint8" else 0.05)
