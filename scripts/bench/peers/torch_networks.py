"""The networks of all benchmarks from torchvision and torch.nn, at the sizes of a recipe.

`DIFFERS` says what differs from our networks. Import this module only where PyTorch and torchvision
are installed.
"""

import importlib
import itertools
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import models
from benchmarks.base import HostBatch
from benchmarks.detection.detector import Detector
from benchmarks.detection.mask_rcnn import MaskRcnn
from benchmarks.detection.ssd import Ssd
from benchmarks.ncf import Ncf
from benchmarks.resnet.classifier import ImageClassifier
from benchmarks.translation.gnmt import Gnmt
from benchmarks.translation.transformer import Transformer
from benchmarks.translation.transformer.models import positional_encoding
from benchmarks.translation.vocabulary import EOS, PAD
from common.images.input_spec import IMAGENET_UNIT
from common.layers import space_to_depth

torch: Any = importlib.import_module("torch")
vision: Any = importlib.import_module("torchvision")
nn, detection = torch.nn, vision.models.detection
relu = partial(nn.ReLU, inplace=True)


class Network(NamedTuple):
    """A network in PyTorch, with its loss."""

    module: Any  # the torch.nn.Module that has the parameters
    inputs: Callable[[HostBatch], tuple[Any, ...]]  # our batch as the arguments of `loss`
    loss: Callable[..., Any]
    # The modules that torch.compile takes on a GPU: elsewhere shapes depend on the data. () is all.
    parts: Sequence[Any] = ()


def resnet(benchmark: ImageClassifier) -> Network:
    """torchvision's ResNet."""
    keys, spec = benchmark.settings, benchmark.input_spec
    sizes, block = models.DEPTHS[keys.model.resnet_depth]
    is_wide, smoothing = block is models.BottleneckBlock, keys.objective.label_smoothing
    network = _trunk(sizes, is_wide, keys.model.num_filters, None, benchmark.classes)
    network.fc = nn.Sequential(nn.Dropout(keys.regularisation.dropout), network.fc)

    def inputs(batch: HostBatch) -> tuple[Any, ...]:
        images = torch.tensor((batch["image"] - spec.mean) / spec.std).float()
        return images.permute(0, 3, 1, 2), torch.tensor(batch["label"]).long()

    def loss(images: Any, labels: Any) -> Any:
        logits = network(images).float()
        return nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)

    return Network(network, inputs, loss)


def _trunk(sizes: Sequence[int], is_wide: bool, filters: int, norm: Any, classes: int = 1) -> Any:
    """torchvision's ResNet with `filters` instead of 64 channels in its first stage.

    `is_wide` is whether its blocks have bottlenecks, `norm` their BatchNorm; None: torch.nn's.
    """
    resnets = vision.models.resnet
    block = resnets.Bottleneck if is_wide else resnets.BasicBlock

    class Trunk(resnets.ResNet):
        def _make_layer(self, block: Any, planes: int, *more: Any, **options: Any) -> Any:
            self.inplanes = filters if planes == 64 else self.inplanes
            return super()._make_layer(block, planes * filters // 64, *more, **options)

    trunk = Trunk(block, [*sizes, 1][:4], norm_layer=norm)  # it wants four stages
    trunk.conv1 = nn.Conv2d(3, filters, 7, 2, 3, bias=False)
    trunk.bn1 = (norm or nn.BatchNorm2d)(filters)
    trunk.fc = nn.Linear(8 * filters * block.expansion, classes)
    return trunk


def _frozen_norm(benchmark: Detector) -> Any:
    return vision.ops.misc.FrozenBatchNorm2d if benchmark.keeps_statistics else None


# What torchvision's detectors take beside images: pixels from 0 to 1, which are not resized.
_PIXELS = {
    "image_mean": [*IMAGENET_UNIT[0]],
    "image_std": [*IMAGENET_UNIT[1]],
    "_skip_resize": True,
}


def _detector(model: Any, parts: Sequence[Any], scale: float, has_masks: bool) -> Network:
    """A detector whose loss is the sum of its losses; our boxes times `scale` are in pixels."""

    def inputs(batch: HostBatch) -> tuple[Any, ...]:
        """The images, and of each the objects that are no padding; their masks fill the boxes."""
        pixels = space_to_depth.restore(batch["image"]) if has_masks else batch["image"]
        images, targets = [*torch.tensor(pixels).permute(0, 3, 1, 2) / 255], []
        for boxes, classes in zip(batch["boxes"], batch["classes"], strict=True):
            corners = scale * torch.tensor(boxes[classes > 0])[:, [1, 0, 3, 2]]
            targets.append({"boxes": corners, "labels": torch.tensor(classes[classes > 0]).long()})
            if has_masks:
                masks = torch.zeros(len(corners), *images[0].shape[1:]).byte()
                for i, (x0, y0, x1, y1) in enumerate(corners.int().tolist()):
                    masks[i, y0:y1, x0:x1] = 1
                targets[-1]["masks"] = masks
        return images, targets

    return Network(model, inputs, lambda *given: sum(model(*given).values()), parts)


def ssd(benchmark: Ssd) -> Network:
    """torchvision's SSD."""
    keys, maps = benchmark.settings.backbone, benchmark.settings.maps
    side, layout = maps.image_size, maps.default_boxes
    trunk = _trunk(keys.resnet_stages, False, keys.num_filters, _frozen_norm(benchmark))
    trunk.layer3[0].conv1.stride = trunk.layer3[0].downsample[0].stride = 1, 1
    names = "conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3"

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(OrderedDict((name, getattr(trunk, name)) for name in names))
            self.extras, channels = nn.ModuleList(), 4 * keys.num_filters
            for squeezed, filters, *window in maps.extras:
                layers = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, filters, 3, *window)
                self.extras.append(nn.Sequential(layers[0], relu(), layers[1], relu()))
                channels = filters

        def forward(self, images: Any) -> Any:
            x = self.trunk(images)
            outputs = itertools.accumulate(self.extras, lambda x, extra: extra(x), initial=x)
            return OrderedDict((str(number), x) for number, x in enumerate(outputs))

    scales = [scale / side for scale in layout.scales]
    ratios = [[*ratios] for ratios in layout.aspect_ratios]
    boxes = detection.anchor_utils.DefaultBoxGenerator(ratios, scales=scales, steps=layout.steps)
    model = detection.ssd.SSD(Body(), boxes, (side, side), 1 + benchmark.classes, **_PIXELS)
    return _detector(model, [model.backbone, model.head], side, has_masks=False)


