"""The plain readers and ours make the same kinds of batches; a ratio near 1 is no verdict."""

import itertools
import json

import numpy as np
import pytest

from scripts.bench import plain_readers, readers


def row(least, largest):
    return {
        **{"reader": "ssd", "unit": "images", "ours": 1500.0, "plain": 1000.0},
        **{"ratio": 1.5, "least": least, "largest": largest},
    }


def test_table():
    *_, line = readers.table([row(1.2, 1.8)]).splitlines()
    assert line == "| ssd | 1,500 images | 1,000 | 1.50 | 1.20 to 1.80 |"
    for least, largest in ((0.9, 1.8), (1.0, 1.8), (0.2, 1.0)):
        *_, line = readers.table([row(least, largest)]).splitlines()
        assert f"| no verdict | {least:.2f} to {largest:.2f} |" in line


@pytest.mark.long
@pytest.mark.parametrize("name", ["ssd", "mask_rcnn"])
def test_images(name, tmp_path, monkeypatch):
    monkeypatch.setitem(readers._BATCH, name, 2)
    data = readers._data(name, str(tmp_path), 16)
    (own,) = itertools.islice(readers.ours(name, data), 1)
    (plain,) = itertools.islice(readers._plain(name)(data, 2), 1)
    side = {"ssd": (300, 300), "mask_rcnn": (832, 1344)}[name]
    assert plain["image"].shape == (2, *side, 3) and plain["image"].dtype == np.float32
    assert 0.3 < plain["image"].std() < 2.0
    used = plain["classes"] > 0
    assert used.any() and plain["classes"].max() <= 80 and (own["classes"] > 0).any()
    most = 1.0 if name == "ssd" else 1333.0
    boxes = plain["boxes"][used]
    assert (boxes[:, :2] <= boxes[:, 2:]).all() and boxes.min() >= 0 and boxes.max() <= most
    if name == "mask_rcnn":  # an ellipse fills 78 % of its box
        assert 0.7 < plain["masks"][used].mean() < 0.8
        assert plain["masks"].shape == (2, 100, 112, 112)


@pytest.mark.long
def test_sentences(tmp_path, monkeypatch):
    """Both readers of a translator draw from the same tokens."""
    for name in ("transformer", "gnmt"):
        monkeypatch.setitem(readers._BATCH, name, 8)
        data = readers._data(name, str(tmp_path), 0)
        own, plain = next(readers.ours(name, data)), next(readers._plain(name)(data, 8))
        for side in ("inputs", "targets"):
            assert plain[side].shape[0] == own[side].shape[0] == 8
            assert plain[side].shape[1] == (256 if name == "transformer" else plain[side].shape[1])
        if name == "transformer":
            assert plain.keys() <= own.keys()
            assert plain["inputs_segmentation"].max() > 1
        else:
            assert plain["inputs"].shape[1] in plain_readers._LENGTHS


@pytest.mark.long
def test_the_command(capsys, monkeypatch):
    monkeypatch.setitem(readers._TURN, "ssd", 1)
    assert readers.main(["ssd", "--images=32", "--rounds=2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ours"] > 0 and result["plain"] > 0
    assert result["least"] <= result["ratio"] <= result["largest"]
