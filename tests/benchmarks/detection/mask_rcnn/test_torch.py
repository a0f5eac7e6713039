"""Mask R-CNN's network against torchvision's own, with its weights, where it is installed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.detection.mask_rcnn import models
from models import resnet, stem
from ops.foreign.resnets import PLAIN
from ops.trees import by_name

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
detection = pytest.importorskip("torchvision.models.detection")
pytestmark = pytest.mark.parity
CLASSES = 5
SWAPPED = [1, 0, 3, 2]  # (x, y, w, h) as (y, x, h, w)


@pytest.fixture(scope="module")
def network():
    """torchvision's Mask R-CNN with random weights and statistics."""
    torch.manual_seed(0)
    network = detection.maskrcnn_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=1 + CLASSES
    ).eval()
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
                module.weight.uniform_(0.3, 0.7)
    return network


def theirs(path):
    """torchvision's name of one of our arrays, and how it becomes ours."""
    module, _, kind = path.partition("/")[2].rpartition("/")
    leaf = {"kernel": "weight"}.get(kind, kind)
    if module.startswith("backbone/"):
        inside = module.removeprefix("backbone/")
        return f"backbone.body.{PLAIN.name(f'params/{inside}/{kind}')}", None
    part, _, layer = module.partition("/")
    number = int(layer[-1]) if layer[-1].isdigit() else 0
    blocks = "inner_blocks" if "lateral" in layer else "layer_blocks"
    name = {
        "pyramid": f"backbone.fpn.{blocks}.{number - 2}.0",
        "proposal_head": {
            "conv": "rpn.head.conv.0.0",
            "score": "rpn.head.cls_logits",
            "code": "rpn.head.bbox_pred",
        }.get(layer, ""),
        "box_head": {
            "class": "roi_heads.box_predictor.cls_score",
            "code": "roi_heads.box_predictor.bbox_pred",
        }.get(layer, f"roi_heads.box_head.fc{5 + number}"),
        "mask_head": {
            "upsampled": "roi_heads.mask_predictor.conv5_mask",
            "mask": "roi_heads.mask_predictor.mask_fcn_logits",
        }.get(layer, f"roi_heads.mask_head.{number - 1}.0"),
    }[part]
    return f"{name}.{leaf}", f"{part}/{layer}"


def transplanted(network, shapes):
    """Our variables with torchvision's values."""
    source = {k: v.numpy() for k, v in network.state_dict().items()}

    def take(path, shape):
        name, layer = theirs(path)
        array = source[name]
        if layer in ("proposal_head/code", "box_head/code"):  # four numbers side by side
            array = array.reshape(-1, 4, *array.shape[1:])[:, SWAPPED].reshape(array.shape)
        if layer == "box_head/dense1" and array.ndim == 2:
            array = array.reshape(-1, 256, 7, 7).transpose(0, 2, 3, 1).reshape(len(array), -1)
        if layer == "mask_head/upsampled" and array.ndim == 4:
            array = array.transpose(2, 3, 0, 1)[::-1, ::-1]  # flax turns the kernel round
        elif array.ndim == 4:
            array = array.transpose(2, 3, 1, 0)
        elif array.ndim == 2:
            array = array.T
        assert array.shape == shape, (path, name)
        return np.ascontiguousarray(array)

    return jax.tree.unflatten(
        jax.tree.structure(shapes), [take(k, v.shape) for k, v in by_name(shapes).items()]
    )


@pytest.fixture(scope="module")
def ours(network):
    """Our network, bound to the same values."""
    backbone = resnet(50, dtype=jnp.float32, stem=partial(stem, padding=models.PADDING))
    model = models.MaskRCNN(
        backbone,
        levels=(2, 3, 4, 5, 6),
        anchors=3,
        filters=256,
        box_features=(1024, 1024),
        mask_features=(256,) * 4,
        num_classes=CLASSES,
    )
    image = jnp.zeros((1, 64, 64, 3))
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), image, (7, 14)))
    return model.bind(transplanted(network, dict(shapes)))


def close(mine, other):
    expected = other.detach().numpy()
    np.testing.assert_allclose(mine, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_maps_and_what_is_proposed_from_them(network, ours):
    pixels = np.random.default_rng(1).normal(size=(2, 128, 192, 3)).astype(np.float32)
    with torch.no_grad():
        maps = network.backbone(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()))
        scores, codes = network.rpn.head(list(maps.values()))
    mine = ours.maps(jnp.asarray(pixels), train=False)
    assert list(mine) == [2, 3, 4, 5, 6] and len(maps) == 5
    my_scores, my_codes = ours.proposal_head(mine)
    for level, other, score, code, my_score, my_code in zip(
        mine, maps.values(), scores, codes, my_scores, my_codes, strict=True
    ):
        close(mine[level], other.permute(0, 2, 3, 1))
        close(my_score, score.permute(0, 2, 3, 1).reshape(2, -1))
        code = code.reshape(2, 3, 4, *code.shape[2:]).permute(0, 3, 4, 1, 2)
        close(my_code, code.reshape(2, -1, 4)[..., SWAPPED])


def test_heads(network, ours):
    draw = np.random.default_rng(2)
    small, large = (draw.normal(size=(1, 6, n, n, 256)).astype(np.float32) for n in (7, 14))
    heads = network.roi_heads
    with torch.no_grad():
        first = torch.from_numpy(small[0].transpose(0, 3, 1, 2).copy())
        scores, codes = heads.box_predictor(heads.box_head(first))
        second = torch.from_numpy(large[0].transpose(0, 3, 1, 2).copy())
        masks = heads.mask_predictor(heads.mask_head(second))
    my_scores, my_codes = ours.box_head(jnp.asarray(small))
    close(my_scores[0], scores)
    close(my_codes[0], codes.reshape(6, -1, 4)[..., SWAPPED])
    close(ours.mask_head(jnp.asarray(large))[0], masks.permute(0, 2, 3, 1))
