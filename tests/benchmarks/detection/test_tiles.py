"""Tiles by hand, joined detections against plain loops, and both in an evaluation."""

import numpy as np
import pytest

from benchmarks.detection import coco, tiles
from benchmarks.detection.mask_rcnn import MaskRcnn
from common.errors import ConfigError, DataError
from common.tensorflow import tensorflow
from tests.benchmarks.detection.test_detector import make
from tests.conftest import opened


@pytest.mark.parametrize(
    ("height", "width", "side", "rows", "columns"),
    [
        # SAHI: the overlap is int(0.2 * 512) = 102, a step 410; the last one ends at the border
        (600, 1000, 512, [0, 88], [0, 410, 488]),
        (1332, 922, 512, [0, 410, 820], [0, 410]),  # both end at the border without a shift
        (100, 1000, 512, [0], [0, 410, 488]),  # lower than a tile
        (513, 513, 512, [0, 1], [0, 1]),
        (70, 40, 33, [0, 27, 37], [0, 7]),
    ],
)
def test_tiles_are_those_of_sahi(height, width, side, rows, columns):
    whole, *found = tiles.cut(height, width, side).tolist()
    sides = [min(side, height), min(side, width)]
    assert whole == [0, 0, height, width]
    assert found == [[y, x, *sides] for y in rows for x in columns]


def test_a_picture_that_is_not_larger_than_a_tile_is_its_only_part():
    for side in (0, 64, 100):
        assert tiles.cut(64, 48, side).tolist() == [[0, 0, 64, 48]]


def area(box):
    return (box[2] - box[0]) * (box[3] - box[1])


def share(a, b):
    """The part of the smaller of two boxes that the other one covers."""
    sides = [max(0.0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1)]
    return sides[0] * sides[1] / min(area(a), area(b))


def cut_sides(box, window):
    """Which of y0, x0, y1, x1 are within 2 pixels, 4 % of a tile, of a border in the picture."""
    sides = {i for i in (0, 1) if window[i] > 0 and box[i] < window[i] + 2}
    for i in (0, 1):
        last = window[i] + window[i + 2]
        if last < (90, 130)[i] and box[i + 2] > last - 2:
            sides.add(i + 2)
    return sides


def continues(other, box):
    """Whether a box is beyond the uncut sides of the other one by at most half of that."""
    own = other["box"]
    beyond = own[0] - box[0], own[1] - box[1], box[2] - own[2], box[3] - own[3]
    sizes = 2 * (own[2] - own[0], own[3] - own[1])
    return all(i in other["cut"] or beyond[i] <= sizes[i] / 2 for i in range(4))


def test_joining_is_that_of_a_plain_loop():
    draw = np.random.default_rng(0)
    windows = tiles.cut(90, 130, 50)
    shape = len(windows), 30
    low = draw.uniform(0, 40, (*shape, 2))
    high = np.minimum(low + draw.uniform(8, 30, low.shape), windows[:, None, 2:])
    rows = {
        "boxes": np.concatenate([low, high], -1).astype("f4"),
        "class": draw.integers(1, 4, shape).astype("i4"),
        "score": (draw.permutation(np.prod(shape)).reshape(shape) / 300 - 0.1).astype("f4"),
        "masks": draw.integers(0, 256, (*shape, 4, 4), np.uint8),
    }
    rows["score"][2, 3] = np.nan
    candidates = []
    for part, (window, *columns) in enumerate(zip(windows, *rows.values(), strict=True)):
        for box, number, score, mask in zip(*columns, strict=True):
            if score > 0:
                box = [float(edge) + float(window[i % 2]) for i, edge in enumerate(box)]
                each = {"box": box, "grown": box, "score": score, "class": number, "mask": mask}
                candidates.append({**each, "part": part, "cut": cut_sides(box, window.tolist())})
    kept = []
    for each in sorted(candidates, key=lambda candidate: -candidate["score"]):
        for other in kept:
            if other["part"] != each["part"] and share(other["box"], each["box"]) >= 0.5:
                if other["class"] == each["class"]:
                    if other["cut"] and continues(other, each["box"]):
                        pairs = [*zip(other["grown"], each["box"], strict=True)]
                        ends = [min(pair) for pair in pairs[:2]], [max(pair) for pair in pairs[2:]]
                        other["grown"] = sum(ends, [])
                    break
                if each["cut"] and area(each["box"]) <= area(other["box"]):
                    break
        else:
            kept.append(each)
    found = tiles.join(rows, windows)
    assert 10 < len(kept) < len(candidates) - 10
    grown = [each["grown"] != each["box"] for each in kept]
    assert 2 <= sum(grown) < len(kept) - 3
    np.testing.assert_array_equal(found["score"], [each["score"] for each in kept])
    np.testing.assert_allclose(found["boxes"], [each["grown"] for each in kept], atol=1e-4)
    np.testing.assert_array_equal(found["class"], [each["class"] for each in kept])
    same = [each["mask"] for each in kept if not each["cut"]]
    np.testing.assert_array_equal(found["masks"][[not each["cut"] for each in kept]], same)


