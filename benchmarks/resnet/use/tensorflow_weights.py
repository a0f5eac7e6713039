"""Recognises ResNets in TensorFlow's checkpoints, whose layers are numbered as they were made.

The TPU tutorial, tensorflow/models and Google's MLPerf entries make their layers in the same order;
the projection comes first in its block. A name such as "conv2d_7" says no more, so the architecture
follows from the shapes in this order.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

import models
from common.errors import DataError, some
from common.foreign.resnets import Family

_NAME = re.compile(r"((?:.+/)?)((?:conv2d|batch_normalization|dense)(?:_(\d+))?)/\w+")
_STEMS = {3: (7, 7, 3), 12: (4, 4, 12)}  # by channels of the input; 12 are blocks of 2x2 pixels

Shape = tuple[int, ...]
Layers = list[tuple[str, Shape]]  # (module or layer, shape of its kernel or scale) in order


class Match(NamedTuple):
    """The ResNet that a checkpoint holds.

    Attributes:
      arrays: its arrays, by their names in the checkpoint.
      family: their names.
      depth: a key of `models.DEPTHS`.
      version: "2", or "1.5"; version "1" has the same arrays as the latter.
      stage1_projection: whether the first block of a network of basic blocks has a projection.
    """

    arrays: dict[str, np.ndarray]
    family: Family
    depth: int
    version: str
    stage1_projection: bool


def match(path: str, arrays: Mapping[str, np.ndarray]) -> Match:
    """Recognises the ResNet.

    Args:
      path: of the checkpoint, for messages.
      arrays: of its layers, as `common.foreign.tf_checkpoints.read` returns them.

    Raises:
      DataError: there is none, or several; the message names the first array that does not fit.
    """
    scope = _scope(path, arrays)
    arrays = {name: x for name, x in arrays.items() if _parts(name)[0] == scope}
    convs, norms = _ordered(arrays, "conv2d", "kernel"), _ordered(arrays, "batch_norm", "gamma")
    best, most = None, -1
    for depth, version, projects in itertools.product(models.DEPTHS, ("1.5", "2"), (False, True)):
        known = expected(depth, version, projects, convs[0][1])
        agreeing = sum(map(_agreeing, known, (convs, norms)))
        if agreeing > most:
            best, most = (depth, version, projects, known), agreeing
    assert best is not None
    depth, version, projects, known = best
    network = f"a ResNet-{depth} of version {version}"
    for theirs, ours, leaf in zip((convs, norms), known, ("kernel", "gamma"), strict=True):
        if fault := _fault(theirs, ours, leaf, network):
            raise DataError(f"{path} holds no ResNet that is known here: {fault}")
    layers = {
        module: layer
        for theirs, ours in zip((convs, norms), known, strict=True)
        for (layer, _), (module, _) in zip(theirs, ours, strict=True)
    }
    layers["head"] = f"{scope}{next((n for n in _layers(arrays, 'dense')), 'dense')}"
    family = Family(layers, "", (1, 1), {}, is_torch=False)
    return Match(arrays, family, depth, version, projects)


def expected(
    depth: int, version: str, stage1_projection: bool, stem: Shape
) -> tuple[Layers, Layers]:
    """The convolutions and the BatchNorms of a ResNet in the order in which TensorFlow makes them.

    Args:
      depth, version, stage1_projection: as in `Match`.
      stem: the shape of the first kernel; its last number is that of the filters.
    """
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


def _parts(name: str) -> tuple[str, str, int]:
    """The scope of an array, its layer in it, and the number in the layer's name."""
    parts = _NAME.fullmatch(name)
    assert parts is not None
    return parts[1], parts[2], int(parts[3] or 0)


def _scope(path: str, arrays: Mapping[str, np.ndarray]) -> str:
    """What comes before the layers' names in the model of images: "", "resnet34/" and so on."""
    firsts: dict[str, list[tuple[int, str]]] = collections.defaultdict(list)
    for name in arrays:
        scope, layer, number = _parts(name)
        if layer.startswith("conv2d"):
            firsts[scope].append((number, name))
    stems = {scope: arrays[min(names)[1]] for scope, names in firsts.items()}
    scopes = [s for s, stem in stems.items() if stem.ndim == 4 and stem.shape[2] in _STEMS]
    if len(scopes) == 1:
        return scopes[0]
    if scopes:
        raise DataError(f"{path} has models of images in the scopes {some(map(repr, scopes))}")
    shown = some(f"{name} {list(array.shape)}" for name, array in arrays.items())
    raise DataError(f"{path} holds no ResNet: no conv2d takes images, its arrays are {shown}")


def _layers(arrays: Mapping[str, np.ndarray], kind: str) -> list[str]:
    """The layers of a kind in the order in which they were made, without their scope."""
    layers = {(number, layer) for _, layer, number in map(_parts, arrays) if layer.startswith(kind)}
    return [layer for _, layer in sorted(layers)]


def _ordered(arrays: Mapping[str, np.ndarray], kind: str, leaf: str) -> Layers:
    """The layers of a kind, with their scope and the shapes of their arrays `leaf`."""
    scope = _parts(next(iter(arrays)))[0]
    names = [f"{scope}{layer}" for layer in _layers(arrays, kind)]
    shapes = {name: array.shape for name, array in arrays.items()}
    return [(name, shapes.get(f"{name}/{leaf}", ())) for name in names]


def _agreeing(ours: Layers, theirs: Layers) -> int:
    """How many layers agree before the first that differs; one more if all do, and no more come."""
    count = 0
    for (_, mine), (_, other) in zip(ours, theirs, strict=False):
        if mine != other:
            return count
        count += 1
    return count + (len(ours) == len(theirs))


def _fault(theirs: Layers, ours: Layers, leaf: str, network: str) -> str:
    """How the first layer that does not fit differs; "" if all fit."""
    for (layer, shape), (module, wanted) in zip(theirs, ours, strict=False):
        if shape != wanted:
            return (
                f"{layer}/{leaf} has the shape {list(shape)}, where {network} has {module} "
                f"{list(wanted)}"
            )
    if len(theirs) < len(ours):
        module, wanted = ours[len(theirs)]
        return f"after {theirs[-1][0]} it lacks {module} {list(wanted)} of {network}"
    if len(theirs) > len(ours):
        return f"{theirs[len(ours)][0]} is one more than {network} has"
    return ""
