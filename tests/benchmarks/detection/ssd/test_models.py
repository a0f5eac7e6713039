"""SSD's network and default boxes: published sizes, orders, and a copy in PyTorch."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import benchmarks
from benchmarks.detection.ssd import losses, models
from benchmarks.detection.ssd.settings import Backbone, Maps
from common.keys import read_config
from configs import ssd
from tests.benchmarks.detection.test_boxes import offsets, overlap

TINY = {
    **{"num_classes": 4, "image_size": 64, "resnet_stages": (1, 2, 1), "num_filters": 4},
    **{"extra_squeezed": (4, 4), "extra_filters": (8, 8), "extra_strides": (2, 1)},
    **{"extra_paddings": (1, 0), "box_steps": (8, 16, 32), "box_sides": (12, 20, 30, 50)},
    **{"box_ratios": (2, 3, 1), "batch_norm": "plain", "data_dir": "", "max_pool": "torch"},
}

WEIGHTS = np.array([10, 10, 5, 5])  # of the deltas
SSD300 = read_config(Maps, ssd.get_config()).default_boxes


def make(**overrides) -> Any:
    config = ssd.get_config()
    config.update(overrides)
    return benchmarks.load(config.lock(), "")


def shapes(benchmark):
    return jax.eval_shape(benchmark.init, jax.random.key(0))[0]


def test_the_number_of_parameters_is_the_published_one():
    leaves = jax.tree.leaves(shapes(make()))
    assert sum(x.size for x in leaves) == 19_972_534  # of MLPerf's reference
    backbone = jax.tree.leaves(shapes(make())["backbone"])
    assert sum(x.size for x in backbone) == 8_170_304


def test_predictions_are_in_the_order_of_the_default_boxes():
    """A head that answers in one shape and looks at one pixel lights one default box."""
    benchmark = make(**TINY)
    like = jax.eval_shape(benchmark.init, jax.random.key(0))
    params, state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    shape, classes = 3, 5
    bias = params["head2"]["bias"].reshape(-1, 4 + classes)
    params["head2"]["bias"] = bias.at[shape, 4 + 2].set(9.0).ravel()
    images = jnp.zeros((1, 64, 64, 3))

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def predict(params, state):
        return benchmark._model.apply({"params": params, **state}, images, train=False)

    outputs = predict(params, state)
    _, logits = models.join(outputs, classes)
    lit = np.flatnonzero(np.asarray(logits)[0, :, 2] > 1)
    sides, per_cell = (
        benchmark._default_boxes.feature_sizes,
        benchmark._default_boxes.boxes_per_cell,
    )
    first = sides[0] ** 2 * per_cell[0]
    expected = first + shape + per_cell[1] * np.arange(sides[1] ** 2)
    np.testing.assert_array_equal(lit, expected)


# A copy in PyTorch, for machines that have it.


def torch_network(torch, params, state, images, train):
    """(deltas, logits) of the network written with PyTorch's functions."""
    functional = torch.nn.functional

    def conv(x, name, stride=1, padding=0):
        layer = params
        for part in name.split("/"):
            layer = layer[part]
        kernel = layer["kernel"].permute(3, 2, 0, 1)
        return functional.conv2d(x, kernel, layer.get("bias"), stride, padding)

    def norm(x, block, name):
        layer = params["backbone"][block][name] if block else params["backbone"][name]
        stats = state["backbone"][block][name] if block else state["backbone"][name]
        return functional.batch_norm(
            x, stats["mean"].clone(), stats["var"].clone(), layer["scale"], layer["bias"], train
        )

    x = images.permute(0, 3, 1, 2)
    x = functional.relu(norm(conv(x, "backbone/conv_stem", 2, 3), "", "bn_stem"))
    x = functional.max_pool2d(x, 3, 2, 1)
    for stage, (count, stride) in enumerate(((1, 1), (2, 2), (1, 1)), 1):
        for number in range(1, count + 1):
            block = f"stage{stage}_block{number}"
            here = stride if number == 1 else 1
            y = norm(conv(x, f"backbone/{block}/conv1", here, 1), block, "bn1")
            y = norm(conv(functional.relu(y), f"backbone/{block}/conv2", 1, 1), block, "bn2")
            if "conv_proj" in params["backbone"][block]:
                x = norm(conv(x, f"backbone/{block}/conv_proj", here), block, "bn_proj")
            x = functional.relu(x + y)
    maps = [x]
    for i, (stride, padding) in enumerate(((2, 1), (1, 0)), 1):
        x = functional.relu(conv(x, f"extra{i}_conv1"))
        x = functional.relu(conv(x, f"extra{i}_conv2", stride, padding))
        maps.append(x)
    outputs = [
        conv(x, f"head{i}", 1, 1).permute(0, 2, 3, 1).reshape(len(x), -1, 9)
        for i, x in enumerate(maps, 1)
    ]
    joined = torch.cat(outputs, 1)
    return joined[..., :4], joined[..., 4:]


