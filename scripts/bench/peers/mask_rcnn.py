"""Mask R-CNN in its plain form: network, samples and losses of `benchmarks.detection.mask_rcnn`.

Anchors and regions are sampled by sorting, suppression goes through the boxes one by one, RoIAlign
gathers the four neighbours of each point and averages, and jax derives all gradients. Images are
plain [H, W, 3]. Layers have our names, so that our weights fit. Random numbers are the same hashes
as in our network, so the samples are the same; here the largest ones are found by sorting.

Of an image there are G true objects ("boxes" f32[G, 4], "classes" int32[G], 0 is padding, "masks"
in bits), N anchors and R regions.
"""

import operator
from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.base import Spec
from benchmarks.detection.boxes import area, clip, decode_boxes, encode_boxes, iou
from benchmarks.detection.losses import smooth_l1
from benchmarks.detection.mask_rcnn import MaskRcnn
from benchmarks.detection.mask_rcnn.losses import Regions, Sampling, fold_in
from benchmarks.detection.mask_rcnn.roi_align import map_levels
from benchmarks.detection.mask_rcnn.settings import Settings
from common.hashing import hash32
from common.trees import Parts, by_name
from input_pipeline import normalize
from scripts.bench.peers import Peer
from scripts.bench.peers.resnet import Trunk
from scripts.bench.peers.ssd import matched

_ONES = (1.0, 1.0, 1.0, 1.0)
_ANCHOR_BETA = 1 / 9
_AROUND = ((1, 1), (1, 1))
_conv3x3 = partial(nn.Conv, kernel_size=(3, 3), padding=_AROUND)


def _drawn(eligible: jax.Array, count: Any, key: jax.Array) -> jax.Array:
    """Draws `count` random positions out of the eligible [N]."""
    numbers = (hash32(key, jnp.arange(len(eligible))) >> 1).astype(jnp.int32)
    order = jnp.argsort(jnp.where(eligible, numbers, -1), descending=True, stable=True)
    return eligible & (jnp.argsort(order) < count)


def _balanced(positive: jax.Array, negative: jax.Array, rule: Sampling, key: jax.Array) -> Any:
    """The positives and negatives [N] to learn from."""
    positive = _drawn(positive, rule.positives, key)
    return positive, _drawn(negative, rule.count - jnp.sum(positive), key)


def sampled(batch: Mapping[str, jax.Array], rule: Sampling, proposals: jax.Array) -> Regions:
    """Samples RoIs among proposals f32[b, P, 4] and true boxes."""

    def of_image(boxes: jax.Array, classes: jax.Array, key: jax.Array, proposals: jax.Array) -> Any:
        valid = (classes > 0) & (area(boxes) > 0)
        candidates = jnp.concatenate([proposals, jnp.where(valid[:, None], boxes, 0)])
        overlaps = iou(jnp.where(valid[:, None], boxes, 0), candidates)
        owner, overlap = jnp.argmax(overlaps, 0), jnp.max(overlaps, 0)
        positive = overlap >= rule.positive_iou
        negative = ~positive & (overlap < rule.negative_iou) & (area(candidates) > 0)
        positive, negative = _balanced(positive, negative, rule, fold_in(key, 1))
        index = jnp.argsort(jnp.where(positive, 0, jnp.where(negative, 1, 2)), stable=True)
        index = index[: rule.count]
        is_sampled, owner = (positive | negative)[index], owner[index]
        return Regions(
            jnp.where(is_sampled[:, None], candidates[index], 0),
            jnp.where(positive[index], classes[owner], 0),
            owner,
            is_sampled,
        )

    images = batch["boxes"], batch["classes"], batch["draw"], proposals
    return Regions(*jax.lax.stop_gradient(jax.vmap(of_image)(*images)))


