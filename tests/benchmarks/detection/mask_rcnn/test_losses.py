"""Mask R-CNN's losses, samples and masks against loops over anchors, regions and pixels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

import benchmarks
from benchmarks.detection.mask_rcnn import losses
from benchmarks.detection.mask_rcnn.losses import Objects, Regions, Sampling
from benchmarks.detection.mask_rcnn.models import AnchorGenerator
from common.errors import ConfigError
from configs import mask_rcnn_digits
from tests.benchmarks.detection.test_boxes import offsets, overlap, random_boxes

SAMPLE = jax.jit(losses.sample_regions, static_argnums=2)
DRAW, FOLD = jax.jit(losses.draw_positions), jax.jit(losses.fold_in)
BALANCED = jax.jit(losses.sample_balanced, static_argnums=2)
CROP = jax.jit(losses.crop_masks, static_argnums=4)
KEY = jnp.array([5, 6], jnp.int32)


def smooth_l1(x, beta):
    return sum(v * v / (2 * beta) if abs(v) < beta else abs(v) - beta / 2 for v in x)


def binary(logit, label):
    return np.log1p(np.exp(-abs(logit))) + max(logit, 0) - logit * label


@pytest.fixture
def objects():
    boxes = np.zeros((2, 3, 4), np.float32)
    boxes[0, :2] = [[4, 6, 30, 29], [10, 20, 44, 60]]
    boxes[1, 0] = [2, 2, 20, 34]
    return Objects(jnp.asarray(boxes), jnp.array([[2, 1, 0], [3, 0, 0]], jnp.int32))


def pairs(objects, image):
    """[(number, box, class)] of an image's true objects."""
    rows = zip(np.asarray(objects.boxes[image]), np.asarray(objects.classes[image]), strict=True)
    return [(g, box.astype(np.float64), c) for g, (box, c) in enumerate(rows) if c > 0]


def test_the_loss_of_proposals(objects):
    """The sample holds all positives and negatives, so that nothing is left to chance."""
    layout = AnchorGenerator((3, 4), 2.5, (0.5, 1.0, 2.0))
    anchors = layout.boxes(48, 64)
    rule, draw = Sampling(2000, 0.5, 0.45, 0.3), np.random.default_rng(0)
    logits = [draw.normal(size=(2, len(a))).astype(np.float32) for a in anchors]
    deltas = [draw.normal(size=(2, len(a), 4)).astype(np.float32) for a in anchors]
    found = jax.jit(losses.rpn_loss, static_argnums=4)(logits, deltas, anchors, objects, rule, KEY)
    for image in (0, 1):
        flat = np.concatenate(anchors).astype(np.float64)
        true = pairs(objects, image)
        table = np.array([[overlap(a, box) for _, box, _ in true] for a in flat])
        owner = table.argmax(1)
        positive = table.max(1) >= rule.positive_iou
        for number in range(len(true)):  # the best anchor of each object
            best = table[:, number].argmax()
            positive[best], owner[best] = True, number
        negative = ~positive & (table.max(1) < rule.negative_iou)
        assert positive.sum() > 1 and negative.sum() > 50 and (~positive & ~negative).any()
        mine = np.concatenate([x[image] for x in logits]).astype(np.float64)
        moved = np.concatenate([x[image] for x in deltas]).astype(np.float64)
        classes = sum(binary(mine[i], positive[i]) for i in np.flatnonzero(positive | negative))
        boxes = sum(
            smooth_l1(moved[i] - offsets(true[owner[i]][1], flat[i], 1.0), 1 / 9)
            for i in np.flatnonzero(positive)
        )
        np.testing.assert_allclose(found[0][image], classes / rule.count, rtol=1e-5)
        np.testing.assert_allclose(found[1][image], boxes / rule.count, rtol=1e-5)


def test_anchors_are_around_the_centres_of_cells_and_of_equal_area():
    first, second = AnchorGenerator((4, 5), 8.0, (0.5, 2.0)).boxes(32, 64)
    assert first.shape == (2 * 4 * 2, 4) and second.shape == (1 * 2 * 2, 4)
    low, high = 64 * np.sqrt(2), 128 * np.sqrt(2)  # of 128 x 128 pixels at a ratio of 2
    np.testing.assert_allclose(first[0], [8 - low / 2, 8 - high / 2, 8 + low / 2, 8 + high / 2])
    np.testing.assert_allclose(first[3][[1, 3]].mean(), 24)  # the next cell is on the right
    sides = second[:, 2:] - second[:, :2]
    np.testing.assert_allclose(sides.prod(1), 256**2, rtol=1e-6)