def torch_loss(torch, deltas, logits, boxes, classes, anchors):
    """The mean over images of the loss, matched with a loop and mined by sorting twice."""
    losses = []
    functional = torch.nn.functional
    for image in range(len(deltas)):
        real = [g for g in range(len(boxes[image])) if classes[image, g] > 0]
        overlaps = np.array([[overlap(boxes[image, g], a) for a in anchors] for g in real])
        owner = np.where(overlaps.max(0) >= 0.5, overlaps.argmax(0), -1)
        for number, row in enumerate(overlaps):
            owner[row.argmax()] = number
        labels = torch.tensor([classes[image, real[o]] if o >= 0 else 0 for o in owner]).long()
        positive = labels > 0
        entropy = functional.cross_entropy(logits[image], labels, reduction="none")
        mined = entropy.detach().masked_fill(positive, 0.0)
        rank = mined.argsort(descending=True).argsort()
        negative = ~positive & (rank < 3 * positive.sum())
        targets = torch.tensor(
            np.array(
                [
                    offsets(boxes[image, real[max(o, 0)]], a, WEIGHTS)
                    for o, a in zip(owner, anchors, strict=True)
                ]
            )
        )
        distance = functional.smooth_l1_loss(deltas[image], targets, reduction="none").sum(1)
        total = entropy[positive | negative].sum() + distance[positive].sum()
        losses.append(total / positive.sum())
    return torch.stack(losses).mean()


@pytest.mark.parity
def test_loss_and_gradients_are_those_of_pytorch(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(Backbone, "dtype", jnp.float64)
    draw = np.random.default_rng(0)
    with jax.enable_x64(True):
        benchmark = make(**TINY, precision="float32")
        params, state = benchmark.init(jax.random.key(0))
        params = jax.tree.map(lambda x: np.asarray(x, float) + draw.normal(0, 0.2, x.shape), params)
        images = draw.normal(size=(3, 64, 64, 3))
        corner, side = draw.uniform(0, 0.6, (3, 5, 2)), draw.uniform(0.15, 0.4, (3, 5, 2))
        boxes = np.concatenate([corner, corner + side], -1).astype(np.float32)
        classes = draw.integers(1, 5, (3, 5)).astype(np.int32) * (draw.random((3, 5)) < 0.8)
        classes[:, 0] = 1

        def loss(params):
            outputs, _ = benchmark._model.apply(
                {"params": params, **state}, images, train=True, mutable=["batch_stats"]
            )
            deltas, logits = models.join(outputs, 5)
            parts = losses.detection_loss(
                deltas,
                logits,
                jnp.asarray(boxes * (classes > 0)[..., None]),
                jnp.asarray(classes),
                benchmark._anchors,
            )
            return jnp.mean(parts[0] + parts[1]), (deltas, logits)

        (value, outputs), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    theirs = jax.tree.map(lambda x: torch.tensor(x, requires_grad=True), params)
    stats = jax.tree.map(lambda x: torch.tensor(np.asarray(x, float)), state["batch_stats"])
    found = torch_network(torch, theirs, stats, torch.tensor(images), True)
    for mine, other in zip(outputs, found, strict=True):
        np.testing.assert_allclose(mine, other.detach().numpy(), rtol=1e-9, atol=1e-9)
    total = torch_loss(torch, *found, boxes, classes, benchmark._anchors)
    np.testing.assert_allclose(value, total.item(), rtol=1e-6)
    total.backward()
    scale = max(np.abs(x).max() for x in jax.tree.leaves(gradients))
    jax.tree.map(
        lambda mine, other: np.testing.assert_allclose(
            mine, other.grad.numpy(), rtol=1e-5, atol=1e-6 * scale
        ),
        gradients,
        theirs,
    )


def original_boxes() -> np.ndarray:
    """The 8,732 boxes (cx, cy, w, h) by map, shape, row and column, as MLPerf's code has them."""
    cells_of, steps = [38, 19, 10, 5, 3, 1], [8, 16, 32, 64, 100, 300]
    scales = [21, 45, 99, 153, 207, 261, 315]
    ratios = [(2,), (2, 3), (2, 3), (2, 3), (2,), (2,)]
    boxes = []
    for k, (cells, step) in enumerate(zip(cells_of, steps, strict=True)):
        small, between = scales[k] / 300, math.sqrt(scales[k] / 300 * scales[k + 1] / 300)
        shapes = [(small, small), (between, between)]
        for ratio in ratios[k]:
            w, h = small * math.sqrt(ratio), small / math.sqrt(ratio)
            shapes += [(w, h), (h, w)]
        for w, h in shapes:
            for i in range(cells):
                for j in range(cells):
                    centre = ((j + 0.5) * step / 300, (i + 0.5) * step / 300)
                    boxes.append([min(max(each, 0), 1) for each in (*centre, w, h)])
    return np.array(boxes)


def test_the_boxes_of_300_pixels_have_the_published_check_sums():
    boxes = SSD300.boxes()
    assert boxes.shape == (8732, 4)
    np.testing.assert_allclose(
        boxes.sum(0), [4443.1466667, 4443.1466667, 1171.9676687, 1171.9676687], atol=1e-7
    )
    np.testing.assert_allclose(boxes[0], [0.0133333, 0.0133333, 0.07, 0.07], atol=1e-7)
    assert boxes[:, :2].max() == 1  # the centres of the last cells at a step of 8


def test_the_boxes_are_the_originals_in_the_order_of_a_convolutions_output():
    expected, start = [], 0
    layout = SSD300
    for cells, shapes in zip(layout.feature_sizes, layout.boxes_per_cell, strict=True):
        part = original_boxes()[start : start + cells**2 * shapes]
        expected.append(part.reshape(shapes, cells, cells, 4).transpose(1, 2, 0, 3).reshape(-1, 4))
        start += len(part)
    ours = layout.boxes()[:, [1, 0, 3, 2]]
    np.testing.assert_allclose(ours, np.concatenate(expected), rtol=1e-12)
