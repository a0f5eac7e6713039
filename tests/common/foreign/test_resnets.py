"""The names of ResNet's arrays in other libraries."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from common.errors import CheckpointError
from common.foreign import resnets
from common.layers import space_to_depth


def variables(depth, **kwargs):
    """(params, model_state) of a narrow ResNet, drawn at random, as NumPy arrays."""
    model = models.resnet(depth, **{"num_filters": 4, "num_classes": 5, **kwargs})
    made = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)), train=False)
    )
    draw = np.random.default_rng(1)
    made = jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), made)
    return made["params"], {"batch_stats": made["batch_stats"]}


@pytest.mark.parametrize(("depth", "count"), [(18, 102), (34, 182), (50, 267), (101, 522)])
def test_as_many_arrays_as_torchvision_without_its_counters(depth, count):
    """torchvision has 122, 218, 320, 626 arrays with one counter for each BatchNorm."""
    arrays = resnets.names(*variables(depth))
    norms = sum(name.endswith("running_mean") for name in arrays)
    assert (len(arrays), len(arrays) + norms) == (
        count,
        {18: 122, 34: 218, 50: 320, 101: 626}[depth],
    )


def test_names_and_layouts_of_torchvision():
    params, model_state = variables(50)
    arrays = resnets.names(params, model_state)
    kernel = params["conv_stem"]["kernel"]
    for o, i, y, x in itertools.product(range(4), range(3), (0, 6), (2, 5)):
        assert arrays["conv1.weight"][o, i, y, x] == kernel[y, x, i, o]
    stage2 = params["stage2_block1"]
    assert arrays["layer2.0.downsample.0.weight"].shape == (32, 16, 1, 1)
    for name, ours in {
        "fc.weight": params["head"]["kernel"].T,
        "fc.bias": params["head"]["bias"],
        "bn1.weight": params["bn_stem"]["scale"],
        "layer2.0.bn3.bias": stage2["bn3"]["bias"],
        "layer2.0.downsample.1.weight": stage2["bn_proj"]["scale"],
        "layer3.5.bn2.running_var": model_state["batch_stats"]["stage3_block6"]["bn2"]["var"],
        "layer3.5.bn2.running_mean": model_state["batch_stats"]["stage3_block6"]["bn2"]["mean"],
    }.items():
        np.testing.assert_array_equal(arrays[name], ours)


def test_a_space_to_depth_stem_becomes_the_plain_one():
    params, model_state = variables(18)
    plain = params["conv_stem"]["kernel"]
    folded = np.asarray(space_to_depth.convert_kernel(jnp.asarray(plain)))
    params["conv_stem"] = {"kernel": folded}
    stem = resnets.names(params, model_state)["conv1.weight"]
    np.testing.assert_array_equal(stem, plain.transpose(3, 2, 0, 1))
    edges = [np.zeros((8, 8, 3, 4), np.float32) for _ in range(2)]
    edges[0][0, 5], edges[1][5, 0] = 1, 1
    for edge in edges:
        kernel = resnets.unfold_kernel(folded) + edge
        blocks = kernel.reshape(4, 2, 4, 2, 3, 4).transpose(0, 2, 1, 3, 4, 5).reshape(4, 4, 12, 4)
        np.testing.assert_array_equal(resnets.unfold_kernel(blocks), kernel)
        params["conv_stem"] = {"kernel": blocks}
        with pytest.raises(CheckpointError, match="it sees 8x8 pixels"):
            resnets.names(params, model_state)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (resnets.PLAIN, "layer2.3.conv1.weight layer2.3.downsample.1.bias fc.weight"),
        (resnets.DEEP, "layer2.3.conv1.weight layer2.3.downsample.2.bias fc.weight"),
        (
            resnets.HUGGING_FACE,
            "resnet.encoder.stages.1.layers.3.layer.0.convolution.weight "
            "resnet.encoder.stages.1.layers.3.shortcut.normalization.bias classifier.1.weight",
        ),
    ],
    ids=["plain", "deep", "Hugging Face"],
)
def test_names_of_the_families(family, expected):
    paths = ("stage2_block4/conv1/kernel", "stage2_block4/bn_proj/bias", "head/kernel")
    assert [family.name(f"params/{path}") for path in paths] == expected.split()


def test_layouts_of_the_families():
    """PyTorch has the outputs first; a product without pixels may be a convolution there."""
    draw = np.random.default_rng(0)
    conv, dense, bias = (draw.normal(size=shape) for shape in ((3, 5, 2, 4), (2, 4), (4,)))
    tensorflow, torch = resnets.Family({}, "", (1, 1), {}, is_torch=False), resnets.PLAIN
    for array in (conv, dense, bias):
        assert tensorflow.theirs("x", array) is array
        np.testing.assert_array_equal(tensorflow.ours(array, array.shape), array)
    for name, array, expected in (
        ("conv1.weight", conv, np.moveaxis(conv, (3, 2), (0, 1))),
        ("fc.weight", dense, dense.T),
        ("classifier.1.weight", dense, dense.T),
        ("se.fc1.weight", dense, dense.T.reshape(4, 2, 1, 1)),
        ("fc.bias", bias, bias),
    ):
        theirs = torch.theirs(name, array)
        np.testing.assert_array_equal(theirs, expected, strict=True)
        np.testing.assert_array_equal(torch.ours(theirs, array.shape), array, strict=True)
