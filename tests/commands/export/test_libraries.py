"""The folder of --format=hf in torchvision, timm and transformers, where these are installed."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest

from commands import export
from tests.benchmarks.resnet import networks
from tests.commands.export.test_export import images, make_workdir, normalised

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.parity
SIZE = 64


@pytest.fixture(scope="module")
def exported(tiny_records, tmp_path_factory):
    """(the folder, the logits that it must give) of a ResNet-18 of the usual width."""
    folder = tmp_path_factory.mktemp("run")
    keys = {"resnet_depth": 18, "num_filters": 64, "image_size": SIZE}
    workdir, items = make_workdir(folder, tiny_records, **keys)
    export.run(workdir, "latest", "hf")
    model = networks.make_network(resnet_depth=18, classes=4, num_filters=64, max_pool="torch")
    variables = {"params": items["params"], **items["model_state"]}
    apply = jax.jit(functools.partial(model.apply, train=False))
    return folder / "export", np.asarray(apply(variables, normalised(images(SIZE))))


def check(network, expected, answer=lambda output: output):
    pixels = torch.from_numpy(normalised(images(SIZE)).transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        computed = answer(network.eval()(pixels)).numpy()
    np.testing.assert_allclose(computed, expected, atol=1e-5 * np.abs(expected).max())


def test_timm(exported):
    timm = pytest.importorskip("timm")
    folder, expected = exported
    network = timm.create_model(f"local-dir:{folder}", pretrained=True)
    check(network, expected)
    data = timm.data.resolve_model_data_config(network)
    assert tuple(data["input_size"]) == (3, SIZE, SIZE) and data["interpolation"] == "bicubic"
    names = json.loads((pathlib.Path(folder) / "config.json").read_text())["label_names"]
    assert names == ["n0", "n1", "n2", "n3"]


def test_torchvision(exported):
    torchvision = pytest.importorskip("torchvision")
    folder, expected = exported
    from safetensors.torch import load_file

    network = torchvision.models.resnet18(num_classes=4)
    network.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    check(network, expected)


def test_transformers(exported):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("timm")
    folder, expected = exported
    load = transformers.AutoModelForImageClassification.from_pretrained
    network, report = load(folder, output_loading_info=True)
    assert not any(report.values()), report
    check(network, expected, lambda output: output.logits)
