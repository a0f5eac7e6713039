"""Foreign ResNets against the logits that their own libraries computed.

`data/foreign_models.json` has, for each model, the names and shapes of its arrays, and the logits
for `image` with the arrays that `seeded` draws: by torchvision 0.28, timm 1.0.31 and transformers
5.23 with torch 2.13, in float32. timm's models also by the names of docs/resnet.md.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.resnet.use import weights
from common.errors import DataError
from common.foreign import resnets as foreign
from common.foreign.files import Foreign
from common.images import input_spec
from tests.benchmarks.resnet import networks
from tests.benchmarks.resnet.test_variants import image
from tests.helpers import stable_weights

STORED = json.loads(
    (pathlib.Path(__file__).parents[3] / "data" / "foreign_models.json").read_text()
)
VALUES = {
    "torchvision resnet18": {"resnet_depth": 18},
    "timm D and SE": {"resnet_depth": 18, "deep_stem": True, "squeeze_excite": 1 / 16},
    "timm RS": {
        **{"resnet_depth": 18, "deep_stem": True, "squeeze_excite": 1 / 4, "max_pool": "conv"}
    },
    "timm resnetv2_18": {"resnet_depth": 18, "resnet_version": "2"},
    "Hugging Face": {"resnet_depth": 50, "num_filters": 8},
    "Hugging Face v1": {"resnet_depth": 50, "num_filters": 8, "resnet_version": "1"},
}
PLAIN = {
    **{"num_filters": 64, "resnet_version": "1.5", "deep_stem": False, "squeeze_excite": 0.0},
    **{"max_pool": "torch", "num_label_classes": 7, "stage1_projection": False},
}
HF_CONFIG = {"model_type": "resnet", "hidden_act": "relu", "downsample_in_first_stage": False}


def seeded(name, shape):
    """float32: an array that follows from its name in another library."""
    if len(shape) > 1:
        return stable_weights.weights(name, "kernel", shape, np.prod(shape[1:]))
    kinds = {"running_var": "var", "weight": "scale"}
    return stable_weights.weights(name, kinds.get(name.rpartition(".")[2], ""), shape)


@functools.cache
def arrays_of(name):
    shapes = STORED[name]["arrays"].items()
    return {k: seeded(k, tuple(shape)) for k, shape in shapes if not k.endswith("batches_tracked")}


def source_of(name, arrays=None, **beside):
    if name == "Hugging Face v1":
        beside = {"config.json": {**HF_CONFIG, "downsample_in_bottleneck": True}}
    arrays = arrays_of(name) if arrays is None else arrays
    return Foreign(f"{name}.safetensors", "safetensors", "0" * 64, arrays, beside)


def model_of(values, **kwargs):
    known = (*weights.ARCHITECTURE, "max_pool", "space_to_depth")
    keys = {key: values[key] for key in known if key in values}
    return networks.make_network(classes=values.get("num_label_classes", 5), **keys, **kwargs)


def translated(source, **kwargs):
    """(model, variables) of a file."""
    values, _ = weights.read_settings(source)
    model = model_of({**values, **kwargs})
    shapes = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros((1, 64, 64, 3)), train=False)
    )
    state = {name: tree for name, tree in shapes.items() if name != "params"}
    params, state = weights.translate(source, shapes["params"], state)
    return model, {"params": params, **state}


@pytest.mark.parametrize("name", VALUES)
def test_settings_and_logits(name):
    source = source_of(name)
    values, remarks = weights.read_settings(source)
    assert values == PLAIN | VALUES[name] | {
        **{"image_size": 224, "input_spec": "torchvision_v1"},
        **({"space_to_depth": False} if values["deep_stem"] else {}),
    }
    assert [key for _, key in remarks] == ["input_spec"]
    model, variables = translated(source)
    logits = np.asarray(jax.jit(model.apply, static_argnums=2)(variables, image(), False))[0]
    expected = np.array(STORED[name]["logits"])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", VALUES)
def test_and_back_bit_for_bit(name):
    source = source_of(name)
    _, variables = translated(source)
    params, state = variables["params"], {"batch_stats": variables["batch_stats"]}
    family = foreign.HUGGING_FACE if name.startswith("Hugging") else None
    back = foreign.names(params, state, family)
    assert sorted(back) == sorted(source.arrays)
    for key, array in source.arrays.items():
        np.testing.assert_array_equal(back[key], array, strict=True)


def test_a_space_to_depth_stem_takes_the_plain_kernel():
    source = source_of("torchvision resnet18")
    _, variables = translated(source, space_to_depth=True)
    params, state = variables["params"], {"batch_stats": variables["batch_stats"]}
    assert params["conv_stem"]["kernel"].shape == (4, 4, 12, 64)
    stem = foreign.names(params, state)["conv1.weight"]
    np.testing.assert_array_equal(stem, source.arrays["conv1.weight"])


def test_a_model_without_classifier():
    arrays = {k: v for k, v in arrays_of("torchvision resnet18").items() if k[:3] != "fc."}
    source = source_of("torchvision resnet18", arrays)
    assert "num_label_classes" not in weights.read_settings(source)[0]
    _, variables = translated(source)
    assert "head" not in variables["params"] and "conv_stem" in variables["params"]
    arrays = {
        k.removeprefix("resnet."): v for k, v in arrays_of("Hugging Face").items() if k[0] == "r"
    }
    _, variables = translated(source_of("Hugging Face", arrays))
    assert "head" not in variables["params"] and "conv_stem" in variables["params"]


def test_another_number_of_classes_is_kept():
    _, variables = translated(source_of("torchvision resnet18"), num_label_classes=3)
    assert variables["params"]["head"]["kernel"].shape == (512, 7)


W = np.zeros((2, 3), np.float32)
CHANGES = [  # (arrays put in, arrays taken out, words of the refusal)
    ({}, ["layer2.0.bn1.running_var"], "it lacks layer2.0.bn1.running_var$"),
    ({}, ["conv1.weight"], "holds no ResNet .*: its arrays are bn1.weight, "),
    ({}, ["fc.bias"], "it lacks fc.bias; it has other shapes: fc.weight"),
    ({"maxpool.0.weight": W, "aux.x": W}, [], "unknown arrays: maxpool.0.weight, aux.x$"),
    ({"fc.weight": W}, [], r"other shapes: fc.weight \[2, 3\] instead of \[7, 512\]"),
    ({"layer4.2.conv1.weight": W}, [], r"stages of \(2, 2, 2, 3\) basic blocks: no ResNet"),
    ({"conv1.weight": W[0]}, [], "first layer is not a convolution"),
]


@pytest.mark.parametrize(("added", "removed", "words"), CHANGES, ids=lambda x: str(x)[:30])
def test_other_models_are_refused_by_name(added, removed, words):
    arrays = {**arrays_of("torchvision resnet18"), **added}
    arrays = {k: v for k, v in arrays.items() if k not in removed}
    with pytest.raises(DataError, match=words) as refused:
        translated(source_of("torchvision resnet18", arrays))
    message = str(refused.value)
    assert message.startswith("torchvision resnet18.safetensors") and "\n" not in message
    assert len(message) < 600


TIMM = {"input_size": [3, 224, 224], "interpolation": "bicubic", "crop_pct": 0.95}
TIMM |= {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "crop_mode": "center"}
CONVNEXT = {"size": {"shortest_edge": 224}, "crop_pct": 0.875, "resample": 3}
CONVNEXT |= {"image_mean": TIMM["mean"], "image_std": TIMM["std"]}
SPEC = input_spec.InputSpec(64, 70, "bilinear", True, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0), "BGR")
BICUBIC_256 = {**input_spec.NAMED["torchvision_v1"].as_dict(), "kernel": "bicubic"}


def without(values, *keys):
    return {key: value for key, value in values.items() if key not in keys}


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ({"config.json": {"pretrained_cfg": TIMM}}, "timm_a1"),
        ({"config.json": {"pretrained_cfg": {**TIMM, "input_size": [3, 160, 160]}}}, "timm_a3"),
        ({"preprocessor_config.json": CONVNEXT}, BICUBIC_256),
        ({"preprocessor_config.json": without(CONVNEXT, "crop_pct", "resample")}, BICUBIC_256),
        ({"preprocessor_config.json": {**CONVNEXT, "size": 224}}, BICUBIC_256),  # microsoft's
        (
            {"preprocessor_config.json": {**CONVNEXT, "size": {"shortest_edge": 383}}},
            {**BICUBIC_256, "size": 383, "resize": 437},
        ),
        (
            {"preprocessor_config.json": {**CONVNEXT, "crop_size": {"height": 192, "width": 192}}},
            {**BICUBIC_256, "size": 192, "resize": 224},
        ),
        (
            {"config.json": {"pretrained_cfg": {**TIMM, "mean": [0.1234567891, 0, 1]}}},
            {**BICUBIC_256, "resize": 235, "mean": [31.481481, 0.0, 255.0]},
        ),
        ({"input_spec.json": SPEC.as_dict(), "preprocessor_config.json": CONVNEXT}, SPEC.as_dict()),
    ],
)
def test_pixels_are_those_of_the_files_beside(beside, expected):
    values, remarks = weights.read_settings(source_of("torchvision resnet18", **beside))
    text = values["input_spec"]
    assert (text if isinstance(expected, str) else json.loads(text)) == expected
    assert values["image_size"] == input_spec.parse_spec(text).size and not remarks


def test_the_second_weights_of_torchvision_are_known_by_their_digest():
    arrays = arrays_of("torchvision resnet18")
    source = Foreign("x.pth", "PyTorch", "11ad3fa6" + "0" * 56, arrays)
    assert weights.read_settings(source)[0]["input_spec"] == "torchvision_v2"


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        *(
            ({"config.json": {"architecture": name}}, f"architecture '{name}' is not supported")
            for name in ("resnetblur50", "resnetv2_50x1_bit", "resnet50_gn")
        ),
        ({"config.json": {**HF_CONFIG, "hidden_act": "gelu"}}, "hidden_act='gelu' in config.json"),
        ({"config.json": {"pretrained_cfg": {**TIMM, "crop_mode": "squash"}}}, "mode='squash'"),
        ({"preprocessor_config.json": {"size": 3}}, "remove these files and give"),
        ({"preprocessor_config.json": {**CONVNEXT, "size": {"shortest_edge": 384}}}, "squeezed"),
        ({"input_spec.json": {"size": 3}}, "input spec is a JSON object with the keys"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_what_is_not_supported_is_told(beside, words):
    with pytest.raises(DataError, match=words) as refused:
        weights.read_settings(source_of("torchvision resnet18", **beside))
    assert "torchvision resnet18.safetensors" in str(refused.value)


@pytest.mark.parametrize("labels", [tuple("abcdefg"), ("too", "few")])
def test_what_is_said_of_a_file(labels):
    source = dataclasses.replace(
        source_of("torchvision resnet18"), sha256="0123456789abcdef" * 4, labels=labels
    )
    values, _ = weights.read_settings(source)
    metadata, line = weights.describe(source, values)
    assert metadata == {
        "class_names": list(labels) if len(labels) == 7 else [],
        "input_spec": input_spec.NAMED["torchvision_v1"].as_dict(),
        "imported": {"path": source.path, "format": "safetensors", "sha256": source.sha256},
    }
    # torchvision's 11,689,512 parameters have 1,000 classes.
    assert f"102 arrays, {11_689_512 - 993 * 513:,} parameters, ResNet-18 version 1.5" in line
    named = "with their names" if len(labels) == 7 else "without names"
    assert f"7 classes {named}" in line and line.endswith(" 0123456789ab")


def names_in_the_table():
    """timm's names in docs/resnet.md, whose braces stand for several."""
    page = pathlib.Path(__file__).parents[4] / "docs" / "resnet.md"
    for pattern in re.findall(r"`((?:se)?resnet[^` ]*_in\w*?)`", page.read_text()):
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
        beside = {"config.json": {"architecture": architecture}}
        values, _ = weights.read_settings(source_of(architecture, arrays, **beside))
        depth = re.search(r"resnet(?:v2_|rs)?(\d+)", architecture)
        assert depth and values["resnet_depth"] == int(depth[1]), architecture