class Subsampled(vision.ops.feature_pyramid_network.ExtraFPNBlock):
    """The levels above the trunk's: every second row and column of the one below."""

    def __init__(self, levels: Sequence[int]):
        super().__init__()
        self.levels = levels

    def forward(self, results: Any, x: Any, names: Any) -> Any:
        """Appends the levels and their names."""
        for level in self.levels:
            results.append(results[-1][..., ::2, ::2])
            names.append(str(level))
        return results, names


def mask_rcnn(benchmark: MaskRcnn) -> Network:
    """torchvision's Mask R-CNN."""
    keys, body, heads = benchmark.settings, benchmark.settings.backbone, benchmark.settings.heads
    levels, width = keys.anchors.pyramid_levels, heads.pyramid_filters
    features = heads.mask_features
    is_wide = body.resnet_bottleneck
    trunk = _trunk(body.resnet_stages, is_wide, body.num_filters, _frozen_norm(benchmark))
    inner = [level for level in levels if level <= body.level]
    channels = [body.num_filters * 2 ** (level - 2) * (4 if is_wide else 1) for level in inner]
    layers = {f"layer{level - 1}": str(level) for level in inner}
    backbone = detection.backbone_utils.BackboneWithFPN(trunk, layers, channels, width)
    backbone.fpn.extra_blocks = Subsampled(levels[len(inner) :])
    sizes = [width * heads.box_pool**2, *heads.box_features]
    dense = [(nn.Linear(*both), relu()) for both in itertools.pairwise(sizes)]
    last, classes = [width, *features][-1], 1 + benchmark.classes
    sides = tuple((keys.anchors.anchor_scale * 2**level,) for level in levels)
    ratios = (tuple(keys.anchors.anchor_ratios),) * len(levels)
    pool = partial(vision.ops.MultiScaleRoIAlign, [*layers.values()], sampling_ratio=2)
    pool = partial(pool, canonical_scale=heads.region_scale)
    model = detection.MaskRCNN(
        backbone,
        rpn_anchor_generator=detection.rpn.AnchorGenerator(sides, ratios),
        rpn_pre_nms_top_n_train=keys.proposals.proposals_before_nms,
        rpn_post_nms_top_n_train=keys.proposals.proposals_after_nms,
        rpn_batch_size_per_image=keys.anchor_sampling.rule.count,
        box_batch_size_per_image=keys.regions.rule.count,
        box_roi_pool=pool(heads.box_pool),
        box_head=nn.Sequential(nn.Flatten(), *itertools.chain(*dense)),
        box_predictor=detection.faster_rcnn.FastRCNNPredictor(sizes[-1], classes),
        mask_roi_pool=pool(heads.mask_pool),
        mask_head=detection.mask_rcnn.MaskRCNNHeads(width, features, 1),
        mask_predictor=detection.mask_rcnn.MaskRCNNPredictor(last, last, classes),
        **_PIXELS,
    )
    regions = model.roi_heads
    parts = [model.backbone, model.rpn.head, regions.box_head, regions.mask_head]
    return _detector(model, [*parts, regions.mask_predictor], 1, has_masks=True)


