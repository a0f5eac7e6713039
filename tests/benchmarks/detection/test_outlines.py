"""Masks of polygons and runs against pycocotools' own decoder."""

import array
from typing import Any

import numpy as np
import pytest
from pycocotools import mask

from benchmarks.detection import outlines, segmentation

masks: Any = mask  # its types know neither polygons nor what it returns
old_numpy = pytest.mark.filterwarnings("ignore:__array__ implementation")


@old_numpy
@pytest.mark.parametrize("seed", range(8))
def test_polygons_and_runs_become_the_pixels_of_pycocotools(seed):
    draw = np.random.default_rng(seed)
    height, width = map(int, draw.integers(5, 90, 2))
    parts = int(draw.integers(1, 4))
    polygons = [
        (draw.uniform(-0.1, 1.1, (int(draw.integers(3, 9)), 2)) * [width, height]).ravel().tolist()
        for _ in range(parts)
    ]
    runs: Any = masks.merge(masks.frPyObjects(polygons, height, width))  # pyright: ignore
    expected = masks.decode(runs)
    assert expected.any()
    for outline in (
        polygons,
        segmentation.dense(polygons),
        runs,
        runs | {"counts": runs["counts"].decode()},
    ):
        np.testing.assert_array_equal(outlines.mask(outline, height, width), expected)
    noise = np.asfortranarray((draw.uniform(size=(height, width)) < 0.5).astype(np.uint8))
    np.testing.assert_array_equal(outlines.mask(masks.encode(noise), height, width), noise)
    flat = noise.T.ravel()  # column by column
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flat]))).tolist()
    counts = np.diff([0, *edges, flat.size]).tolist()
    as_list = {"counts": counts, "size": [height, width]}
    np.testing.assert_array_equal(outlines.mask(as_list, height, width), noise)


@pytest.mark.parametrize(
    "counts", [[5, 5], [110, -10], [50, 51], ["a", 3], "5", "\x80\x80", [0.5, 99.5], [100, None]]
)
def test_damaged_runs_raise(counts):
    with pytest.raises(ValueError, match="its segmentation is damaged"):
        outlines.mask({"counts": counts, "size": [10, 10]}, 10, 10)


def test_only_polygons_become_arrays():
    assert segmentation.dense([[1, 2.5, 3]]) == [array.array("d", [1, 2.5, 3])]
    for outline in (None, [], [["a"]], {"counts": [1], "size": [1, 1]}, 5, [5], [[10**400]]):
        assert segmentation.dense(outline) == outline


TRIANGLE = [0, 0, 4, 0, 4, 4]
RUNS = {"counts": [50, 50], "size": [10, 10]}
DAMAGED = "has a segmentation whose runs are damaged"
NEAR = "no number in or near its 10x10 pixels"
FAR = (2e9, -2e9, 1e300, 20.5, -11, float("inf"), float("-inf"))
POINTS = "has a polygon that is not 3 or more points x, y"


@pytest.mark.parametrize(
    ("outline", "fault"),
    [
        ([TRIANGLE], ""),
        ([TRIANGLE, array.array("d", [0, 0, 4, 0, 4, 4, 1, 3])], ""),
        (RUNS, ""),
        (RUNS | {"counts": "0T3"}, ""),  # 0, 100
        (RUNS | {"counts": "abc"}, "has a segmentation whose runs are damaged (0 of 100 pixels)"),
        (RUNS | {"counts": [10**12, 100 - 10**12]}, f"{DAMAGED} (-999999999900 is no length)"),
        (RUNS | {"counts": [10**12]}, f"{DAMAGED} (1000000000000 of 100 pixels)"),
        (RUNS | {"counts": "P" * 10**6}, f"{DAMAGED} (a number has no end)"),
        (RUNS | {"size": 5}, "has a segmentation of size 5 in 10x10 pixels"),
        ({"size": [10, 10]}, "has a segmentation without 'counts'"),
        (RUNS | {"size": [10, 9]}, "has a segmentation of size [10, 9] in 10x10 pixels"),
        ({"counts": []}, "has a segmentation of size None in 10x10 pixels"),
        ([], "has no segmentation"),
        (None, "has no segmentation"),
        ("polygon", "has no segmentation"),
        ([TRIANGLE, TRIANGLE[:4]], POINTS),
        ([TRIANGLE[:5]], POINTS),
        ([[*TRIANGLE, 1]], POINTS),
        ([[*TRIANGLE, 1, 2, 3]], POINTS),
        (["123456"], POINTS),
        ([5], POINTS),
        ([[*TRIANGLE[:5], "a"]], f"has a polygon with 'a', {NEAR}"),
        ([TRIANGLE, [*TRIANGLE, 1, None]], f"has a polygon with None, {NEAR}"),
        ([[*TRIANGLE, 1, 11], [*TRIANGLE, -10, 20]], ""),  # beyond the picture, and near
        *(([[v, *TRIANGLE[1:]]], f"has a polygon with {v!r}, {NEAR}") for v in FAR),
        ([[*TRIANGLE[:5], 10**400]], f"has a polygon with 1{'0' * 29}, {NEAR}"),
    ],
)
def test_faults_of_outlines(outline, fault):
    assert segmentation.fault(outline, 10, 10) == fault


def test_numbers_are_finite_and_no_claims():
    assert all(map(segmentation.is_number, (0, -5, 2.5, 9e8, -9e8)))
    others = (True, "1", None, [1], 1e9, -1e9, 10**301, float("nan"), float("inf"))
    assert not any(map(segmentation.is_number, others))


def test_an_edge_that_would_fill_the_memory():
    zigzag = [0, 5, 65_000, 5] * 50
    assert segmentation.fault([zigzag], 2_000, 65_535) == ""
    fault = segmentation.fault([zigzag * 20], 2_000, 65_535)
    assert fault == "has a polygon with an edge of 130,000,000 pixels in 2000x65535 pixels"
