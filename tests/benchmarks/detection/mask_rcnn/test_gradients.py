"""Mask R-CNN's losses and gradients against a PyTorch copy in float64, where PyTorch is installed.

The copy is written from the papers, without torchvision. The sampled anchors and regions are given
to both sides, because a sample that differs would hide whether the rest is equal.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import benchmarks
from benchmarks.detection.mask_rcnn import losses
from benchmarks.detection.mask_rcnn.losses import Regions
from common.layers import space_to_depth
from common.trees import by_name
from configs import mask_rcnn_digits
from tests.benchmarks.detection.mask_rcnn.test_roi_align import level_of, weights
from tests.benchmarks.detection.test_boxes import offsets, overlap

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.parity
F = torch.nn.functional
CLASSES, LEVELS, MASK, POSITIVES = 4, (2, 3, 4, 5), 8, 4
BOXES = np.zeros((2, 3, 4), np.float32)
BOXES[0, :2] = [[4, 6, 40, 39], [10, 24, 44, 60]]
BOXES[1, 0] = [2, 3, 30, 50]
KINDS = np.array([[2, 1, 0], [3, 0, 0]], np.int32)


def make():
    """A small benchmark with bottlenecks, whose last level is no stage's."""
    config = mask_rcnn_digits.get_config()
    config.update({"num_classes": CLASSES, "image_short": 48, "image_long": 64, "max_boxes": 3})
    config.update({"image_shape": (64, 64), "mask_size": MASK, "resnet_stages": (2, 1, 1)})
    config.update({"resnet_bottleneck": True, "num_filters": 4, "max_pool": "torch"})
    config.update({"bn_statistics": "frozen", "pyramid_levels": LEVELS, "pyramid_filters": 6})
    config.update({"anchor_scale": 2.5, "anchor_ratios": (0.5, 1.0, 2.0), "region_samples": 16})
    config.update({"region_scale": 40.0, "box_pool": 3, "mask_pool": 4, "box_features": (8, 7)})
    config.update({"mask_features": (6, 5), "data_dir": ""})
    config.update({"proposals_before_nms": 8, "proposals_after_nms": 4})
    return benchmarks.load(config.lock(), "")


