"""Checkpoints of TensorFlow, written and computed by TensorFlow itself, in both formats.

`Tutorial` makes the layers of tensorflow/tpu's resnet_model.py in the order and with the names of
`tf.layers`, which Keras 3 no longer has.
"""

import dataclasses
import functools
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import benchmarks
import models
from benchmarks.resnet.use import tensorflow_weights, weights
from common import foreign
from common.errors import ConfigError, DataError
from common.foreign import files
from common.tensorflow import tensorflow
from configs import transformer
from engine.checkpoint import model_source
from tests.benchmarks.resnet.use.test_weights import translated
from tests.conftest import make_tiny_config
from tests.helpers import stable_weights

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
        initial = stable_weights.weights(name, kinds.get(leaf, ""), shape, inputs)
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
            tf.train.Saver(write_version=form).save(session, prefix)
            return session.run(logits)


@functools.cache
def written(folder, *arguments, form=2, **options):
    (folder / "model").mkdir(exist_ok=True)
    prefix = f"{folder}/model/{'_'.join(map(str, arguments))}-{form}.ckpt"
    return prefix, Tutorial(*arguments, **options).save(prefix, form)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tensorflow")


@pytest.mark.long
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
    values, remarks = weights.read_settings(source)
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
    logits: Any = jax.jit(model.apply, static_argnums=2)(variables, jnp.asarray(IMAGES), False)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.long