def _tensors(batch: HostBatch) -> tuple[Any, ...]:
    return ({name: torch.tensor(x) for name, x in batch.items()},)


def transformer(benchmark: Transformer) -> Network:
    """torch.nn's Transformer and Embedding, on packed rows."""
    keys, words = benchmark.settings, benchmark.vocabulary_size
    width, heads, layers = keys.width, keys.num_heads, keys.num_layers
    sizes = width, heads, layers, layers, keys.mlp_width, keys.dropout
    options = {"layer_norm_eps": 1e-6, "batch_first": True, "norm_first": True}
    with warnings.catch_warnings(action="ignore"):  # its fast path is for norms at the end
        stacks = nn.Transformer(*sizes, **options)
    table = nn.Embedding(words, width)
    nn.init.normal_(table.weight, std=width**-0.5)
    network = nn.ModuleDict({"stacks": stacks, "table": table})
    network.register_buffer("waves", torch.tensor(positional_encoding(keys.row_length, width)))

    def embed(ids: Any, positions: Any) -> Any:
        embedded = table(ids) * math.sqrt(width) + network.waves[positions]
        return nn.functional.dropout(embedded, keys.dropout)

    def mask(queries: Any, keys: Any, causal: bool = False) -> Any:
        """float32[b * heads, Lq, Lk] from segments int32[b, L]: -inf where a query sees no key.

        Padding sees all keys, so that no row of the softmax is nan.
        """
        seen = (queries[:, :, None] == keys[:, None, :]) | (queries == 0)[:, :, None]
        seen = seen.tril() if causal else seen
        hidden = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -math.inf)
        return hidden.repeat_interleave(heads, 0)

    def loss(batch: Mapping[str, Any]) -> Any:
        source, target = batch["inputs_segmentation"], batch["targets_segmentation"]
        targets, positions = batch["targets"].long(), batch["targets_position"]
        before = nn.functional.pad(targets[:, :-1], (1, 0)).masked_fill(positions == 0, PAD)
        features = stacks(
            embed(batch["inputs"], batch["inputs_position"]),
            embed(before, positions),
            src_mask=mask(source, source),
            tgt_mask=mask(target, target, causal=True),
            memory_mask=mask(target, source),
        )
        logits = nn.functional.linear(features, table.weight).float().flatten(0, 1)
        smoothing = keys.label_smoothing * words / (words - 1)  # PyTorch's is the target's, too
        options = {"ignore_index": PAD, "label_smoothing": smoothing}
        return nn.functional.cross_entropy(logits, targets.flatten(), **options)

    return Network(network, _tensors, loss)


class Attention(nn.Module):
    """GNMT's, normalised and additive, which torch.nn lacks."""

    def __init__(self, width: int, gain: float):
        super().__init__()
        self.query, self.key = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.direction, self.bias = (nn.Parameter(torch.zeros(width)) for _ in range(2))
        self.gain = nn.Parameter(torch.tensor(gain))

    def forward(self, query: Any, values: Any, hidden: Any) -> Any:
        """Of queries [b, T, H] and values [b, S, H]; `hidden` bool[b, S] are no words."""
        direction = self.gain * self.direction / self.direction.norm()
        inside = self.query(query)[:, :, None] + (self.key(values) + self.bias)[:, None]
        scores = (inside.tanh() @ direction).masked_fill(hidden[:, None], -math.inf)
        return scores.softmax(-1) @ values