def test_a_sample_keeps_its_shares_and_knows_its_objects(objects):
    draw = np.random.default_rng(1)
    corner = draw.uniform(0, 40, (2, 200, 2))
    proposals = np.concatenate([corner, corner + draw.uniform(4, 30, (2, 200, 2))], -1)
    proposals[:, 150:] = 0  # padding
    near = np.asarray(objects.boxes[0, 0]) + draw.uniform(-2, 2, (20, 4))
    proposals[0, :20] = near
    rule = Sampling(32, 0.25, 0.5, 0.5)
    found = SAMPLE(jnp.float32(proposals), objects, rule, KEY)
    classes, valid = np.asarray(found.classes), np.asarray(found.valid)
    assert classes.shape == (2, 32) and valid.all()
    assert (classes[0] > 0).sum() == rule.positives == 8
    for image in (0, 1):
        true = pairs(objects, image)
        assert (np.diff((classes[image] > 0).astype(int)) <= 0).all()  # positives come first
        for box, kind, number in zip(
            *(np.asarray(x[image]) for x in (found.boxes, found.classes, found.owner)), strict=True
        ):
            table = [overlap(box, other) for _, other, _ in true]
            best = int(np.argmax(table))
            assert (table[best] >= 0.5) == (kind > 0)
            if kind:
                assert (number, kind) == (true[best][0], true[best][2])
    own = np.asarray(found.boxes[1][0])
    np.testing.assert_array_equal(own, objects.boxes[1, 0])  # a true box is a region, too
    again = SAMPLE(
        jnp.float32(proposals)[::-1], Objects(*(x[::-1] for x in objects)), rule, KEY[::-1]
    )
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[::-1]), found, again)
    other = SAMPLE(jnp.float32(proposals), objects, rule, KEY + 1)
    assert (np.asarray(other.boxes) != np.asarray(found.boxes)).any()


def test_the_sample_of_an_image_without_room_is_padded():
    nothing = Objects(jnp.zeros((1, 3, 4)), jnp.zeros((1, 3), jnp.int32))
    proposals = np.zeros((1, 10, 4), np.float32)
    proposals[0, 0] = 1, 1, 5, 5
    found = SAMPLE(jnp.asarray(proposals), nothing, Sampling(8, 0.25, 0.5, 0.5), KEY[:1])
    assert found.valid.sum() == 1 and (found.classes == 0).all()
    assert np.asarray(found.boxes)[0][np.asarray(found.valid)[0]].tolist() == [[1, 1, 5, 5]]

    padding = ~np.asarray(found.valid)[0]
    assert padding.sum() == 7 and not np.asarray(found.boxes)[0][padding].any()


def test_a_limit_of_iou_is_no_negative(monkeypatch):
    """Of three boxes one is the object, one has an IoU of exactly 1/2 with it, one has none."""
    folds = []
    fold = losses.fold_in
    monkeypatch.setattr(losses, "fold_in", lambda key, n: folds.append(n) or fold(key, n))
    object_ = Objects(jnp.array([[[0, 0, 8, 8]]], jnp.float32), jnp.array([[1]]))
    boxes = np.array([[0, 0, 8, 8], [0, 0, 8, 4], [20, 20, 24, 24]], np.float32)
    rule, zeros = Sampling(4, 0.5, 0.75, 0.5), ([jnp.zeros((1, 3))], [jnp.zeros((1, 3, 4))])
    jitted = jax.jit(losses.rpn_loss, static_argnums=4)
    class_loss, box_loss = jitted(*zeros, [boxes], object_, rule, KEY[:1])
    np.testing.assert_allclose(class_loss, 2 * np.log(2) / 4, rtol=1e-6)
    assert box_loss.tolist() == [0]
    others = jnp.asarray(boxes[1:][None])  # the object itself is among the candidates
    regions = jax.jit(losses.sample_regions, static_argnums=2)(others, object_, rule, KEY[:1])
    assert regions.valid.sum() == 2
    assert folds == [0, 1]  # the two samples of an image are independent


@pytest.fixture
def regions(objects):
    boxes = np.zeros((2, 4, 4), np.float32)
    boxes[0, :3] = [[5, 5, 28, 30], [12, 18, 40, 55], [0, 0, 9, 9]]
    boxes[1, :2] = [[0, 4, 22, 30], [30, 30, 40, 60]]
    classes = jnp.array([[2, 1, 0, 0], [3, 0, 0, 0]], jnp.int32)
    index = jnp.array([[0, 1, 0, 0], [0, 0, 0, 0]], jnp.int32)
    valid = jnp.array([[True, True, True, False], [True, True, False, False]])
    return Regions(jnp.asarray(boxes), classes, index, valid)