def _anchor_loss(logits: Any, deltas: Any, anchors: jax.Array, rule: Sampling, truth: Any) -> Any:
    """The loss of an image's anchors: logits [N], deltas [N, 4]."""
    boxes, classes, key = truth
    valid = (classes > 0) & (area(boxes) > 0)
    owner, positive, overlap = matched(boxes, valid, anchors, rule.positive_iou)
    negative = ~positive & (overlap < rule.negative_iou)
    positive, negative = _balanced(positive, negative, rule, fold_in(key, 0))
    entropy = optax.sigmoid_binary_cross_entropy(logits, positive)
    distance = smooth_l1(deltas - encode_boxes(boxes[owner], anchors, _ONES), _ANCHOR_BETA).sum(-1)
    total = jnp.sum(jnp.where(positive | negative, entropy, 0))
    return (total + jnp.sum(jnp.where(positive, distance, 0))) / rule.count


def _region_loss(logits: jax.Array, deltas: jax.Array, regions: Regions, boxes: jax.Array) -> Any:
    """The loss of an image's regions: logits [R, C], deltas [R, C, 4]."""
    count, positive = len(logits), regions.classes > 0
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, regions.classes)
    region_boxes = jnp.where(positive[:, None], regions.boxes, jnp.array([0.0, 0, 1, 1]))
    targets = encode_boxes(boxes[regions.owner], region_boxes)
    of_class = deltas[jnp.arange(count), regions.classes]
    distance = jnp.where(positive, smooth_l1(of_class - targets).sum(-1), 0)
    return (jnp.sum(jnp.where(regions.valid, entropy, 0)) + jnp.sum(distance)) / count


def _true_masks(masks: jax.Array, boxes: jax.Array, regions: Regions, size: int) -> jax.Array:
    """Of masks [G, m, m], each in its object's box, the pixels [R, size, size] in the regions."""

    def of_region(region: jax.Array, owner: jax.Array) -> jax.Array:
        box, side = boxes[owner], masks.shape[-1]

        def along(axis: int) -> tuple[jax.Array, ...]:
            first, length = box[axis], box[axis + 2] - box[axis]
            centres = (jnp.arange(size, dtype=jnp.float32) + 0.5) / size
            points = region[axis] + (region[axis + 2] - region[axis]) * centres
            share = (points - first) / jnp.where(length > 0, length, 1)
            inside = (share >= 0) & (share <= 1) & (length > 0)
            cell = jnp.clip(share * side - 0.5, 0, side - 1)
            low = jnp.floor(cell).astype(jnp.int32)
            return low, jnp.minimum(low + 1, side - 1), cell - low, inside

        (y0, y1, dy, y_in), (x0, x1, dx, x_in) = along(0), along(1)
        mask, dy = masks[owner], dy[:, None]
        above = mask[y0[:, None], x0] * (1 - dx) + mask[y0[:, None], x1] * dx
        below = mask[y1[:, None], x0] * (1 - dx) + mask[y1[:, None], x1] * dx
        return jnp.where(y_in[:, None] & x_in, above * (1 - dy) + below * dy, 0)

    return jax.vmap(of_region)(regions.boxes, regions.owner)


def _mask_loss(logits: jax.Array, regions: Regions, boxes: jax.Array, masks: jax.Array) -> Any:
    """The sum over the pixels of an image's positive regions, and their number."""
    side, positive = logits.shape[1], regions.classes > 0
    target = _true_masks(masks, boxes, regions, side) >= 0.5
    of_class = logits[jnp.arange(len(logits)), :, :, regions.classes]
    entropy = optax.sigmoid_binary_cross_entropy(of_class, target).sum((1, 2))
    return jnp.sum(jnp.where(positive, entropy, 0)), jnp.sum(positive) * side**2


def total_loss(
    settings: Settings, batch: Mapping[str, jax.Array], anchors: Any, outputs: Any
) -> jax.Array:
    """The loss f32[] of a batch, with anchors f32[n, 4] of each level.

    `outputs` are the anchors' logits and deltas, the regions, and the box and mask heads' outputs.
    """
    proposed, regions, predicted, mask_logits = outputs
    boxes, classes = batch["boxes"], batch["classes"]
    rule = settings.anchor_sampling.rule
    all_anchors = jnp.concatenate([*map(jnp.asarray, anchors)])
    first = jax.vmap(lambda x, y, *truth: _anchor_loss(x, y, all_anchors, rule, truth))
    anchor_loss = first(*proposed, boxes, classes, batch["draw"])
    logits, deltas = predicted
    region_loss = jax.vmap(_region_loss)(logits, deltas, regions, boxes)
    side = settings.images.mask_size
    bits = jnp.unpackbits(batch["masks"], axis=-1)
    masks = bits.reshape(*bits.shape[:-1], side, side).astype(jnp.float32)
    with_masks = regions.first(mask_logits.shape[1])
    pixels, count = jax.vmap(_mask_loss)(mask_logits, with_masks, boxes, masks)
    mask_loss = jnp.sum(pixels) / jnp.maximum(jnp.sum(count), 1)
    return jnp.mean(anchor_loss + region_loss) + mask_loss