@pytest.fixture(scope="module")
def case():
    """(benchmark, params, model_state, batch, regions, anchors drawn as positive and negative)."""
    benchmark: Any = make()
    draw = np.random.default_rng(0)
    shapes = jax.eval_shape(benchmark.init, jax.random.key(0))

    def value(name, shape):
        if name.endswith("/var"):
            return draw.uniform(0.5, 1.5, shape.shape)
        if name.endswith("/scale"):
            return draw.uniform(0.5, 1.0, shape.shape)
        fan = np.prod(shape.shape[:-1]) if name.endswith("/kernel") else 100
        return draw.normal(size=shape.shape) * np.sqrt(1.5 / fan)

    variables = [
        jax.tree.unflatten(
            jax.tree.structure(tree),
            [value(name, shape).astype(np.float32) for name, shape in by_name(tree).items()],
        )
        for tree in shapes
    ]
    batch = {
        "image": draw.integers(0, 256, (2, 32, 32, 12), dtype=np.uint8),
        "size": np.array([[47, 64], [64, 57]], np.float32),
        "boxes": BOXES,
        "classes": KINDS,
        "masks": draw.integers(0, 256, (2, 3, MASK**2 // 8), dtype=np.uint8),
        "draw": np.array([5, 6], np.int32),
    }
    owner = np.array([[0, 1, 0, 1], [0, 0, 0, 0]], np.int32)
    near = np.take_along_axis(BOXES, owner[..., None], 1) + draw.uniform(-3, 3, (2, POSITIVES, 4))
    corner = draw.uniform(0, 40, (2, 6, 2))
    far = np.concatenate([corner, corner + draw.uniform(3, 24, (2, 6, 2))], -1)
    kinds = np.zeros((2, 10), np.int32)
    kinds[:, :POSITIVES] = np.take_along_axis(KINDS, owner, 1)
    valid = np.ones((2, 10), bool)
    valid[1, 8:] = False
    arrays: Any = (
        np.concatenate([near, far], 1).clip(0, 64).astype(np.float32),
        kinds,
        np.pad(owner, ((0, 0), (0, 6))),
        valid,
    )
    regions = Regions(*arrays)
    anchors = np.concatenate(benchmark.settings.anchors.boxes(64, 64))
    overlaps = np.array(
        [[max(overlap(g, a) for g in BOXES[i, : 2 - i]) for a in anchors] for i in (0, 1)]
    )
    positive = overlaps >= np.sort(overlaps, 1)[:, -6:-5]
    negative = ~positive & (draw.uniform(size=overlaps.shape) < 0.03)
    return benchmark, *variables, batch, regions, anchors, positive, negative


def ours(case, monkeypatch):
    """(losses by name, gradients of their sum by name)."""
    benchmark, params, model_state, batch, regions, _, positive, negative = case
    fixed = jax.tree.map(jnp.asarray, (regions, positive, negative))
    monkeypatch.setattr(losses, "sample_regions", lambda *_: fixed[0])
    monkeypatch.setattr(losses, "sample_balanced", lambda *_: fixed[1:])

    def total(params):
        terms, _, _ = benchmark.loss(params, model_state, batch, jax.random.key(0))
        parts = {name: value / weight for name, (value, weight) in terms.items()}
        return sum(parts.values()), parts

    (_, parts), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
    return parts, by_name(gradients)


class Copy:
    """The same network in PyTorch; arrays keep our layout and names, maps are [b, c, h, w]."""

    def __init__(self, params, model_state):
        every = by_name(params) | by_name(model_state)
        self.arrays = {name: torch.tensor(x, dtype=torch.float64) for name, x in every.items()}
        self.trained = {name: self.arrays[name].requires_grad_() for name in by_name(params)}

    def conv(self, name, x, stride=1):
        kernel, bias = self.arrays[f"{name}/kernel"], self.arrays.get(f"{name}/bias")
        return F.conv2d(x, kernel.permute(3, 2, 0, 1), bias, stride, len(kernel) // 2)

    def dense(self, name, x):
        return x @ self.arrays[f"{name}/kernel"] + self.arrays[f"{name}/bias"]

    def norm(self, name, x):
        mean, var = (self.arrays[f"batch_stats/{name}/{kind}"] for kind in ("mean", "var"))
        scale, bias = (self.arrays[f"{name}/{kind}"] for kind in ("scale", "bias"))
        return F.batch_norm(x, mean, var, scale, bias, eps=1e-5)

    def block(self, name, x, stride):
        y = F.relu(self.norm(f"{name}/bn1", self.conv(f"{name}/conv1", x)))
        y = F.relu(self.norm(f"{name}/bn2", self.conv(f"{name}/conv2", y, stride)))
        y = self.norm(f"{name}/bn3", self.conv(f"{name}/conv3", y))
        if f"{name}/conv_proj/kernel" in self.arrays:
            x = self.norm(f"{name}/bn_proj", self.conv(f"{name}/conv_proj", x, stride))
        return F.relu(x + y)

    def maps(self, x):
        x = F.relu(self.norm("backbone/bn_stem", self.conv("backbone/conv_stem", x, 2)))
        x, stages = F.max_pool2d(x, 3, 2, 1), {}
        for stage, blocks in ((1, 2), (2, 1), (3, 1)):
            for j in range(blocks):
                stride = 2 if stage > 1 and j == 0 else 1
                x = self.block(f"backbone/stage{stage}_block{j + 1}", x, stride)
            stages[stage + 1] = x
        found, above = {}, None
        for level in (4, 3, 2):
            x = self.conv(f"pyramid/lateral{level}", stages[level])
            above = x if above is None else x + F.interpolate(above, scale_factor=2)
            found[level] = self.conv(f"pyramid/output{level}", above)
        found[5] = found[4][:, :, ::2, ::2]
        return {level: found[level] for level in LEVELS}

    def proposed(self, maps):
        """(logits [b, n], deltas [b, n, 4]) of all anchors."""
        logits, deltas = [], []
        for x in maps.values():
            y = F.relu(self.conv("proposal_head/conv", x))
            score, code = (self.conv(f"proposal_head/{k}", y) for k in ("score", "code"))
            logits.append(score.permute(0, 2, 3, 1).flatten(1))
            deltas.append(code.permute(0, 2, 3, 1).reshape(len(x), -1, 4))
        return torch.cat(logits, 1), torch.cat(deltas, 1)

    def boxes(self, pooled):
        x = pooled.permute(0, 2, 3, 1).flatten(1)
        for i in (1, 2):
            x = F.relu(self.dense(f"box_head/dense{i}", x))
        deltas = self.dense("box_head/code", x)
        return self.dense("box_head/class", x), deltas.reshape(len(x), -1, 4)

    def masks(self, x):
        for i in (1, 2):
            x = F.relu(self.conv(f"mask_head/conv{i}", x))
        kernel = self.arrays["mask_head/upsampled/kernel"].flip(0, 1).permute(2, 3, 0, 1)
        x = F.conv_transpose2d(x, kernel, self.arrays["mask_head/upsampled/bias"], stride=2)
        return self.conv("mask_head/mask", F.relu(x))


def aligned(maps, image, boxes, size):
    """RoIAlign [R, c, size, size] with the weights of the loop in RoIAlign's own test."""
    found = []
    for box in boxes:
        level = level_of(box, 2, 4, 40.0)
        table = maps[level][image]
        y, x = (torch.tensor(w) for w in weights(box, table.shape[1:], level, size))
        found.append(torch.einsum("ip,cpq,jq->cij", y, table, x))
    return torch.stack(found)


def outline(bits, own, region, size):
    """bool[size, size]: the mask of a true box at the cells of a region."""
    mask = torch.tensor(np.unpackbits(bits).reshape(1, 1, MASK, MASK), dtype=torch.float64)
    axes = []
    for k in (0, 1):
        centres = (np.arange(size) + 0.5) / size
        points = region[k] + (region[2 + k] - region[k]) * centres
        axes.append(2 * (points - own[k]) / (own[2 + k] - own[k]) - 1)
    y, x = np.meshgrid(*axes, indexing="ij")
    grid = torch.tensor(np.stack([x, y], -1))[None]
    values = F.grid_sample(mask, grid, padding_mode="border", align_corners=False)[0, 0].numpy()
    return (values >= 0.5) & (np.abs(y) <= 1) & (np.abs(x) <= 1)


def theirs(case):
    """As `ours`, in PyTorch."""
    _, params, model_state, batch, regions, anchors, positive, negative = case
    copy = Copy(params, model_state)
    pixels = space_to_depth.restore(batch["image"])
    pixels = (pixels - np.array([123.675, 116.28, 103.53])) / [58.395, 57.12, 57.375]
    for i, (height, width) in enumerate(batch["size"].astype(int)):
        pixels[i, height:] = pixels[i, :, width:] = 0
    maps = copy.maps(torch.tensor(pixels.transpose(0, 3, 1, 2).copy()))
    logits, deltas = copy.proposed(maps)
    parts: dict[str, Any] = dict.fromkeys(
        ("proposal_class", "proposal_box", "class", "box", "mask"), 0.0
    )
    areas = 0
    for i in (0, 1):
        drawn, true = positive[i] | negative[i], torch.tensor(positive[i], dtype=torch.float64)
        bce = F.binary_cross_entropy_with_logits
        parts["proposal_class"] += bce(logits[i][drawn], true[drawn], reduction="sum") / 64 / 2
        for n in np.flatnonzero(positive[i]):
            box = max(BOXES[i, : 2 - i], key=lambda g: overlap(g, anchors[n]))
            target = torch.tensor(offsets(box, anchors[n], 1.0))
            distance = F.smooth_l1_loss(deltas[i, n], target, reduction="sum", beta=1 / 9)
            parts["proposal_box"] += distance / 64 / 2
        boxes, kinds = regions.boxes[i], torch.tensor(regions.classes[i]).long()
        scores, found = copy.boxes(aligned(maps, i, boxes, 3))
        entropy = F.cross_entropy(scores, kinds, reduction="none")
        parts["class"] += entropy[torch.tensor(regions.valid[i])].sum() / 10 / 2
        shapes = copy.masks(aligned(maps, i, boxes[:POSITIVES], 4))
        for r in range(POSITIVES):
            own, region = (x.astype(float) for x in (BOXES[i, regions.owner[i, r]], boxes[r]))
            target = torch.tensor(offsets(own, region, np.array([10, 10, 5, 5])))
            distance = F.smooth_l1_loss(found[r, kinds[r]], target, reduction="sum")
            parts["box"] += distance / 10 / 2
            target = torch.tensor(outline(batch["masks"][i, regions.owner[i, r]], own, region, 8))
            parts["mask"] += bce(shapes[r, kinds[r]], target.double(), reduction="sum")
            areas += 64
    parts["mask"] = parts["mask"] / areas
    total: Any = sum(parts.values())
    total.backward()
    gradients = {name: x.grad.numpy() for name, x in copy.trained.items()}
    return {f"{name}_loss": x.item() for name, x in parts.items()}, gradients


def test_losses_and_gradients(case, monkeypatch):
    """Measured: losses within 9e-7, gradients within 6e-7 of the largest of their array."""
    (mine, my_gradients), (other, gradients) = ours(case, monkeypatch), theirs(case)
    assert mine.keys() == other.keys() and my_gradients.keys() == gradients.keys()
    for name, value in other.items():
        assert abs(mine[name] / value - 1) < 1e-5, name
    for name, gradient in gradients.items():
        assert np.abs(gradient).max() > 1e-6, name
        np.testing.assert_allclose(
            my_gradients[name], gradient, rtol=0, atol=1e-4 * np.abs(gradient).max(), err_msg=name
        )
