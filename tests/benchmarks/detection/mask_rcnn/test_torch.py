"""Mask R-CNN's network against torchvision's own, with its weights, where it is installed."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

import benchmarks
from benchmarks.detection.mask_rcnn import models, weights
from benchmarks.detection.weights import described
from common.foreign import files
from common.foreign.files import Foreign
from common.layers import space_to_depth
from common.trees import by_name
from configs import mask_rcnn
from models import resnet, stem
from tests.conftest import adopt_values

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


@pytest.fixture(scope="module")
def ours(network):
    """Our network, bound to the same values."""
    backbone = resnet(50, dtype=jnp.float32, stem=partial(stem, padding=models.PADDING))
    model = models.MaskRCNN(
        backbone,
        levels=(2, 3, 4, 5, 6),
        num_anchors=3,
        filters=256,
        box_features=(1024, 1024),
        mask_features=(256,) * 4,
        num_classes=CLASSES,
    )
    image = jnp.zeros((1, 64, 64, 3))
    shapes: Any = jax.eval_shape(lambda: model.init(jax.random.key(0), image, (7, 14)))
    state = {"batch_stats": shapes["batch_stats"]}
    named = by_name({"params": shapes["params"], "model_state": state})
    arrays = {name: array.numpy() for name, array in network.state_dict().items()}
    arrays = {k: v for k, v in arrays.items() if not k.endswith("num_batches_tracked")}
    arrays, values, _ = described(weights, Foreign("", "", "", arrays))
    layout = partial(weights.theirs, values=values)
    found = files.adapt("", arrays, {k: v.shape for k, v in named.items()}, layout)
    tree = unflatten_dict(found, sep="/")
    return model.bind({"params": tree["params"], **tree["model_state"]})


def close(mine, other):
    expected = other.detach().numpy()
    np.testing.assert_allclose(mine, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_maps_and_what_is_proposed_from_them(network, ours):
    pixels = np.random.default_rng(1).normal(size=(2, 128, 192, 3)).astype(np.float32)
    with torch.no_grad():
        maps = network.backbone(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()))
        scores, deltas = network.rpn.head(list(maps.values()))
    mine = ours.maps(jnp.asarray(pixels), train=False)
    assert list(mine) == [2, 3, 4, 5, 6] and len(maps) == 5
    my_scores, my_codes = ours.proposal_head(mine)
    for level, other, score, code, my_score, my_code in zip(
        mine, maps.values(), scores, deltas, my_scores, my_codes, strict=True
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
        scores, deltas = heads.box_predictor(heads.box_head(first))
        second = torch.from_numpy(large[0].transpose(0, 3, 1, 2).copy())
        masks = heads.mask_predictor(heads.mask_head(second))
    my_scores, my_codes = ours.box_head(jnp.asarray(small))
    close(my_scores[0], scores)
    close(my_codes[0], deltas.reshape(6, -1, 4)[..., SWAPPED])
    close(ours.mask_head(jnp.asarray(large))[0], masks.permute(0, 2, 3, 1))


def test_detections_are_torchvision_s(network, tmp_path, monkeypatch):
    """Boxes and scores within 1e-4; masks as well, before ours are rounded to 255 steps."""
    size = 128, 192
    heads, masks = network.roi_heads, []
    with torch.no_grad():  # or all scores are about equal, and boxes about their proposals
        for layer, factor in (
            *((heads.box_predictor.cls_score, 20), (heads.box_predictor.bbox_pred, 5)),
            *((network.rpn.head.cls_logits, 10), (network.rpn.head.bbox_pred, 5)),
        ):
            monkeypatch.setattr(layer.weight, "data", layer.weight.data * factor)
    monkeypatch.setattr(network.transform, "min_size", (size[0],))
    monkeypatch.setattr(network.transform, "max_size", size[1])
    path = str(tmp_path / "mask_rcnn.pth")
    torch.save(network.state_dict(), path)
    pixels = np.random.default_rng(3).integers(0, 256, (2, *size, 3)).astype(np.uint8)
    handle = heads.mask_predictor.register_forward_hook(lambda *call: masks.append(call[-1]))
    with torch.no_grad():
        found = network([torch.from_numpy(x.transpose(2, 0, 1) / np.float32(255)) for x in pixels])
    handle.remove()
    config = mask_rcnn.get_config()
    config.update({"image_short": size[0], "image_long": size[1], "image_shape": size})
    config.precision = "float32"
    adopt_values(config, path, whole=True)
    benchmark = benchmarks.load(config.lock(), "")
    imported = benchmark.uses.read_foreign(path)
    assert imported is not None
    sizes = np.tile(np.array(size, np.float32), (2, 1))
    batch = {"image": np.asarray(space_to_depth.rearrange(jnp.asarray(pixels)))}
    batch |= {"size": sizes, "original": sizes, "image_id": np.arange(2)}
    mine: Any = jax.jit(benchmark.predict)(imported.params, imported.model_state, batch)
    first, outlines = 0, masks[0].sigmoid().numpy()
    for i, other in enumerate(found):
        count, labels = len(other["scores"]), other["labels"].numpy()
        assert count == np.count_nonzero(mine["score"][i]) > 50
        np.testing.assert_array_equal(mine["class"][i][:count], labels)
        for name, theirs in (("score", other["scores"]), ("boxes", other["boxes"][:, SWAPPED])):
            np.testing.assert_allclose(mine[name][i][:count], theirs.numpy(), rtol=0, atol=1e-4)
        shares = outlines[np.arange(first, first + count), labels]
        mask = np.asarray(mine["masks"][i][:count], np.float32) / 255
        np.testing.assert_allclose(mask, shares, rtol=0, atol=0.5 / 255 + 1e-4)
        first += count