class FPN(nn.Module):
    """The maps by level, for the maps of the backbone's stages from level 2 on."""

    levels: Any
    filters: int
    dtype: Any

    @nn.compact
    def __call__(self, stages: list[jax.Array]) -> dict[int, jax.Array]:
        conv = partial(nn.Conv, self.filters, dtype=self.dtype)
        maps, above = {}, None
        for level in reversed([level for level in self.levels if level < 2 + len(stages)]):
            x = conv((1, 1), name=f"lateral{level}")(stages[level - 2])
            if above is not None:
                doubled = jnp.repeat(jnp.repeat(above, 2, 1), 2, 2)
                x = x + doubled[:, : x.shape[1], : x.shape[2]]
            above = x
            maps[level] = conv((3, 3), padding=_AROUND, name=f"output{level}")(x)
        for level in self.levels:
            if level not in maps:
                maps[level] = maps[level - 1][:, ::2, ::2]
        return {level: maps[level] for level in self.levels}


class RPNHead(nn.Module):
    """(logits f32[b, N], deltas f32[b, N, 4]) of all levels, joined."""

    num_anchors: int
    filters: int
    dtype: Any

    @nn.compact
    def __call__(self, maps: dict[int, jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        shared = _conv3x3(self.filters, dtype=self.dtype, name="conv")
        score = nn.Conv(self.num_anchors, (1, 1), dtype=jnp.float32, name="score")
        code = nn.Conv(4 * self.num_anchors, (1, 1), dtype=jnp.float32, name="code")
        hidden = [nn.relu(shared(x)) for x in maps.values()]
        logits = [score(x).reshape(len(x), -1) for x in hidden]
        return logits, [code(x).reshape(len(x), -1, 4) for x in hidden]


class BoxHead(nn.Module):
    """(logits f32[b, R, C], deltas f32[b, R, C, 4]) of regions [b, R, s, s, c]."""

    features: Any
    num_logits: int
    dtype: Any

    @nn.compact
    def __call__(self, regions: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = regions.reshape(*regions.shape[:2], -1)
        for i, features in enumerate(self.features, 1):
            x = nn.relu(nn.Dense(features, dtype=self.dtype, name=f"dense{i}")(x))
        logits = nn.Dense(self.num_logits, dtype=jnp.float32, name="class")(x)
        deltas = nn.Dense(4 * self.num_logits, dtype=jnp.float32, name="code")(x)
        return logits, deltas.reshape(*x.shape[:2], self.num_logits, 4)


class MaskHead(nn.Module):
    """Logits f32[b, R, 2s, 2s, C] of regions [b, R, s, s, c]."""

    features: Any
    num_logits: int
    dtype: Any

    @nn.compact
    def __call__(self, regions: jax.Array) -> jax.Array:
        x = regions.reshape(-1, *regions.shape[2:])
        for i, features in enumerate(self.features, 1):
            x = nn.relu(_conv3x3(features, dtype=self.dtype, name=f"conv{i}")(x))
        turned = nn.ConvTranspose(x.shape[-1], (2, 2), (2, 2), dtype=self.dtype, name="upsampled")
        y = nn.Conv(self.num_logits, (1, 1), dtype=self.dtype, name="mask")(nn.relu(turned(x)))
        return y.astype(jnp.float32).reshape(*regions.shape[:2], *y.shape[1:])


def nms(boxes: jax.Array, threshold: float) -> jax.Array:
    """Says which of the boxes [n, 4], the best first, greedy NMS keeps: bool[n]."""
    overlaps = iou(boxes, boxes)
    later = jnp.arange(len(boxes))

    def decide(i: jax.Array, kept: jax.Array) -> jax.Array:
        return kept & ~(kept[i] & (overlaps[i] > threshold) & (later > i))

    return jax.lax.fori_loop(0, len(boxes), decide, area(boxes) > 0)


def proposals(keys: Any, logits: Any, deltas: Any, anchors: Any, sizes: jax.Array) -> jax.Array:
    """The proposals f32[b, P, 4] of each image, after NMS within each level."""

    def of_image(logits: Any, deltas: Any, size: jax.Array) -> jax.Array:
        levels = []
        for scores, code, corners in zip(logits, deltas, anchors, strict=True):
            top, index = jax.lax.top_k(scores, min(keys.proposals_before_nms, len(scores)))
            boxes = clip(decode_boxes(code[index], jnp.asarray(corners)[index], _ONES), *size)
            with jax.named_scope("suppression"):
                kept = nms(boxes, keys.proposal_nms_iou)
            levels.append((jnp.where(kept, top, -jnp.inf), boxes))
        score, boxes = map(jnp.concatenate, zip(*levels, strict=True))
        best, index = jax.lax.top_k(score, min(keys.proposals_after_nms, len(score)))
        return jnp.where(best[:, None] > -jnp.inf, boxes[index], 0)

    return jax.lax.stop_gradient(jax.vmap(of_image)(logits, deltas, sizes))


def aligned(maps: dict[int, jax.Array], boxes: jax.Array, size: int, canonical: float) -> jax.Array:
    """RoIAlign: [b, R, size, size, c] of boxes f32[b, R, 4], from the level that fits each."""
    lowest = min(maps)
    level = map_levels(boxes, lowest, max(maps), canonical) - lowest
    shapes = np.array([x.shape[1:3] for x in maps.values()])
    starts = np.concatenate([[0], np.cumsum(shapes.prod(1))])[:-1]
    cells = jnp.concatenate([x.reshape(len(x), -1, x.shape[-1]) for x in maps.values()], 1)
    scaled = boxes / jnp.exp2((level + lowest).astype(jnp.float32))[..., None]
    points = (jnp.arange(2 * size) + 0.5) / (2 * size)  # two in each bin

    def along(axis: int) -> tuple[Any, ...]:
        first, last = scaled[..., axis, None], scaled[..., axis + 2, None]
        count = jnp.asarray(shapes[:, axis])[level][..., None]
        cell = first + jnp.maximum(last - first, 1) * points
        inside = (cell >= -1) & (cell <= count)
        cell = jnp.clip(cell, 0, count - 1)
        low = jnp.floor(cell).astype(jnp.int32)
        return low, jnp.minimum(low + 1, count - 1), cell - low, inside

    (y0, y1, dy, y_in), (x0, x1, dx, x_in) = along(0), along(1)
    width, start = (jnp.asarray(x)[level][..., None, None] for x in (shapes[:, 1], starts))
    total = jnp.zeros((), jnp.float32)
    for y, wy in ((y0, 1 - dy), (y1, dy)):
        for x, wx in ((x0, 1 - dx), (x1, dx)):
            index = start + y[..., :, None] * width + x[..., None, :]
            weight = wy[..., :, None] * wx[..., None, :]
            weight = jnp.where(y_in[..., :, None] & x_in[..., None, :], weight, 0)
            total = total + jax.vmap(operator.getitem)(cells, index) * weight[..., None]
    b, r = boxes.shape[:2]
    bins = total.reshape(b, r, size, 2, size, 2, -1).mean((3, 5))
    return bins.astype(cells.dtype)


class MaskRCNN(nn.Module):
    """The network; `__call__` gives what the losses need."""

    backbone: Trunk
    settings: Settings
    num_logits: int

    @nn.compact
    def __call__(self, images: jax.Array, sizes: jax.Array, sample: Any) -> tuple[Any, ...]:
        """(anchors of each level, what `total_loss` takes as `outputs`).

        `sample` is the function from the proposals to the regions, positives first.
        """
        keys, dtype = self.settings.heads, self.backbone.dtype
        layout = self.settings.anchors
        ratios, levels = len(layout.anchor_ratios), tuple(layout.pyramid_levels)
        frozen = self.settings.tuning.bn_statistics == "frozen"
        stages = self.backbone(images, not frozen)
        maps = FPN(levels, keys.pyramid_filters, dtype, name="pyramid")(stages)
        head = RPNHead(ratios, keys.pyramid_filters, dtype, name="proposal_head")
        logits, deltas = head(maps)
        anchors = layout.boxes(*images.shape[1:3])
        regions = sample(proposals(self.settings.proposals, logits, deltas, anchors, sizes))
        positives = self.settings.regions.rule.positives
        usable = {k: x for k, x in maps.items() if k <= self.settings.backbone.level}
        align = partial(aligned, usable, canonical=keys.region_scale)
        box = BoxHead(tuple(keys.box_features), self.num_logits, dtype, name="box_head")
        predicted = box(align(regions.boxes, keys.box_pool))
        mask = MaskHead(tuple(keys.mask_features), self.num_logits, dtype, name="mask_head")
        mask_logits = mask(align(regions.boxes[:, :positives], keys.mask_pool))
        joined = jnp.concatenate(logits, 1), jnp.concatenate(deltas, 1)
        return anchors, (joined, regions, predicted, mask_logits)


def make(benchmark: MaskRcnn, freeze: str) -> Peer:
    """The peer of a benchmark."""
    keys, backbone = benchmark.settings, benchmark.settings.backbone
    norm = partial(nn.BatchNorm, momentum=backbone.bn_momentum, epsilon=backbone.bn_epsilon)
    stages, frozen = tuple(backbone.resnet_stages), Parts("freeze", freeze)
    strides = 1, *[2] * (len(stages) - 1)
    sizes = stages, backbone.resnet_bottleneck, strides, backbone.num_filters
    trunk = Trunk(*sizes, backbone.dtype, norm=norm, pool=backbone.pool_padding)
    network = MaskRCNN(trunk, keys, 1 + benchmark.classes)

    def run(variables: Any, batch: Mapping[str, jax.Array], method: Any, **options: Any) -> Any:
        sizes = batch["size"]
        images = normalize(batch["image"], None, backbone.dtype)
        rows, columns = np.arange(images.shape[1])[:, None], np.arange(images.shape[2])
        heights, widths = (sizes[:, i, None, None] for i in (0, 1))
        images = jnp.where(((rows < heights) & (columns < widths))[..., None], images, 0)
        sample = partial(sampled, batch, keys.regions.rule)
        return method(variables, images, sizes, sample, **options)

    def init(key: jax.Array) -> tuple[Any, Any]:
        batch = {name: jnp.zeros(x.shape, x.dtype) for name, x in specs(1)[0].items()}
        variables = run(key, batch, network.init)
        return variables["params"], variables["batch_stats"]

    def held(params: Any) -> Any:
        """The parameters, without gradients for frozen layers."""
        keeps = keys.tuning.bn_statistics == "frozen"
        fixed = [n in frozen or (keeps and "/bn" in n) for n in by_name(params)]
        leaves, form = jax.tree.flatten(params)
        stop = jax.lax.stop_gradient
        return form.unflatten([stop(x) if f else x for x, f in zip(leaves, fixed, strict=True)])

    def loss(params: Any, stats: Any, batch: Mapping[str, jax.Array], key: jax.Array) -> Any:
        variables = {"params": held(params), "batch_stats": stats}
        outputs, changed = run(variables, batch, network.apply, mutable=["batch_stats"])
        total = total_loss(keys, batch, *outputs)
        return total, ({}, changed.get("batch_stats", stats))

    def specs(batch_size: int) -> tuple[Spec, ...]:
        def plain(spec: Spec) -> Spec:
            b, height, width, _ = spec["image"].shape
            shape = (b, 2 * height, 2 * width, 3)
            return spec | {"image": jax.ShapeDtypeStruct(shape, spec["image"].dtype)}

        return tuple(map(plain, benchmark.batch_spec("train", batch_size)))

    rate = optax.linear_schedule(0.0, 0.16, 625)
    optimizer = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(rate, momentum=0.9))
    return Peer(init, loss, optimizer, specs)
