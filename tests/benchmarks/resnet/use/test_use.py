"""The uses of a classifier: names of classes, heat maps of any number of images, weights."""

import types

import jax
import numpy as np
import pytest

from benchmarks import resnet
from benchmarks.resnet import records, use
from benchmarks.resnet.use import weights
from common.errors import ConfigError
from common.foreign import files
from tests.benchmarks.resnet.test_resnet import bare, drawn
from tests.test_input_pipeline import encode, noise


@pytest.mark.parametrize(
    ("classes", "names", "expected"),
    [
        (1001, 1000, ["", *map(str, range(1000))]),  # TensorFlow's background
        (1001, 1001, [*map(str, range(1001))]),
        (5, 3, ["0", "1", "2", "", ""]),
        (3, 3, ["0", "1", "2"]),
        (1000, 999, [*map(str, range(999)), ""]),
    ],
)
def test_every_class_of_the_model_has_its_name(classes, names, expected, monkeypatch):
    content = types.SimpleNamespace(class_names=(*map(str, range(names)),), labels="one")
    monkeypatch.setattr(records, "load_data_manifest", lambda keys: content)
    meaning = bare(num_label_classes=classes).uses.data_meaning()
    assert meaning == {"class_names": expected, "labels": "one"}


def test_heat_maps_of_any_number_of_images(monkeypatch):
    """They are computed 8 at a time; the last ones are padded."""
    asked = []

    def maps(self, params, model_state, images, classes):
        asked.append(images.shape)
        return params * images[..., 0] + classes[:, None, None]

    monkeypatch.setattr(use.ClassifierUses, "heat_maps", maps)
    uses = bare(image_size=16, input_spec="vgg").uses.with_weights(2.0, None)
    images = [encode(noise(20 + i, 16), "PNG") for i in range(11)]
    classes = np.arange(11) * 1000
    found = uses._heat(images, classes)
    assert asked == [(8, 16, 16, 3)] and found.shape == (11, 16, 16)
    pixels = np.stack([use.prepare_image(x, uses.input_spec)[..., 0] for x in images])
    np.testing.assert_array_equal(found, 2.0 * pixels + classes[:, None, None])


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


def test_foreign_weights_are_of_the_configs_architecture(monkeypatch):
    benchmark, source = bare(resnet_depth=18, deep_stem=False), object()
    values = {key: getattr(benchmark.settings.model, key) for key in weights.ARCHITECTURE}
    monkeypatch.setattr(files, "read", lambda file: source)
    monkeypatch.setattr(weights, "read_settings", lambda file: (values, ["a remark"]))
    monkeypatch.setattr(weights, "translate", lambda *_: ("params", "state"))
    monkeypatch.setattr(weights, "describe", lambda *_: ())
    monkeypatch.setattr(use, "Imported", lambda *parts: parts)
    assert resnet.MODEL.foreign_settings("x.pth") == (values, ["a remark"])
    assert benchmark.uses.read_foreign("x.pth") == ("x.pth", "params", "state")
    values["deep_stem"] = True
    with pytest.raises(ConfigError, match="^config.deep_stem=False, but x.pth has True$"):
        benchmark.uses.read_foreign("x.pth")