def test_the_loss_of_regions(objects, regions):
    draw = np.random.default_rng(2)
    logits = draw.normal(size=(2, 4, 5)).astype(np.float32)
    deltas = draw.normal(size=(2, 4, 5, 4)).astype(np.float32)
    box_head_loss = jax.jit(losses.box_head_loss)
    found = box_head_loss(logits, deltas, regions, objects)
    for image in (0, 1):
        classes = boxes = 0.0
        for r in np.flatnonzero(regions.valid[image]):
            row, kind = logits[image, r].astype(np.float64), int(regions.classes[image, r])
            classes += np.log(np.exp(row).sum()) - row[kind]
            if kind:
                true = np.asarray(objects.boxes)[image, int(regions.owner[image, r])]
                want = offsets(true, np.asarray(regions.boxes)[image, r], np.array([10, 10, 5, 5]))
                boxes += smooth_l1(deltas[image, r, kind] - want, 1.0)
        np.testing.assert_allclose(found[0][image], classes / 4, rtol=1e-5)
        np.testing.assert_allclose(found[1][image], boxes / 4, rtol=1e-5)

    def total(deltas):
        return jnp.sum(losses.box_head_loss(jnp.asarray(logits), deltas, regions, objects)[1])

    gradients = np.asarray(jax.jit(jax.grad(total))(deltas))
    touched = {tuple(place) for place in np.argwhere(np.abs(gradients).sum(-1) > 0)}
    assert touched == {(0, 0, 2), (0, 1, 1), (1, 0, 3)}  # only the true class's box


def test_the_loss_of_masks(objects, regions):
    draw = np.random.default_rng(3)
    side, size = 6, 16
    logits = draw.normal(size=(2, 4, side, side, 5)).astype(np.float32)
    masks = (draw.uniform(size=(2, 3, size, size)) < 0.5).astype(np.float32)
    total, pixels = jax.jit(losses.mask_loss)(logits, regions, objects, masks)
    assert pixels.tolist() == [2 * 36, 36]
    for image in (0, 1):
        expected = 0.0
        for r in np.flatnonzero(np.asarray(regions.classes[image]) > 0):
            g, kind = int(regions.owner[image, r]), int(regions.classes[image, r])
            y0, x0, y1, x1 = np.asarray(regions.boxes)[image, r].astype(np.float64)
            own = np.asarray(objects.boxes)[image, g].astype(np.float64)
            for i in range(side):
                for j in range(side):
                    y = y0 + (y1 - y0) * (i + 0.5) / side
                    x = x0 + (x1 - x0) * (j + 0.5) / side
                    value = mask_at(masks[image, g], own, y, x)
                    expected += binary(float(logits[image, r, i, j, kind]), value >= 0.5)
        np.testing.assert_allclose(total[image], expected, rtol=1e-4)


def test_an_image_without_objects_is_background():
    """The losses of a batch without any object, and of one image beside another with objects."""
    draw = np.random.default_rng(4)
    anchors = AnchorGenerator((3, 4), 2.5, (0.5, 1.0, 2.0)).boxes(48, 64)
    rule = Sampling(2000, 0.5, 0.45, 0.3)
    inputs = {
        "scores": [draw.normal(size=(2, len(a))).astype(np.float32) for a in anchors],
        "moves": [draw.normal(size=(2, len(a), 4)).astype(np.float32) for a in anchors],
        "logits": draw.normal(size=(2, 6, 5)).astype(np.float32),
        "deltas": draw.normal(size=(2, 6, 5, 4)).astype(np.float32),
        "masks": draw.normal(size=(2, 6, 4, 4, 5)).astype(np.float32),
    }
    proposals = random_boxes(draw, 2, 8, least=0.2) * 40
    proposals[:, 4:] = 0  # padding

    def terms(inputs, objects):
        rpn = losses.rpn_loss(inputs["scores"], inputs["moves"], anchors, objects, rule, KEY)
        sample = Sampling(6, 0.5, 0.5, 0.5)
        regions = losses.sample_regions(jnp.asarray(proposals), objects, sample, KEY)
        box_head = losses.box_head_loss(inputs["logits"], inputs["deltas"], regions, objects)
        mask = losses.mask_loss(inputs["masks"], regions, objects, jnp.ones((2, 3, 8, 8)))
        return jnp.stack([*rpn, *box_head, *mask]), regions

    boxes = np.zeros((2, 3, 4), np.float32)
    boxes[1, 0] = [4, 6, 30, 29]
    none = Objects(jnp.zeros((2, 3, 4)), jnp.zeros((2, 3), jnp.int32))
    mixed = Objects(jnp.asarray(boxes), jnp.array([[0, 0, 0], [2, 0, 0]], jnp.int32))
    for objects in (none, mixed):
        found, regions = jax.jit(terms)(inputs, objects)
        flat = np.concatenate([x[0] for x in inputs["scores"]]).astype(np.float64)
        rows = inputs["logits"][0, :4].astype(np.float64)
        expected = np.log(np.exp(rows).sum(1)) - rows[:, 0]
        assert regions.valid[0].tolist() == [True] * 4 + [False] * 2
        assert not regions.classes[0].any()
        np.testing.assert_allclose(
            found[:, 0],
            [sum(binary(x, 0) for x in flat) / 2000, 0, expected.sum() / 6, 0, 0, 0],
            rtol=1e-5,
        )
        gradients = jax.jit(jax.grad(lambda x, o: jnp.sum(terms(x, o)[0])))(inputs, objects)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
    assert found[5, 1] == 16 * int((np.asarray(regions.classes[1]) > 0).sum()) > 0