def test_objects_on_a_large_scene_are_found_once_and_complete():
    """Of a detector that finds the visible part of each object, the surer the more it sees."""
    draw, size, side = np.random.default_rng(1), (300, 420), 80  # the overlap is 16 pixels
    corners = np.stack(np.meshgrid(np.arange(3, 280, 25), np.arange(3, 400, 25)), -1).reshape(-1, 2)
    truth = np.concatenate([corners, corners + draw.integers(8, 16, corners.shape)], 1)
    windows = tiles.cut(*size, side)
    origin = windows[:, None, [0, 1, 0, 1]]
    ends = origin + np.concatenate([0 * windows[:, :2], windows[:, 2:]], 1)[:, None]
    seen = np.clip(truth[None], ends[..., [0, 1, 0, 1]], ends[..., [2, 3, 2, 3]])
    area = np.prod(seen[..., 2:] - seen[..., :2], -1)
    shares = area / np.prod(truth[:, 2:] - truth[:, :2], -1)
    small = np.arange(len(windows))[:, None] > 0  # the whole is too coarse to see them
    rows = {
        "boxes": (seen - origin).astype(np.float32),
        "class": np.ones(area.shape, np.int32),
        "score": (small * 0.9 * shares).astype(np.float32),
    }
    assert (shares[1:] < 1).sum() > (shares[1:] == 1).sum() > len(truth)
    found = tiles.join(rows, windows)
    assert sorted(found["boxes"].tolist()) == sorted(truth.tolist())


def test_a_mask_that_a_tile_cuts_gives_way_to_the_complete_one(tiny_masks, tmp_path):
    uses = opened(make(tiny_masks, tmp_path, MaskRcnn), "eval").uses
    windows = tiles.cut(40, 72, 40).tolist()
    assert windows[1:] == [[0, 0, 40, 40], [0, 32, 40, 40]]
    mask = np.full((1, 8, 8), 255, np.uint8)
    mask[..., :4] = 0  # only the right half of the box is the object
    seen = ((0, (0, 0, 0, 0)), (0.6, (4, 34, 20, 40)), (0.9, (4, 2, 20, 18)))
    rows = [
        {
            "score": np.array([score], np.float32),
            "class": np.ones(1, np.int32),
            "boxes": np.array([box], np.float32),
            "masks": mask,
        }
        for score, box in seen
    ]
    (found,) = uses.detections(uses.join(rows, 40, 72, 40), 40, 72)
    assert found.box == (4, 34, 20, 50) and found.score == np.float32(0.9)
    wanted = np.zeros((40, 72), bool)
    wanted[4:20, 42:50] = True
    assert found.inside is not None and found.outline is not None
    np.testing.assert_array_equal(found.inside(), wanted)
    assert coco.outline_mask(found.outline, 40, 72).sum() == 16 * 8
    # Cut by both tiles: columns 24 to 40 in the first one and 32 to 44 in the second one.
    full = np.full((1, 8, 8), 255, np.uint8)
    for each, box in ((rows[1], (4, 24, 20, 40)), (rows[2], (4, 0, 20, 12))):
        each |= {"boxes": np.array([box], np.float32), "masks": full}
    rows[0] |= {"score": np.ones(1, np.float32) / 2, "boxes": np.array([[0, 0, 40, 72]], "f4")}
    (found,) = uses.detections(uses.join(rows, 40, 72, 40), 40, 72)
    assert found.box == (4, 24, 20, 44) and found.inside is not None
    wanted[:] = False
    wanted[4:20, 24:44] = True
    inside = found.inside()
    assert not (inside & ~wanted).any() and inside[6:18, 26:42].all()


