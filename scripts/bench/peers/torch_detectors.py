"""SSD and Mask R-CNN built from torchvision's parts at our models' sizes, for `on_torch`.

A network is a `torch.nn.Module`: its method `inputs` prepares a batch, and the module computes the
loss, a scalar. `compiled` lists the modules that torch.compile takes on a GPU: in the others the
shapes depend on the data. Images are normalised in the step and not resized.

Targets and losses are torchvision's, so they differ from ours: SSD's loss is divided
by the positives of the batch and not of each image, Mask R-CNN's anchors lie around the corners of
cells, samples are drawn by other random numbers, and true masks fill their boxes. SSD's images are
not mirrored and keep their contrast, and its norms are not decayed. Suppression is
torchvision.ops.nms, one image at a time.
"""

import importlib
import itertools
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.base import HostBatch
from benchmarks.detection.settings import PIXEL_MEAN, PIXEL_STD
from benchmarks.detection.ssd import models
from common.layers import space_to_depth
from scripts.bench.peers.torch_networks import normalize, trunk


def ssd(torch: Any, benchmark: Any) -> Any:
    """The SSD of a `benchmarks.detection.ssd`."""
    vision: Any = importlib.import_module("torchvision.models.detection.ssd")
    nn, keys, maps = torch.nn, benchmark.settings.backbone, benchmark.settings.maps
    side, classes = maps.image_size, 1 + benchmark.classes
    corners = side * models.box_corners(models.default_boxes(maps.layout))
    channels = [4 * keys.num_filters, *(extra.filters for extra in maps.extras)]
    stages = trunk(torch, keys.resnet_stages, False, keys.num_filters, (1, 2, 1), _norm(benchmark))

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.normalize = normalize(torch, PIXEL_MEAN, PIXEL_STD)
            self.stages, self.extras = nn.ModuleDict(stages), nn.ModuleList()
            for before, extra in zip(channels, maps.extras, strict=False):
                first = nn.Conv2d(before, extra.squeezed, 1), nn.ReLU(inplace=True)
                last = nn.Conv2d(extra.squeezed, extra.filters, 3, extra.stride, extra.padding)
                self.extras.append(nn.Sequential(*first, last, nn.ReLU(inplace=True)))

        def forward(self, images: Any) -> list[Any]:
            # A matrix and an offset change the colours of each image, as in our SSD.
            matrix = torch.eye(3, device=images.device).expand(len(images), 3, 3)
            coloured = (images.flatten(1, 2).float() @ matrix + 0).clamp(0, 255)
            x = self.normalize(coloured.view(images.shape))
            for stage in self.stages.values():
                x = stage(x)
            return [*itertools.accumulate(self.extras, lambda x, extra: extra(x), initial=x)]

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            head = vision.SSDHead(channels, maps.layout.boxes_per_cell, classes)
            self.ssd = vision.SSD(Body(), None, (side, side), classes, head=head)
            self.register_buffer("anchors", torch.tensor(_swapped(corners), dtype=torch.float32))
            self.compiled = [self.ssd.backbone, self.ssd.head]

        def forward(self, batch: Mapping[str, Any]) -> Any:
            images, targets = batch["image"], batch["targets"]
            outputs = self.ssd.head(self.ssd.backbone(images))
            outputs = {name: x.float() for name, x in outputs.items()}
            overlaps = [vision.box_ops.box_iou(x["boxes"], self.anchors) for x in targets]
            none = partial(torch.full, fill_value=-1, device=images.device)
            matched = [
                self.ssd.proposal_matcher(x) if len(x) else none(x.shape[1:]) for x in overlaps
            ]
            anchors = [self.anchors] * len(images)
            return sum(self.ssd.compute_loss(targets, outputs, anchors, matched).values())

        def inputs(self, batch: HostBatch, device: str) -> Any:
            return _inputs(torch, batch | {"boxes": side * batch["boxes"]}, device)

    return Detector()