def test_what_cannot_learn_is_refused():
    """A BatchNorm that is frozen at random, samples without a positive, levels without a stage."""
    config = mask_rcnn_digits.get_config()
    config.bn_statistics = "frozen"
    with pytest.raises(ConfigError, match="keeps the BatchNorm of config.init_from"):
        benchmarks.load(config, "").check_random_start(8)
    for key, value in (
        *(("region_samples", 3), ("pyramid_levels", (3, 5)), ("pyramid_levels", (2, 3))),
        *(("image_shape", (128, 168)), ("anchor_negative_iou", 0.8)),
    ):
        config = mask_rcnn_digits.get_config()
        config[key] = value
        with pytest.raises(ConfigError, match=f"config.{key}"):
            benchmarks.load(config, "")


def random_keys(rng: np.random.Generator, count: int) -> np.ndarray:
    """int32[count], negative ones among them."""
    return rng.integers(-(2**31), 2**31, count).astype(np.int32)


def test_as_many_are_drawn_as_asked_for_and_only_eligible_ones():
    rng = np.random.default_rng(0)
    eligible = rng.random((200, 70)) < rng.choice([0, 0.1, 0.5, 1], (200, 1))
    k = rng.integers(0, 80, 200).astype(np.int32)
    marks = np.asarray(DRAW(eligible, k, random_keys(rng, 200)))
    assert not (marks & ~eligible).any()
    np.testing.assert_array_equal(marks.sum(1), np.minimum(k, eligible.sum(1)))


def test_each_eligible_position_is_drawn_equally_often():
    """Also with keys that follow each other, as the numbers of examples do."""
    eligible = np.broadcast_to(np.arange(50) % 2 == 0, (4000, 50))
    counts = np.asarray(DRAW(eligible, np.int32(5), np.arange(4000, dtype=np.int32))).sum(0)
    expected, freedom = 4000 * 5 / 25, 24
    chi2 = ((counts[::2] - expected) ** 2 / expected).sum() / (1 - 5 / 25)
    assert abs(chi2 - freedom) < 5 * (2 * freedom) ** 0.5, counts


def test_a_draw_depends_on_the_key_alone():
    """Whichever rows are beside it; and another number gives another draw."""
    rng = np.random.default_rng(1)
    eligible, key = rng.random((16, 300)) < 0.8, random_keys(rng, 16)
    together = np.asarray(DRAW(eligible, 20, key))
    order = rng.permutation(16)
    np.testing.assert_array_equal(DRAW(eligible[order], 20, key[order]), together[order])
    np.testing.assert_array_equal(DRAW(eligible[3:4], 20, key[3:4]), together[3:4])
    folded = [np.asarray(FOLD(key, number)) for number in (0, 1)]
    assert folded[0].dtype == np.int32 and len({*key, *folded[0], *folded[1]}) == 48
    drawn = [together, *(np.asarray(DRAW(eligible, 20, each)) for each in folded)]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (drawn[a] & drawn[b]).sum() < 16 * 20 / 4  # by chance it is 1 of 12


@pytest.mark.parametrize(("total", "share"), [(256, 0.5), (32, 0.25), (7, 0.0), (9, 1.0)])
def test_negatives_take_the_place_of_missing_positives(total, share):
    rng = np.random.default_rng(total)
    kind = rng.random((60, 400))
    positive = kind < rng.choice([0, 0.01, 0.3], (60, 1))
    negative = kind > rng.choice([0.4, 0.99], (60, 1))
    rule = losses.Sampling(total, share, 0.5, 0.5)
    drawn, others = map(np.asarray, BALANCED(positive, negative, rule, random_keys(rng, 60)))
    assert not (drawn & ~positive).any() and not (others & ~negative).any()
    first = np.minimum(positive.sum(1), int(total * share))
    np.testing.assert_array_equal(drawn.sum(1), first)
    np.testing.assert_array_equal(others.sum(1), np.minimum(negative.sum(1), total - first))