def gnmt(benchmark: Gnmt) -> Network:
    """GNMT of torch.nn's Embedding and LSTM."""
    keys, words, rnn = benchmark.settings, benchmark.vocabulary_size, nn.utils.rnn
    width, counted = keys.width, PAD if keys.counts_eos else EOS
    sizes = [width, 2 * width, *[width] * (keys.num_encoder_layers - 2)]
    encoder = nn.ModuleList(nn.LSTM(n, width, bidirectional=not i) for i, n in enumerate(sizes))
    sizes = [width, *[2 * width] * (keys.num_decoder_layers - 1)]
    decoder = nn.ModuleList(nn.LSTM(n, width) for n in sizes)
    table, attention = nn.Embedding(words, width), Attention(width, keys.attention_gain)
    classifier = nn.Linear(width, words, keys.projection_bias)
    modules = {"table": table, "encoder": encoder, "decoder": decoder}
    network = nn.ModuleDict(modules | {"attention": attention, "classifier": classifier})
    for name, x in network.named_parameters():
        if name not in ("attention.bias", "attention.gain"):
            nn.init.uniform_(x, -keys.init_scale, keys.init_scale)

    def inputs(batch: HostBatch) -> tuple[Any, ...]:
        """The lengths of the sentences stay on the host, where PyTorch wants them."""
        tensors = (torch.tensor(batch[side]).long() for side in ("inputs", "targets"))
        return *tensors, (batch["inputs"] != PAD).sum(1).tolist()

    def layers(x: Any, stack: Any, context: Sequence[Any] = ()) -> Any:
        """The layers after the first one; all but the first of them add their input."""
        for i, layer in enumerate(stack[1:]):
            y, _ = layer(nn.functional.dropout(torch.cat([x, *context], -1), keys.dropout))
            x = x + y if i else y
        return x

    def loss(inputs: Any, targets: Any, lengths: Any) -> Any:
        drop = partial(nn.functional.dropout, p=keys.dropout)
        packed = rnn.pack_padded_sequence(drop(table(inputs.T)), lengths, enforce_sorted=False)
        x, _ = rnn.pad_packed_sequence(encoder[0](packed)[0], total_length=len(inputs.T))
        values = layers(x, encoder).transpose(0, 1)
        before = nn.functional.pad(targets.T[:-1], (0, 0, 1, 0))
        x, _ = decoder[0](drop(table(before)))
        context = attention(x.transpose(0, 1), values, inputs == PAD).transpose(0, 1)
        logits = classifier(layers(x, decoder, [context])).float().flatten(0, 1)
        labels = targets.masked_fill(targets <= counted, PAD).T.flatten()
        options = {"label_smoothing": keys.label_smoothing, "reduction": "sum"}
        total = nn.functional.cross_entropy(logits, labels, ignore_index=PAD, **options)
        return total / len(targets)

    return Network(network, inputs, loss, [attention, classifier])


def ncf(benchmark: Ncf) -> Network:
    """NeuMF of torch.nn's Embedding and Linear."""
    keys, sizes = benchmark.settings, benchmark.model
    factors, widths = keys.gmf_dim, tuple(keys.mlp_layers)
    tables = [nn.Embedding(n, factors + widths[0] // 2) for n in (sizes.num_users, sizes.num_items)]
    for table in tables:  # as in He et al.'s program
        nn.init.normal_(table.weight, std=0.01)
    dense = [(nn.Linear(*pair), relu()) for pair in itertools.pairwise(widths)]
    perceptron = nn.Sequential(*itertools.chain(*dense))
    logit = nn.Linear(factors + widths[-1], 1)

    def loss(batch: Mapping[str, Any]) -> Any:
        user, item = tables[0](batch["user"]), tables[1](batch["item"])
        hidden = perceptron(torch.cat([user[:, factors:], item[:, factors:]], -1))
        joined = torch.cat([user[:, :factors] * item[:, :factors], hidden], -1)
        logits, labels = logit(joined)[:, 0].float(), batch["label"].float()
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)

    return Network(nn.ModuleList([*tables, perceptron, logit]), _tensors, loss)


NETWORKS = {make.__name__: make for make in (resnet, ssd, mask_rcnn, transformer, gnmt, ncf)}
DIFFERS = {
    "resnet": "torchvision's ResNet; its images come mirrored and normalised.",
    "ssd": "torchvision's SSD; it divides by the positives of the batch, and leaves colours and "
    "sides.",
    "mask_rcnn": "torchvision's Mask R-CNN; untrained it has few positive regions, so it makes "
    "fewer masks.",
    "transformer": "torch.nn's Transformer and Embedding, on packed rows; its attention has "
    "biases.",
    "gnmt": "torch.nn's Embedding, and an LSTM for each layer, which has two biases.",
    "ncf": "NeuMF of torch.nn's Embedding and Linear; nothing differs.",
}