def mask_rcnn(torch: Any, benchmark: Any) -> Any:
    """The Mask R-CNN of a `benchmarks.detection.mask_rcnn`.

    True boxes are proposed so often that as many regions are positive as our network computes masks
    for. Our network always computes them; torchvision would compute few for an untrained network.
    """
    vision: Any = importlib.import_module("torchvision.models.detection.image_list")
    most = benchmark.settings.regions.sampling.positives

    class Detector(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = _torchvision_model(torch, benchmark)
            heads = self.model.roi_heads
            self.compiled = [self.model.backbone, self.model.rpn.head]
            self.compiled += [heads.box_head, heads.mask_head, heads.mask_predictor]

        def forward(self, batch: Mapping[str, Any]) -> Any:
            images, targets = batch["image"], batch["targets"]
            maps = self.model.backbone(images)
            shapes = [tuple(images.shape[1:3])] * len(images)
            listed = vision.ImageList(images.permute(0, 3, 1, 2), shapes)
            proposed, losses = self.model.rpn(listed, maps, targets)
            true = [
                x["boxes"].repeat(-(-most // max(len(x["boxes"]), 1)), 1)[:most] for x in targets
            ]
            proposed = [torch.cat(both) for both in zip(proposed, true, strict=True)]
            _, others = self.model.roi_heads(maps, proposed, shapes, targets)
            return sum((losses | others).values())

        def inputs(self, batch: HostBatch, device: str) -> Any:
            images = space_to_depth.restore(batch["image"])
            inputs = _inputs(torch, batch | {"image": images}, device)
            for target in inputs["targets"]:
                shape = len(target["boxes"]), *images.shape[1:3]
                target["masks"] = torch.zeros(shape, dtype=torch.uint8, device=device)
                for mask, box in zip(target["masks"], target["boxes"].int().tolist(), strict=True):
                    mask[box[1] : box[3], box[0] : box[2]] = 1
            return inputs

    return Detector()


def _torchvision_model(torch: Any, benchmark: Any) -> Any:
    """torchvision's MaskRCNN with our numbers of layers, channels, anchors and samples."""
    nn, keys = torch.nn, benchmark.settings
    vision: Any = importlib.import_module("torchvision.models.detection.mask_rcnn")
    rpn: Any = importlib.import_module("torchvision.models.detection.rpn")
    boxes: Any = importlib.import_module("torchvision.models.detection.faster_rcnn")
    levels, heads, width = keys.layout.pyramid_levels, keys.heads, keys.heads.pyramid_filters
    sides = tuple((keys.layout.anchor_scale * 2**level,) for level in levels)
    ratios = (tuple(keys.layout.anchor_ratios),) * len(levels)
    sizes, features = [width * heads.box_pool**2, *heads.box_features], heads.mask_features
    dense = [(nn.Linear(*both), nn.ReLU(inplace=True)) for both in itertools.pairwise(sizes)]
    last, classes = [width, *features][-1], 1 + benchmark.classes
    body = _pyramid(torch, benchmark)
    names = [str(level) for level in levels]

    def pool(size: int) -> Any:
        how = {"canonical_scale": heads.region_scale, "sampling_ratio": 2}
        return boxes.MultiScaleRoIAlign(names, size, **how)

    anchors, regions, proposals = keys.anchors.sampling, keys.regions.sampling, keys.proposals
    return vision.MaskRCNN(
        body,
        rpn_anchor_generator=rpn.AnchorGenerator(sides, ratios),
        rpn_head=rpn.RPNHead(width, len(ratios[0])),
        rpn_pre_nms_top_n_train=proposals.proposals_before_nms,
        rpn_post_nms_top_n_train=proposals.proposals_after_nms,
        rpn_nms_thresh=proposals.proposal_nms_iou,
        rpn_fg_iou_thresh=anchors.positive_iou,
        rpn_bg_iou_thresh=anchors.negative_iou,
        rpn_batch_size_per_image=anchors.count,
        rpn_positive_fraction=anchors.share,
        box_roi_pool=pool(heads.box_pool),
        box_head=nn.Sequential(nn.Flatten(), *itertools.chain(*dense)),
        box_predictor=boxes.FastRCNNPredictor(sizes[-1], classes),
        box_fg_iou_thresh=regions.positive_iou,
        box_bg_iou_thresh=regions.negative_iou,
        box_batch_size_per_image=regions.count,
        box_positive_fraction=regions.share,
        mask_roi_pool=pool(heads.mask_pool),
        mask_head=vision.MaskRCNNHeads(width, features, 1),
        mask_predictor=vision.MaskRCNNPredictor(last, last, classes),
    )


def _pyramid(torch: Any, benchmark: Any) -> Any:
    """The backbone: from images uint8[b, h, w, 3] to {level: map [b, c, h, w]}."""
    nn, keys = torch.nn, benchmark.settings.backbone
    pyramids: Any = importlib.import_module("torchvision.ops.feature_pyramid_network")
    levels, width = benchmark.settings.layout.pyramid_levels, benchmark.settings.heads
    sizes, is_wide = keys.resnet_stages, keys.resnet_bottleneck
    strides = 1, *[2] * (len(sizes) - 1)
    stages = trunk(torch, sizes, is_wide, keys.num_filters, strides, _norm(benchmark))
    inner = [level for level in levels if level <= keys.level]
    channels = [keys.num_filters * 2 ** (n - 2) * (4 if is_wide else 1) for n in inner]

    class Coarser(pyramids.ExtraFPNBlock):
        def forward(self, results: Any, x: Any, names: Any) -> Any:
            for level in levels[len(inner) :]:
                results.append(results[-1][:, :, ::2, ::2])
                names.append(str(level))
            return results, names

    class Pyramid(nn.Module):
        out_channels = width.pyramid_filters

        def __init__(self):
            super().__init__()
            self.normalize = normalize(torch, PIXEL_MEAN, PIXEL_STD)
            self.stages = nn.ModuleDict(stages)
            make = pyramids.FeaturePyramidNetwork
            self.pyramid = make(channels, self.out_channels, Coarser())

        def forward(self, images: Any) -> Mapping[str, Any]:
            x, maps = self.normalize(images), OrderedDict()
            for level, stage in enumerate(self.stages.values(), 1):
                x = stage(x)
                if level in inner:
                    maps[str(level)] = x
            return self.pyramid(maps)

    return Pyramid()


def _norm(benchmark: Any) -> Any:
    """The BatchNorm of the backbone; None is torch.nn.BatchNorm2d."""
    if not benchmark.keeps_statistics:
        return None
    return importlib.import_module("torchvision.ops.misc").FrozenBatchNorm2d


def _swapped(boxes: Any) -> Any:
    """Boxes [..., 4] in torchvision's order (x0, y0, x1, y1), from (y0, x0, y1, x1)."""
    return boxes[..., [1, 0, 3, 2]]


def _inputs(torch: Any, batch: HostBatch, device: str) -> dict[str, Any]:
    """The images on the device, and of each the objects that are no padding."""
    targets = [
        {
            "boxes": torch.tensor(_swapped(boxes[classes > 0]), dtype=torch.float32, device=device),
            "labels": torch.tensor(classes[classes > 0], dtype=torch.int64, device=device),
        }
        for boxes, classes in zip(batch["boxes"], batch["classes"], strict=True)
    ]
    return {"image": torch.tensor(batch["image"]).to(device), "targets": targets}