@pytest.mark.parametrize("side", [4, 28])
def test_bits_are_those_of_numpy(side):
    rng = np.random.default_rng(side)
    true = rng.integers(0, 2, (3, 5, side, side)).astype(np.uint8)
    bits = np.packbits(true.reshape(3, 5, -1), -1)
    found = np.asarray(jax.jit(losses.unpack_masks, static_argnums=1)(bits, side))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, true)


def mask_at(mask: np.ndarray, box: np.ndarray, y: float, x: float) -> float:
    """The mask at a point, in float64."""
    side = len(mask)
    if not (box[0] <= y <= box[2] and box[1] <= x <= box[3]) or min(box[2:] - box[:2]) <= 0:
        return 0.0
    ends = []
    for value, first, last in ((y, box[0], box[2]), (x, box[1], box[3])):
        place = min(max((value - first) / (last - first) * side - 0.5, 0), side - 1)
        low = min(int(place), side - 2)
        ends.append((low, place - low))
    (i, v), (j, u) = ends
    top = (1 - u) * mask[i, j] + u * mask[i, j + 1]
    bottom = (1 - u) * mask[i + 1, j] + u * mask[i + 1, j + 1]
    return (1 - v) * top + v * bottom


def test_cells_of_regions_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    true = rng.random((2, 4, 12, 12)).astype(np.float32)
    boxes = 100 * random_boxes(rng, 2, 4, least=0.1)
    boxes[0, 3] = 0  # padding
    regions = 110 * random_boxes(rng, 2, 30, least=0.01) - 5
    index = rng.integers(0, 4, (2, 30)).astype(np.int32)
    regions[:, :10] = np.take_along_axis(boxes, index[:, :10, None], 1) + rng.normal(
        0, 3, (2, 10, 4)
    )
    found = np.asarray(CROP(true, boxes, index, regions, 7))
    expected = np.zeros((2, 30, 7, 7))
    for b, r, i, j in np.ndindex(expected.shape):
        y0, x0, y1, x1 = regions[b, r].astype(np.float64)
        y, x = y0 + (y1 - y0) * (i + 0.5) / 7, x0 + (x1 - x0) * (j + 0.5) / 7
        g = index[b, r]
        expected[b, r, i, j] = mask_at(true[b, g], boxes[b, g].astype(np.float64), y, x)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert ((expected > 0).mean() > 0.2) and (expected == 0).mean() > 0.2


@pytest.mark.parametrize("size", [9, 28, 40])
def test_a_region_that_is_the_box_has_the_mask_resized(size):
    true = np.random.default_rng(1).random((1, 1, 28, 28)).astype(np.float32)
    box = np.array([[[10, 20, 66, 132]]], np.float32)
    found = CROP(true, box, np.zeros((1, 1), np.int32), box, size)
    expected = tf.image.resize(true[0, 0, ..., None], (size, size), "bilinear").numpy()
    np.testing.assert_allclose(found[0, 0], expected[..., 0], atol=1e-5)


def test_borders_belong_to_a_box_and_an_empty_one_has_no_mask():
    """Regions of one cell, whose centre is at a corner of the box, or beyond it, or at 0.5."""
    true = np.arange(1, 17, dtype=np.float32).reshape(1, 1, 4, 4)
    centres = np.array([[0, 0], [8, 8], [0, 8], [-0.25, 4], [4, 8.25]], np.float32)
    regions = np.concatenate([centres - 2, centres + 2], -1)[None]
    box, index = np.array([[[0, 0, 8, 8]]], np.float32), np.zeros((1, 5), np.int32)
    found = CROP(true, box, index, regions, 1)
    np.testing.assert_array_equal(np.ravel(found), [1, 16, 4, 0, 0])
    middle = CROP(true, box / 16, index[:, :1], box / 32, 1)  # a box of half a pixel
    np.testing.assert_array_equal(np.ravel(middle), [(1 + 2 + 5 + 6) / 4])
    unit = np.array([[[0, 0, 1, 1]]], np.float32)
    for empty in ([0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]):
        assert not np.asarray(
            CROP(true, np.array([[empty]], np.float32), index[:, :1], unit, 1)
        ).any()
