"""SSD in its plain form: network, matching, mining and losses of `benchmarks.detection.ssd`.

Two convolutions per map predict deltas and classes, all maps are joined, the hardest negatives are
found by sorting, and the matched boxes by indices. Images are augmented on the device as in
training.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.detection.boxes import area, encode_boxes, iou
from benchmarks.detection.ssd import Ssd, input_pipeline, models
from scripts.bench.peers import Peer
from scripts.bench.peers.resnet import Trunk

_MATCH_IOU, _NEGATIVES = 0.5, 3
_AROUND = ((1, 1), (1, 1))


class SSD(nn.Module):
    """Predicts deltas [b, N, 4] and logits [b, N, num_logits] for N default boxes."""

    backbone: Trunk
    extras: Any  # (squeezed, filters, stride, padding) of each extra layer
    boxes_per_cell: Any  # by map
    num_logits: int

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> tuple[jax.Array, jax.Array]:
        init = nn.initializers.xavier_uniform()
        conv = partial(nn.Conv, dtype=self.backbone.dtype, kernel_init=init)
        *_, x = self.backbone(images, train)
        maps = [x]
        for i, (squeezed, filters, stride, padding) in enumerate(self.extras, 1):
            x = nn.relu(conv(squeezed, (1, 1), name=f"extra{i}_conv1")(x))
            around = ((padding, padding),) * 2
            x = nn.relu(conv(filters, (3, 3), stride, around, name=f"extra{i}_conv2")(x))
            maps.append(x)
        deltas, logits = [], []
        for i, (x, count) in enumerate(zip(maps, self.boxes_per_cell, strict=True), 1):
            head = partial(conv, kernel_size=(3, 3), padding=_AROUND)
            deltas.append(head(4 * count, name=f"box{i}")(x).reshape(len(x), -1, 4))
            y = head(self.num_logits * count, name=f"class{i}")(x)
            logits.append(y.reshape(len(x), -1, self.num_logits))
        return jnp.concatenate(deltas, 1), jnp.concatenate(logits, 1)


def matched(boxes: jax.Array, valid: jax.Array, anchors: jax.Array, threshold: float) -> Any:
    """For each of N anchors its true box int32[N], whether it is positive, and the best IoU.

    `boxes` f32[G, 4], `valid` bool[G]. Each true box also takes its best anchor; a later box wins.
    """
    overlaps = iou(jnp.where(valid[:, None], boxes, 0), anchors)  # [G, N]
    nearest, overlap = jnp.argmax(overlaps, 0), jnp.max(overlaps, 0)
    takes = jnp.max(overlaps, 1) > 0
    taken = jnp.where(takes, jnp.argmax(overlaps, 1), len(anchors))  # beyond the last: dropped
    numbers = jnp.arange(len(boxes))
    assigned = jnp.full(len(anchors), -1).at[taken].max(numbers, mode="drop")
    positive = (assigned >= 0) | (overlap >= threshold)
    return jnp.where(assigned >= 0, assigned, nearest), positive, overlap


def detection_loss(
    deltas: jax.Array, logits: jax.Array, boxes: jax.Array, classes: jax.Array, anchors: jax.Array
) -> jax.Array:
    """The loss f32[] of one image: deltas [N, 4], logits [N, C], boxes [G, 4], classes [G]."""
    valid = (classes > 0) & (area(boxes) > 0)
    owner, positive, _ = matched(boxes, valid, anchors, _MATCH_IOU)
    labels = jnp.where(positive, classes[owner], 0)
    positive = labels > 0
    count = jnp.sum(positive)
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    order = jnp.argsort(jnp.where(positive, -jnp.inf, entropy), descending=True, stable=True)
    rank = jnp.argsort(order)
    counted = positive | (rank < _NEGATIVES * count)
    distance = optax.huber_loss(deltas, encode_boxes(boxes[owner], anchors), delta=1.0).sum(-1)
    total = jnp.sum(jnp.where(counted, entropy, 0)) + jnp.sum(jnp.where(positive, distance, 0))
    return total / jnp.maximum(count, 1)


def make(benchmark: Ssd, freeze: str) -> Peer:
    """The peer of a benchmark."""
    settings = benchmark.settings
    keys, layout, side = settings.backbone, settings.maps.default_boxes, settings.images.image_size
    num_logits = 1 + benchmark.classes
    norm = partial(nn.BatchNorm, momentum=keys.bn_momentum, epsilon=1e-5)
    sizes = tuple(keys.resnet_stages), False, (1, 2, 1), keys.num_filters
    trunk = Trunk(*sizes, keys.dtype, norm=norm, pool=keys.pool_padding)
    extras = tuple(map(tuple, settings.maps.extras))
    network = SSD(trunk, extras, layout.boxes_per_cell, num_logits)
    anchors = jnp.asarray(models.box_corners(layout.boxes()), jnp.float32)

    def init(key: jax.Array) -> tuple[Any, Any]:
        variables = network.init(key, jnp.zeros((1, side, side, 3), keys.dtype), train=False)
        return variables["params"], variables["batch_stats"]

    def loss(params: Any, stats: Any, batch: Mapping[str, jax.Array], key: jax.Array) -> Any:
        flips = settings.images.random_flip
        images, true = input_pipeline.augment(
            batch["image"], batch["boxes"], batch["augment"], flips, keys.dtype
        )
        variables = {"params": params, "batch_stats": stats}
        outputs: Any
        outputs, changed = network.apply(variables, images, train=True, mutable=["batch_stats"])
        deltas, logits = (x.astype(jnp.float32) for x in outputs)
        losses = jax.vmap(detection_loss, (0, 0, 0, 0, None))(
            deltas, logits, true, batch["classes"], anchors
        )
        return jnp.mean(losses), ({}, changed["batch_stats"])

    decayed = optax.add_decayed_weights(5e-4)
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.08, 350, 7500)
    optimizer = optax.chain(decayed, optax.sgd(rate, momentum=0.9))
    return Peer(init, loss, optimizer, partial(benchmark.batch_spec, "train"))
