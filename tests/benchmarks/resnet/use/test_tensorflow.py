"""Checkpoints of TensorFlow, written and computed by TensorFlow itself, in both formats.

`Tutorial` makes the layers of tensorflow/tpu's resnet_model.py in the order and with the names of
`tf.layers`, which Keras 3 no longer has.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from benchmarks.resnet.use import imports
from ops import foreign
from ops.foreign import files
from ops.shards import tensorflow
from tests import drawn
from tests.benchmarks.resnet.use.test_imports import translated

FILTERS, CLASSES = 4, 7
IMAGES = np.random.default_rng(0).normal(size=(2, 64, 64, 3)).astype(np.float32)


class Tutorial:
    """A graph of the tutorial's ResNet."""

    def __init__(self, depth, version="1.5", ssd=False, scope=""):
        self.tf = tensorflow().compat.v1
        self.sizes, block = models.DEPTHS[depth]
        self.is_wide, self.version = block is models.BottleneckBlock, version
        self.ssd, self.scope, self.counts = ssd, scope, {}

    def variable(self, layer, leaf, shape, scale=1.0):
        name = f"{self.scope}{layer}/{leaf}"
        kinds = {"gamma": "scale", "moving_variance": "var", "kernel": "kernel"}
        inputs = int(np.prod(shape[:-1]))
        initial = drawn.weights(name, kinds.get(leaf, ""), shape, inputs)
        is_learnt = not leaf.startswith("moving")
        return self.tf.get_variable(name, initializer=initial, trainable=is_learnt)

    def named(self, kind):
        count = self.counts[kind] = self.counts.get(kind, -1) + 1
        return f"{kind}_{count}" if count else kind

    def conv(self, x, filters, side, stride=1):
        kernel = self.variable(self.named("conv2d"), "kernel", (side, side, x.shape[3], filters))
        if stride > 1:
            before, after = (side - 1) // 2, side - 1 - (side - 1) // 2
            x = self.tf.pad(x, [[0, 0], [before, after], [before, after], [0, 0]])
        return self.tf.nn.conv2d(x, kernel, stride, "SAME" if stride == 1 else "VALID")

    def norm(self, x, relu=True):
        layer, shape = self.named("batch_normalization"), (x.shape[3],)
        leaves = ("moving_mean", "moving_variance", "beta", "gamma")
        mean, var, beta, gamma = (self.variable(layer, leaf, shape) for leaf in leaves)
        y = self.tf.nn.batch_normalization(x, mean, var, beta, gamma, 1e-5)
        return self.tf.nn.relu(y) if relu else y

    def block(self, x, filters, stride, projects):
        out = 4 * filters if self.is_wide else filters
        before = x = self.norm(x) if self.version == "2" else x
        shortcut = self.conv(before, out, 1, stride) if projects else None
        if projects and self.version != "2":
            shortcut = self.norm(shortcut, relu=False)
        if self.is_wide:
            first = stride if self.version == "1" else 1
            layers = [(filters, 1, first), (filters, 3, stride // first), (out, 1, 1)]
        else:
            layers = [(filters, 3, stride), (filters, 3, 1)]
        for i, layer in enumerate(layers):
            is_last = i == len(layers) - 1
            x = self.conv(x, *layer)
            if self.version != "2" or not is_last:
                x = self.norm(x, relu=not is_last)
        return x, shortcut

    def logits(self, images):
        x = self.conv(images, FILTERS, 7, 2)
        x = x if self.version == "2" else self.norm(x)
        x = self.tf.nn.max_pool2d(x, 3, 2, "SAME")
        for stage, size in enumerate(self.sizes):
            for i in range(size):
                projects = i == 0 and not (self.ssd and stage == 0)
                stride = 2 if i == 0 and stage else 1
                y, shortcut = self.block(x, FILTERS * 2**stage, stride, projects)
                y += x if shortcut is None else shortcut
                x = y if self.version == "2" else self.tf.nn.relu(y)
        x = self.norm(x) if self.version == "2" else x
        x = self.tf.reduce_mean(x, [1, 2])
        if self.ssd:
            return x
        kernel = self.variable("dense", "kernel", (x.shape[1], CLASSES))
        return self.tf.matmul(x, kernel) + self.variable("dense", "bias", (CLASSES,))

    def save(self, prefix, form=2, beside=True):
        """Writes a checkpoint and returns the logits of `IMAGES`."""
        tf = self.tf
        with tf.Graph().as_default(), tf.Session() as session:
            logits = self.logits(tf.constant(IMAGES))
            learnt = tf.trainable_variables()
            if beside:
                tf.train.get_or_create_global_step()
                tf.train.ExponentialMovingAverage(0.9).apply(learnt)
                for variable in learnt:
                    shape = (*variable.shape, 2)
                    tf.get_variable(f"{variable.op.name}/Momentum", shape)
            session.run(tf.global_variables_initializer())
            tf.train.Saver(write_version=form, sharded=form == 3).save(session, prefix)
            return session.run(logits)


@functools.cache
def written(folder, *arguments, form=2, **options):
    (folder / "model").mkdir(exist_ok=True)
    prefix = f"{folder}/model/{'_'.join(map(str, arguments))}-{form}.ckpt"
    return prefix, Tutorial(*arguments, **options).save(prefix, form)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tensorflow")


@pytest.mark.parametrize(
    ("depth", "version", "form"),
    [(34, "1.5", 1), (34, "1.5", 2), (50, "1.5", 2), (50, "1", 1), (50, "2", 2), (18, "2", 2)],
)
def test_settings_and_logits(depth, version, form, folder):
    prefix, expected = written(folder, depth, version, form=form)
    assert foreign.find(prefix) == prefix
    source = files.read(prefix)
    assert source.format == "TensorFlow" and len(source.sha256) == 64
    assert not any(part in name for name in source.arrays for part in ("Mom", "Ave", "step"))
    values, remarks = imports.read_settings(source)
    assert values == {
        **{"resnet_depth": depth, "num_filters": FILTERS, "max_pool": "same", "image_size": 224},
        **{"deep_stem": False, "squeeze_excite": 0.0, "num_label_classes": CLASSES},
        "resnet_version": "2" if version == "2" else "1.5",
        "stage1_projection": depth < 50,
        "input_spec": "vgg" if version == "2" else "tensorflow",
    }
    silent = ["resnet_version"] if depth == 50 and version != "2" else []
    assert [key for _, key in remarks] == ["", "input_spec", *silent]
    assert "moving averages of its weights, which are not taken" in remarks[0][0]
    model, variables = translated(source, resnet_version=version)
    logits = jax.jit(model.apply, static_argnums=2)(variables, jnp.asarray(IMAGES), False)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
