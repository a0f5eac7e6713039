"""timm's models: the names of docs/models.md."""

import itertools
import pathlib
import re

import numpy as np
import pytest

from benchmarks.resnet.use import imports
from errors import DataError
from ops.foreign.files import Foreign


def source_of(arrays, architecture):
    beside = {"config.json": {"architecture": architecture}}
    return Foreign("model.safetensors", "safetensors", "0" * 64, arrays, beside, ())


@pytest.mark.parametrize("architecture", ["resnetv2_50d_gn", "resnetv2_50x1_bit", "resnet50_gn"])
def test_models_with_group_normalization_are_refused(architecture):
    arrays = {"stem.conv.weight": np.zeros((64, 3, 7, 7), np.float32)}
    with pytest.raises(DataError, match=f"architecture '{architecture}' is not supported"):
        imports.read_settings(source_of(arrays, architecture))


def names_in_the_table():
    """timm's names in docs/models.md, whose braces stand for several."""
    page = pathlib.Path(__file__).parents[4] / "docs" / "models.md"
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
        values, _ = imports.read_settings(source_of(arrays, architecture))
        depth = re.search(r"resnet(?:v2_|rs)?(\d+)", architecture)
        assert depth and values["resnet_depth"] == int(depth[1]), architecture