def test_the_backbone_of_ssd_in_a_scope_beside_another(folder):
    prefix, expected = written(folder, 34, "1.5", True, "resnet34/")
    source = files.read(prefix)
    others = {"ssd/conv2d/kernel": np.zeros((1, 1, 512, 256)), "ssd/dense/bias": np.zeros(3)}
    source = dataclasses.replace(source, arrays={**others, **source.arrays})
    values, _ = weights.read_settings(source)
    assert "num_label_classes" not in values and values["stage1_projection"] is False
    assert sum("conv2d" in name for name in source.arrays) == 36 + 1
    model, variables = translated(source)
    assert "head" not in variables["params"]
    features: Any = model.apply(variables, jnp.asarray(IMAGES), False, method="features")
    np.testing.assert_allclose(features, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    _, line = weights.describe(source, values)
    assert f"{source.path} (TensorFlow): 180 arrays" in line and "0 classes" in line


@pytest.mark.parametrize(
    ("files_", "chosen"),
    [
        (["m.ckpt-7.index", "m.ckpt-7.meta", "m.ckpt-7.data-00000-of-00001"], "m.ckpt-7"),
        (["m.ckpt-7", "m.ckpt-7.meta"], "m.ckpt-7"),
        (["m.ckpt-7-00000-of-00002", "m.ckpt-7-00001-of-00002", "m.ckpt-7.meta"], "m.ckpt-7"),
        (["a.index", "b.index"], "the checkpoints a, b: name one of them"),
        (["a.index", "b.index", "checkpoint b"], "b"),
        (["a.index", "checkpoint /old/place/a"], "a"),
        (["a.index", "checkpoint c"], "lacks c, the checkpoint that .*/checkpoint names"),
        (["graph.meta", "events.out"], ""),
        (["a.index", "model.safetensors"], "model.safetensors"),
        (["a.index", "checkpoints"], ""),
    ],
)
def test_the_checkpoint_of_a_folder(files_, chosen, tmp_path):
    for name, _, latest in (item.partition(" ") for item in files_):
        text = f'model_checkpoint_path: "{latest}"\nall_model_checkpoint_paths: "a"\n'
        (tmp_path / name).write_text(text if latest else "")
    if " " in chosen:
        with pytest.raises(DataError, match=chosen):
            foreign.find(str(tmp_path))
    else:
        assert foreign.find(f"{tmp_path}/") == (chosen and f"{tmp_path}/{chosen}")


def saved(prefix, arrays, form=2):
    tf = tensorflow().compat.v1
    with tf.Graph().as_default(), tf.Session() as session:
        for name, array in arrays.items():
            tf.get_variable(name, initializer=array)
        session.run(tf.global_variables_initializer())
        tf.train.Saver(write_version=form).save(session, str(prefix))


def test_a_benchmark_without_a_reader_says_what_a_checkpoint_holds(tmp_path):
    """As of tensor2tensor; whether the prefix, one of its files or the folder is named."""
    layer = "transformer/body/decoder/layer_0/ffn/conv1/kernel"
    arrays = {layer: np.ones((4, 8), np.float32), "step": np.int64(3)}
    saved(f"{tmp_path}/model.ckpt-250000", arrays)
    config = transformer.get_config()
    for path in ("", "/model.ckpt-250000", "/model.ckpt-250000.index"):
        config.init_from = f"{tmp_path}{path}"
        with pytest.raises(ConfigError, match=f"TensorFlow with the arrays {layer}, with which"):
            benchmarks.adopted_values(config, foreign.find(config.init_from), (), whole=False)
    assert foreign.find(f"{tmp_path}/model.ckpt-9") == ""


def test_paths_and_damage(gcs, tmp_path):
    """One checkpoint of each form: every path to it, a bucket, and what a bad copy leaves."""
    bucket = gcs.bucket()
    for form, names in {1: ("", ".meta"), 2: (".index", ".meta", ".data-00000-of-00001")}.items():
        prefix = f"{tmp_path}/model-{form}"
        saved(prefix, {"conv2d/kernel": np.ones((7, 7, 3, 64), np.float32)}, form)
        for name in names:
            assert foreign.find(prefix + name) == prefix
        (copy := tmp_path / str(form)).mkdir()
        for name in names:
            shutil.copy(prefix + name, copy / f"x.ckpt{name}")
        gcs.upload(copy, f"{bucket}/{form}")
        remote = foreign.find(f"{bucket}/{form}")
        assert remote == f"{bucket}/{form}/x.ckpt" == foreign.find(remote + names[0])
        assert files.read(remote).sha256 == files.read(prefix).sha256
        values = copy / f"x.ckpt{names[-1] if form == 2 else ''}"
        data = values.read_bytes()
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 255
        for damaged in (bytes(flipped), data[: len(data) // 2], b""):
            values.write_bytes(damaged)
            with pytest.raises(DataError, match="x.ckpt is (damaged|not a file of)") as refused:
                files.read(str(copy / "x.ckpt"))
            assert "\n" not in str(refused.value) and len(str(refused.value)) < 600
        values.unlink()
        if form == 2:
            with pytest.raises(DataError, match="x.ckpt is damaged"):
                files.read(str(copy / "x.ckpt"))
        else:
            assert foreign.find(str(copy)) == foreign.find(str(copy / "x.ckpt")) == ""


def arrays_of(depth=50, version="1.5", projects=False, stem=(7, 7, 3, 4), scope=""):
    """A checkpoint's arrays, without a head."""
    convs, norms = tensorflow_weights.expected(depth, version, projects, stem)
    arrays = {}
    for i, (_, shape) in enumerate(convs):
        arrays[f"{scope}conv2d{f'_{i + 2}' if i else ''}/kernel"] = np.ones(shape, np.float32)
    for i, (_, shape) in enumerate(norms):
        for leaf in ("gamma", "beta", "moving_mean", "moving_variance"):
            layer = f"{scope}batch_normalization{f'_{i}' if i else ''}"
            arrays[f"{layer}/{leaf}"] = np.ones(shape, np.float32)
    return arrays


def source_of(arrays):
    return files.Foreign("x.ckpt", "TensorFlow", "0" * 64, arrays)


@pytest.mark.parametrize("version", ["1.5", "2"])
@pytest.mark.parametrize("projects", [False, True])
def test_every_depth_is_recognised(version, projects):
    for depth, (_, block) in models.DEPTHS.items():
        values = tensorflow_weights.match("x", arrays_of(depth, version, projects))[2]
        keys = ("resnet_depth", "resnet_version", "stage1_projection")
        is_basic = block is models.BasicBlock
        assert [values[key] for key in keys] == [depth, version, projects and is_basic]


def test_a_space_to_depth_stem_says_what_it_is():
    source = source_of(arrays_of(18, stem=(4, 4, 12, 4)))
    values, _ = weights.read_settings(source)
    assert values["space_to_depth"] is True
    assert "ResNet-18 version 1.5 with a space-to-depth stem" in weights.describe(source, values)[1]
    _, variables = translated(source)
    assert variables["params"]["conv_stem"]["kernel"].shape == (4, 4, 12, 4)
    with pytest.raises(DataError, match=r"conv2d/kernel \[4, 4, 12, 4\] instead of \[7, 7, 3, 4\]"):
        translated(source, space_to_depth=False)
    _, variables = translated(source_of(arrays_of(18)), space_to_depth=True)
    assert variables["params"]["conv_stem"]["kernel"].shape == (4, 4, 12, 4)


ONES = np.ones((1, 1, 16, 16), np.float32)
FAULTS = [  # (arrays put in, arrays taken out, words of the refusal)
    ({"conv2d_9/kernel": ONES}, (), r"9/kernel has the shape \[1, 1, 16, 16\], where a ResNet-50"),
    ({}, ("conv2d_54/kernel",), "after conv2d_53 it lacks stage4_block3/conv3"),
    ({"conv2d_99/kernel": ONES}, (), "conv2d_99 is one more than a ResNet-50 of version 1.5 has"),
    ({}, ("batch_normalization_4/gamma",), r"batch_normalization_4/gamma has the shape \[\]"),
    ({"dense/bias": ONES[0, 0, 0]}, (), "it lacks dense/kernel"),
    ({"conv2d/kernel": ONES}, (), r"no conv2d takes images, its arrays are conv2d/kernel \[1, 1"),
    ({"a/conv2d/kernel": np.ones((3, 3, 3, 4))}, (), "images in the scopes '', 'a/'"),
]


@pytest.mark.parametrize(("added", "removed", "words"), FAULTS, ids=lambda x: str(x)[:30])
def test_other_models_are_refused_with_the_first_array(added, removed, words):
    arrays = {**arrays_of(), **added}
    source = source_of({name: x for name, x in arrays.items() if name not in removed})
    with pytest.raises(DataError, match=words) as refused:
        translated(source)
    assert str(refused.value).startswith("x.ckpt") and len(str(refused.value)) < 600


def test_predict_takes_what_a_checkpoint_does_not_say(folder, caplog):
    """Which convolution of a bottleneck has the stride, and how pixels are prepared."""
    prefix, expected = written(folder, 50, "1", form=1)
    recipe = make_tiny_config("", precision="float32")
    caplog.set_level("INFO", logger="tpu_suite")
    model = model_source.load(prefix, "latest", "--model", lambda _: recipe)
    assert model.config.resnet_version == "1.5"
    assumed = [text for text in caplog.messages if text.startswith("NOTE ")]
    caplog.clear()
    keys = {"resnet_version": "1", "input_spec": "vgg"}
    model = model_source.load(prefix, "latest", "--model", lambda _: recipe, keys)
    assert keys.items() <= model.config.to_dict().items()
    said = [text for text in caplog.messages if text.startswith("NOTE ")]
    assert assumed[:1] == said and len(assumed) == 3  # the moving averages are left out
    classifier: Any = model.benchmark
    variables = {"params": model.params, **model.model_state}
    logits = classifier.model.apply(variables, jnp.asarray(IMAGES), train=False)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