def test_an_evaluation_has_every_part_once(tiny_masks, tmp_path):
    """Images of two orientations, whose tiles are wide and upright ones."""
    benchmark = opened(make(tiny_masks, tmp_path, MaskRcnn, eval_tiles=40), "eval")
    truth = benchmark.annotations
    assert {*map(tuple, truth.sizes.tolist())} == {(48, 64), (64, 48)}
    assert benchmark.num_examples("eval") == 23 and benchmark.eval_rows == 23 * 5
    first = None
    for hosts in (1, 3):
        streams = [list(benchmark.eval_batches(12, host, hosts)) for host in range(hosts)]
        assert len({len(stream) for stream in streams}) == 1
        for same in zip(*streams, strict=True):
            assert len({batch["image"].shape for batch in same}) == 1
            assert len(same[0]["mask"]) == 12 // hosts
        batches = [batch for stream in streams for batch in stream]
        real = {
            int(number): {name: batch[name][i] for name in batch}
            for batch in batches
            for i, number in enumerate(batch["image_id"])
            if batch["mask"][i]
        }
        assert sum(batch["mask"].sum() for batch in batches) == len(real) == 115
        assert sorted(real) == list(range(115))
        for number, leaves in real.items():
            whole = number % 5 == 0
            assert leaves["original"].tolist() == truth.sizes[number // 5].tolist() or not whole
            assert whole or leaves["original"].tolist() == [40, 40]
        first = first or real
        for number, leaves in real.items():
            np.testing.assert_array_equal(leaves["image"], first[number]["image"])


def test_rows_of_an_evaluation_are_joined_for_each_image(tiny_masks, tmp_path):
    benchmark = make(tiny_masks, tmp_path, eval_tiles=40)
    truth, count = benchmark.annotations, benchmark.eval_rows
    numbers = np.random.default_rng(2).permutation(count).astype(np.int32)
    windows = benchmark.parts.windows[numbers]
    image = benchmark.parts.counts.cumsum().searchsorted(numbers, side="right")
    # Each part finds a box of its own image, the same one in the picture's pixels.
    box = np.stack([image + 5, image + 8, image + 15, image + 20], 1)
    inside = (box[:, :2] >= windows[:, :2]).all(1)
    inside &= (box[:, 2:] <= windows[:, :2] + windows[:, 2:]).all(1)
    rows = {
        "image_id": numbers,
        "boxes": (box - np.tile(windows[:, :2], 2))[:, None].astype(np.float32),
        "class": np.full((count, 1), 2, np.int32),
        "score": np.where(inside, 0.5, 0)[:, None].astype(np.float32),
        "masks": np.full((count, 1, 4, 4), 255, np.uint8),
    }
    parts = [{name: values[i : i + 50] for name, values in rows.items()} for i in (0, 50, 100)]
    columns = benchmark.scorer.columns(iter(parts))
    assert inside.sum() > len(truth.image_ids) + 5
    np.testing.assert_array_equal(columns["image_id"], truth.image_ids)
    assert columns["bbox"].tolist() == [[i + 8, i + 5, 12, 10] for i in range(23)]


def test_what_cannot_be_used_is_said(tiny_masks, tmp_path, caplog):
    for wrong in (7, -1, "many", "40", 10**9):
        with pytest.raises(ConfigError, match="config.eval_tiles="):
            make(tiny_masks, tmp_path, eval_tiles=wrong)
    caplog.set_level("INFO", "tpu_suite")
    assert make(tiny_masks, tmp_path, eval_tiles=0).parts is None
    assert make(tiny_masks, tmp_path, eval_tiles=64).eval_rows == 23
    assert "none is cut" in caplog.text
    assert make(tiny_masks, tmp_path, eval_tiles="auto", image_short=32).parts.side == 32
    benchmark = opened(make(tiny_masks, tmp_path, MaskRcnn, eval_tiles=40), "eval")
    image = tensorflow().io.encode_jpeg(np.zeros((9, 8, 3), np.uint8)).numpy()
    for encoded in (image, image[:-80], b"text"):
        with pytest.raises(DataError):
            benchmark.uses.parts(encoded, 8, 9, 40)
