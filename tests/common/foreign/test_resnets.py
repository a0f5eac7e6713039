"""The names of ResNet's arrays; tests/benchmarks/resnet/use/test_weights.py has the libraries'."""

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
        kernel = space_to_depth.unfold_kernel(folded) + edge
        blocks = kernel.reshape(4, 2, 4, 2, 3, 4).transpose(0, 2, 1, 3, 4, 5).reshape(4, 4, 12, 4)
        np.testing.assert_array_equal(space_to_depth.unfold_kernel(blocks), kernel)
        params["conv_stem"] = {"kernel": blocks}
        with pytest.raises(CheckpointError, match="it sees 8x8 pixels"):
            resnets.names(params, model_state)


def test_layouts_of_the_families():
    """PyTorch has the outputs first; a product without pixels may be a convolution there."""
    draw = np.random.default_rng(0)
    conv, dense, bias = (draw.normal(size=shape) for shape in ((3, 5, 2, 4), (2, 4), (4,)))
    tensorflow = resnets.Family({"head": "dense"}, is_torch=False)
    assert tensorflow.theirs("params/head/kernel", dense)["dense/kernel"] is dense
    for family, path, array, name, expected in (
        (
            resnets.PLAIN,
            "conv_stem/kernel",
            conv,
            "conv1.weight",
            np.moveaxis(conv, (3, 2), (0, 1)),
        ),
        (resnets.PLAIN, "head/kernel", dense, "fc.weight", dense.T),
        (resnets.HUGGING_FACE, "head/kernel", dense, "classifier.1.weight", dense.T),
        (resnets.PRE_ACTIVATION, "head/kernel", dense, "head.fc.weight", dense.T[..., None, None]),
        (resnets.PLAIN, "head/bias", bias, "fc.bias", bias),
    ):
        theirs = family.theirs(f"params/{path}", array)
        np.testing.assert_array_equal(theirs.pop(name), expected, strict=True)
        assert not theirs


def test_pytorchs_layout():
    kernel = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)  # height, width, inputs, outputs
    assert resnets.torch_layout(kernel).shape == (5, 4, 2, 3)
    assert resnets.torch_layout(kernel)[4, 1, 0, 2] == kernel[0, 2, 1, 4]
    assert resnets.torch_layout(kernel[0, 0])[3, 1] == kernel[0, 0, 1, 3]
