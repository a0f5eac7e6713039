"""Heat maps against finite differences, sums over the picture, and Grad-CAM in PyTorch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from benchmarks import exhibits
from benchmarks.resnet.use import heat
from common.images.input_spec import NAMED
from configs import resnet50
from engine.checkpoint import model_source
from tests.benchmarks.resnet.networks import make_network
from tests.benchmarks.resnet.test_resnet import bare, drawn
from tests.commands.predict.test_libraries import drawn as drawn_torch
from tests.test_models import make_images, random_variables

KEYS = [
    {},
    {"resnet_depth": 18},
    {"batch_norm": "gram"},
    {"batch_norm": "gram", "resnet_depth": 18},
    {"resnet_version": "1"},
    {"resnet_version": "2"},
    {"resnet_version": "2", "resnet_depth": 18, "max_pool": "torch"},
    {"deep_stem": True, "squeeze_excite": 0.25, "max_pool": "conv"},
    {"blur_pool": True, "num_filters": 16},
    {"space_to_depth": True},
    {"stage1_projection": True, "resnet_depth": 18},
]


@pytest.mark.parametrize("keys", KEYS, ids=str)
def test_the_evidence_of_all_cells_is_the_logit(keys):
    """Of all variants, because only a mean and a linear layer follow the last stage."""
    model = make_network(1, 1, 1, 1, **keys)
    variables, images = random_variables(model), make_images(3, 64, 96, 3)
    classes = np.array([2, 0, 1])

    @jax.jit
    def both(variables, images):
        found = heat.evidence(model, variables, images, jnp.array(classes))
        return found, model.apply(variables, images, False)

    found, logits = map(np.asarray, both(variables, images))
    assert found.shape == (3, 2, 3) and found.dtype == np.float32
    logits = (logits - variables["params"]["head"]["bias"])[np.arange(3), classes]
    np.testing.assert_allclose(np.sum(found, (1, 2)), logits, rtol=1e-4, atol=1e-5)
    assert np.ptp(found, axis=(1, 2)).min() > 1e-3


def test_the_weights_of_channels_are_the_slopes_of_the_logit():
    """By finite differences in float64, through the mean and the head in NumPy."""
    model = make_network(1, 1, 1, 1)
    variables, images = random_variables(model), make_images(2, 64, 64, 3)
    endpoints = jax.jit(lambda *x: model.apply(*x, False, method="endpoints"))
    *_, last = endpoints(variables, images).values()
    last, head = np.asarray(last, np.float64), variables["params"]["head"]
    classes = [1, 2]

    def logit(last):
        every = last.mean((1, 2)) @ head["kernel"].astype(float) + head["bias"]
        return every[range(2), classes]

    expected = np.zeros((2, 2, 2))
    for channel in range(last.shape[-1]):
        moved = last.copy()
        moved[..., channel] += 1e-3
        slope = (logit(moved) - logit(last)) / 1e-3  # summed over the 4 cells
        expected += slope[:, None, None] / 4 * last[..., channel]
    evidence = jax.jit(lambda *x: heat.evidence(model, *x))
    found = evidence(variables, images, jnp.array(classes))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_shares_are_stretched_over_the_pixels():
    evidence = np.zeros((4, 2, 2), np.float32)
    evidence[3, 0, 0] = np.nan  # of a run that has diverged
    evidence[0] = [[-5, 8], [2, 4]]
    evidence[1] = [[4, 8], [5, 4]]  # what all cells have says nothing about the place
    found = np.asarray(heat.shares(jnp.asarray(evidence), 4))
    corners = [[0, 1], [0.25, 0.5]], [[0, 1], [0.25, 0]]
    for i, values in enumerate(corners):
        np.testing.assert_allclose(found[i, [0, 0, 3, 3], [0, 3, 0, 3]], np.ravel(values))
        # Centres of cells are at 0.5 and 2.5 pixels of 0, 1, 2, 3.
        rows = np.array([[1, 0], [0.75, 0.25], [0.25, 0.75], [0, 1]])
        np.testing.assert_allclose(found[i], rows @ values @ rows.T, atol=1e-6)
    assert not found[2:].any()


@pytest.mark.parametrize("flips", [False, True])
def test_with_eval_flip_a_mirrored_picture_has_the_mirrored_map(flips):
    benchmark = bare(eval_flip=flips, num_label_classes=5, resnet_depth=18, image_size=64)
    weights = drawn(benchmark)
    images = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), np.uint8)
    maps = jax.jit(benchmark.uses.heat_maps)
    classes = np.array([0, 3, 4])
    found, other = (np.asarray(maps(*weights, x, classes)) for x in (images, images[:, :, ::-1]))
    assert found.shape == (3, 64, 64) and (found.min(), found.max()) == (0, 1)
    assert np.allclose(found, other[:, :, ::-1], atol=1e-3) == flips


def test_the_map_lies_where_the_model_looks():
    photo = Image.new("RGB", (200, 100), "white")
    heat_map = np.full((32, 32), 0.3, np.float32)
    heat_map[:, 16:] = 0.7
    shown = np.asarray(exhibits.heated(photo, heat_map, NAMED["torchvision_v1"]), int)
    assert shown.shape == (100, 200, 3)
    frame = (shown == 255).all(2)
    rows, columns = np.flatnonzero(frame.sum(1) > 80), np.flatnonzero(frame.sum(0) > 80)
    assert (rows.tolist(), columns.tolist()) == ([6, 93], [56, 143])  # 224 of 256 of the height
    hot, cold = shown[50, 130], shown[50, 70]
    assert hot.sum() > cold.sum() + 60 and hot[0] > hot[2] + 60  # orange, violet
    assert np.ptp(shown[:, :56], axis=2).max() == 0 and shown[:, :56].max() < 128


@pytest.mark.parity
def test_the_maps_are_those_of_grad_cam_in_pytorch(tmp_path):
    """As pytorch-grad-cam computes them with target_layers=[model.layer4[-1]]."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torchvision = pytest.importorskip("torchvision")
    network = drawn_torch(torch, torchvision.models.resnet18(num_classes=7))
    torch.save(network.state_dict(), tmp_path / "model.pth")
    kept = {}

    def keep(_, __, output):
        kept["output"] = output
        output.register_hook(lambda gradient: kept.update(gradient=gradient))

    network.layer4[-1].register_forward_hook(keep)
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8)
    images = images.repeat(28, 1).repeat(28, 2)
    spec = NAMED["torchvision_v1"]
    inputs = (torch.tensor(images) - torch.tensor(spec.mean)) / torch.tensor(spec.std)
    inputs = inputs.permute(0, 3, 1, 2)
    logits = network(inputs)
    classes = [0, 3, 6, int(logits[3].argmax())]
    logits[range(4), classes].sum().backward()
    weights = kept["gradient"].mean((2, 3), keepdim=True)
    maps = (weights * kept["output"]).sum(1, keepdim=True).relu()
    maps = torch.nn.functional.interpolate(maps, (224, 224), mode="bilinear")[:, 0].detach().numpy()
    maps -= maps.min((1, 2), keepdims=True)
    expected = maps / maps.max((1, 2), keepdims=True)
    recipe = resnet50.get_config()
    recipe.precision = "float32"
    model = model_source.load(
        str(tmp_path / "model.pth"), "latest", "--model", lambda _: recipe, {}
    )
    uses: Any = model.benchmark.uses
    found = jax.jit(uses.heat_maps)(model.params, model.model_state, images, jnp.array(classes))
    np.testing.assert_allclose(found, expected, atol=1e-3)
