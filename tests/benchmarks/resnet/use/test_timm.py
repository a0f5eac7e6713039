"""timm's models: the names of docs/models.md; BiT's files, with their pixels, there and back."""

import itertools
import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest

from benchmarks.resnet.use import imports
from configs import resnet50
from errors import DataError
from modes import export, importing, trained
from ops.foreign import resnets as foreign
from ops.foreign.files import Foreign
from tests.benchmarks.resnet import networks
from tests.benchmarks.resnet.use.test_imports import translated
from tests.benchmarks.resnet.variants.test_variants import image, variables_of

ARCHITECTURE = "resnetv2_50x1_bit"
# timm's resnetv2_50x1_bit.goog_in21k_ft_in1k
PIXELS = {"input_size": [3, 448, 448], "interpolation": "bilinear", "crop_pct": 1.0}
PIXELS |= {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "crop_mode": "center"}
KEYS = {"resnet_version": "2", "normalization": "group", "max_pool": "zeros", "resnet_depth": 50}


def source_of(arrays, **beside):
    return Foreign("bit.safetensors", "safetensors", "0" * 64, arrays, beside, ())


@pytest.fixture(scope="module")
def narrow():
    """(params of a BiT of 32 filters and 5 classes, its arrays by timm's names)."""
    params = variables_of(networks.make(num_filters=32, classes=5, **KEYS))["params"]
    return params, foreign.names(params, {})


def test_a_file_is_recognised_by_its_missing_statistics(narrow):
    params, arrays = narrow
    names = {"stem.conv.weight", "norm.bias", "stages.3.blocks.2.norm3.weight", "head.fc.bias"}
    assert names | {"stages.0.blocks.0.downsample.conv.weight"} <= arrays.keys()
    assert arrays["head.fc.weight"].shape == (5, 1024, 1, 1) and len(arrays) == 153
    values, remarks = imports.read_settings(source_of(arrays))
    assert values == KEYS | {
        **{"num_filters": 32, "deep_stem": False, "squeeze_excite": 0.0, "image_size": 224},
        **{"stage1_projection": False, "space_to_depth": False, "num_label_classes": 5},
        "input_spec": "big_vision",
    }
    assert [key for _, key in remarks] == ["input_spec"]
    _, variables = translated(source_of(arrays))
    assert list(variables) == ["params"]
    assert "version 2 with GroupNorm, 5 classes" in imports.describe(source_of(arrays), values)[1]
    np.testing.assert_equal(variables["params"], params)


def test_the_pixels_are_those_of_timm(narrow):
    config = {"architecture": ARCHITECTURE, "pretrained_cfg": PIXELS}
    values, remarks = imports.read_settings(source_of(narrow[1], **{"config.json": config}))
    spec = json.loads(values["input_spec"])
    assert (values["image_size"], spec["resize"], spec["kernel"]) == (448, 448, "bilinear")
    assert spec["mean"] == spec["std"] == [127.5] * 3 and not remarks


@pytest.mark.parametrize("architecture", ["resnetv2_50d_gn", "resnetv2_50x1_bitx", "resnet50_gn"])
def test_other_models_with_group_normalization_are_refused(architecture, narrow):
    source = source_of(narrow[1], **{"config.json": {"architecture": architecture}})
    with pytest.raises(DataError, match=f"architecture '{architecture}' is not supported"):
        imports.read_settings(source)


@pytest.mark.parity
def test_logits_and_pixels_are_those_of_timm(tmp_path):
    """There and back: timm's folder, an import, an export, and timm again."""
    timm, torch = pytest.importorskip("timm"), pytest.importorskip("torch")
    tag = f"{ARCHITECTURE}.goog_in21k_ft_in1k"
    network = timm.create_model(tag, pretrained=False, num_classes=7).eval()
    draw = torch.Generator().manual_seed(0)
    for values in network.parameters():
        scale = values.std() if values.ndim > 1 else 0.2
        values.data += scale * torch.randn(values.shape, generator=draw)
    timm.models.save_for_hf(network, tmp_path / "timm", safe_serialization=True)

    def logits(network):
        with torch.no_grad():
            return network(torch.from_numpy(image().transpose(0, 3, 1, 2).copy())).numpy()

    expected = logits(network)
    config: Any = resnet50.get_config()
    config.update({"init_from": str(tmp_path / "timm"), "precision": "float32"})
    model = trained.load_foreign(config.init_from, config, "--model")
    assert model is not None and model.config.num_label_classes == 7
    answers: Any = model.benchmark
    variables = {"params": model.params, **model.model_state}
    computed = answers.model.apply(variables, image(), train=False)
    # timm adds 1e-8 to the variance of weights, BiT 1e-10: 1e-5 of the largest logit.
    np.testing.assert_allclose(computed, expected, rtol=0, atol=3e-5 * np.abs(expected).max())
    data, spec = timm.data.resolve_model_data_config(network), answers.input_spec
    assert data["input_size"] == (3, spec.size, spec.size) == (3, 448, 448)
    assert spec.resize * data["crop_pct"] == spec.size and spec.kernel == data["interpolation"]
    assert spec.mean == spec.std == tuple(255 * x for x in data["mean"]) == (127.5,) * 3

    importing.settle(config, "", "import", ())
    importing.run(importing.runs.read(config.lock(), str(tmp_path / "run")))
    export.run(str(tmp_path / "run"), "latest", "hf", str(tmp_path / "again"))
    again = timm.create_model(f"local-dir:{tmp_path}/again", pretrained=True).eval()
    assert json.dumps(timm.data.resolve_model_data_config(again)) == json.dumps(data)
    np.testing.assert_array_equal(logits(again), expected)


def names_in_the_table():
    """timm's names in docs/models.md, whose braces stand for several."""
    page = pathlib.Path(__file__).parents[4] / "docs" / "models.md"
    for pattern in re.findall(
        r"`((?:se)?resnet[^` ]*_in\w*?|resnet\S*_bit\.\S+?)`", page.read_text()
    ):
        parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
        yield from map("".join, itertools.product(*parts))


@pytest.mark.parity
def test_every_name_of_the_page_is_timms_and_fits():
    timm, torch = pytest.importorskip("timm"), pytest.importorskip("torch")
    names = set(names_in_the_table())
    assert len(names) > 60 and names <= set(timm.list_pretrained()), names
    for architecture in {name.partition(".")[0] for name in names}:
        with torch.device("meta"):
            state = timm.create_model(architecture, num_classes=7).state_dict()
        arrays = {k: np.broadcast_to(np.float32(0), v.shape) for k, v in state.items()}
        config = {"architecture": architecture, "pretrained_cfg": PIXELS}
        values, _ = imports.read_settings(source_of(arrays, **{"config.json": config}))
        depth = re.search(r"resnet(?:v2_|rs)?(\d+)", architecture)
        assert depth and values["resnet_depth"] == int(depth[1]), architecture
