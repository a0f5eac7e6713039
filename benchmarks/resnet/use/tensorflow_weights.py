"""Recognises ResNets in TensorFlow's checkpoints, whose layers are numbered as they were made.

The TPU tutorial, tensorflow/models and Google's MLPerf entries make their layers in the same order;
the projection comes first in its block. A name such as "conv2d_7" says no more, so the architecture
follows from the shapes in this order.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

import models
from common.errors import DataError, some
from common.foreign.resnets import Family

_NAME = re.compile(
    r"(?P<layer>(?P<scope>(.+/)?)(?P<kind>conv2d|batch_normalization|dense)(_(?P<number>\d+))?)"
    r"/(?P<leaf>\w+)"
)
_STEMS = {3: (7, 7, 3), 12: (4, 4, 12)}  # by channels of the input; 12 are blocks of 2x2 pixels

Shape = tuple[int, ...]
Layers = list[tuple[str, Shape]]  # (module or layer, shape of its kernel or scale) in order


def match(
    path: str, arrays: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], Family, dict[str, Any]]:
    """Recognises the ResNet among the arrays of a checkpoint.

    Returns its arrays by their names in the checkpoint, the family of these names, and the config's
    keys that they decide; version "1" has the same arrays as "1.5". DataError names the first
    array that does not fit.
    """
    scope = _scope(path, arrays)
    arrays = {name: x for name, x in arrays.items() if _parts(name)["scope"] == scope}
    convs, norms = (_ordered(arrays, kind) for kind in ("conv2d", "batch_normalization"))
    stem = convs[0][1]
    candidates = itertools.product(models.DEPTHS, ("1.5", "2"), (False, True))
    layouts = {candidate: expected(*candidate, stem) for candidate in candidates}
    best = max(layouts, key=lambda c: sum(map(_first_difference, (convs, norms), layouts[c])))
    depth, version, projects = best
    layers = {}
    for theirs, named, leaf in zip((convs, norms), layouts[best], ("kernel", "gamma"), strict=True):
        if mismatch := _mismatch(theirs, named, leaf, f"a ResNet-{depth} of version {version}"):
            raise DataError(f"{path} holds no ResNet that is known here: {mismatch}")
        pairs = zip(theirs, named, strict=True)
        layers |= {module: layer for (layer, _), (module, _) in pairs}
    layers["head"] = next((layer for layer, _ in _ordered(arrays, "dense")), f"{scope}dense")
    values: dict[str, Any] = {
        "resnet_depth": depth,
        "num_filters": stem[3],
        "resnet_version": version,
        "deep_stem": False,
        "squeeze_excite": 0.0,
        "stage1_projection": projects,
        "max_pool": "same",
    }
    if stem[2] == 12:
        values["space_to_depth"] = True
    return arrays, Family(layers, is_torch=False), values


def expected(
    depth: int, version: str, stage1_projection: bool, stem: Shape
) -> tuple[Layers, Layers]:
    """The convolutions, the first of shape `stem`, and the BatchNorms, in TensorFlow's order."""
    sizes, block = models.DEPTHS[depth]
    is_wide, is_second, filters = block is models.BottleneckBlock, version == "2", stem[-1]
    convs = [("conv_stem", (*_STEMS.get(stem[-2], _STEMS[3]), filters))]
    norms = [] if is_second else [("bn_stem", (filters,))]
    channels = filters
    for stage, size in enumerate(sizes):
        width = filters * 2**stage
        kernels = [(1, width), (3, width), (1, 4 * width)] if is_wide else [(3, width), (3, width)]
        for i in range(size):
            name, out = f"stage{stage + 1}_block{i + 1}", kernels[-1][1]
            if i == 0 and (out != channels or stage1_projection):
                convs.append((f"{name}/conv_proj", (1, 1, channels, out)))
                norms += [] if is_second else [(f"{name}/bn_proj", (out,))]
            for k, (side, features) in enumerate(kernels, 1):
                convs.append((f"{name}/conv{k}", (side, side, channels, features)))
                norms.append((f"{name}/bn{k}", (channels if is_second else features,)))
                channels = features
    norms += [("bn_final", (channels,))] if is_second else []
    return convs, norms


def _parts(name: str) -> re.Match[str]:
    parts = _NAME.fullmatch(name)
    assert parts is not None
    return parts


def _scope(path: str, arrays: Mapping[str, np.ndarray]) -> str:
    """What comes before the layers' names in the model of images: "", "resnet34/" and so on."""
    stems: dict[str, tuple[int, np.ndarray]] = {}  # by scope, the convolution of the first number
    for name, array in arrays.items():
        parts = _parts(name)
        scope, number = parts["scope"], int(parts["number"] or 0)
        if parts["kind"] == "conv2d" and (scope not in stems or number < stems[scope][0]):
            stems[scope] = number, array
    scopes = [s for s, (_, x) in stems.items() if x.ndim == 4 and x.shape[2] in _STEMS]
    if len(scopes) == 1:
        return scopes[0]
    if scopes:
        raise DataError(f"{path} has models of images in the scopes {some(map(repr, scopes))}")
    shown = some(f"{name} {list(array.shape)}" for name, array in arrays.items())
    raise DataError(f"{path} holds no ResNet: no conv2d takes images, its arrays are {shown}")


def _ordered(arrays: Mapping[str, np.ndarray], kind: str) -> Layers:
    """The layers of a kind with their scope, in the order of creation."""
    layers: dict[tuple[int, str], Shape] = {}
    for name, array in arrays.items():
        parts = _parts(name)
        if parts["kind"] == kind:
            layer = int(parts["number"] or 0), parts["layer"]
            is_main = parts["leaf"] in ("kernel", "gamma")
            layers[layer] = array.shape if is_main else layers.get(layer, ())
    return [(layer, shape) for (_, layer), shape in sorted(layers.items())]


def _first_difference(theirs: Layers, named: Layers) -> int:
    """The index of the first layer whose shape differs; above all indices if none does."""
    pairs = itertools.zip_longest(theirs, named, fillvalue=("", None))
    return next((i for i, ((_, a), (_, b)) in enumerate(pairs) if a != b), len(named) + 1)


def _mismatch(theirs: Layers, named: Layers, leaf: str, network: str) -> str:
    """How the first layer that does not fit differs; "" if all fit."""
    first = _first_difference(theirs, named)
    if first > len(named):
        return ""
    if first == len(named):
        return f"{theirs[first][0]} is one more than {network} has"
    module, wanted = named[first]
    if first == len(theirs):
        after = f"after {theirs[-1][0]} " if theirs else ""
        return f"{after}it lacks {module} {list(wanted)} of {network}"
    layer, shape = theirs[first]
    return (
        f"{layer}/{leaf} has the shape {list(shape)}, where {network} has {module} {list(wanted)}"
    )
