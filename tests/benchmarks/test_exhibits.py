"""What the exhibits of several benchmarks have in common."""

import io
import math

import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image

from benchmarks import exhibits
from benchmarks.exhibits import even_groups
from common.images.input_spec import NAMED


@pytest.mark.parametrize(
    ("values", "most", "expected"),
    [
        ([], 3, []),
        ([4], 3, [[0]]),
        ([3, 1, 2, 0], 2, [[3, 1], [2, 0]]),
        ([5, 5, 5, 5], 3, [[0, 1, 2, 3]]),
        ([1, 2, 2, 2, 2, 3], 3, [[0, 1, 2, 3, 4], [5]]),
        (list(range(7)), 3, [[0, 1], [2, 3], [4, 5, 6]]),
    ],
)
def test_groups_are_even_and_equal_values_stay_together(values, most, expected):
    assert [group.tolist() for group in even_groups(np.array(values, int), most)] == expected


def test_numbers_and_tables_as_they_are_shown():
    shown = [exhibits.percent(x) for x in (0, 0.0625, 1, math.nan)]
    assert shown == ["0.0\u00a0%", "6.2\u00a0%", "100.0\u00a0%", "–"]
    assert exhibits.csv_file(["a", "b"], [[1, 'x"y'], ["p,q", ""]]) == b'a,b\n1,"x""y"\n"p,q",\n'
    found = exhibits.sigmoid(np.array([0, np.log(3), -np.log(3), 9e3, -9e3], np.float32))
    np.testing.assert_allclose(found, [0.5, 0.75, 0.25, 1, 0], atol=1e-7)


def test_pictures_are_shrunk_and_put_beside_each_other():
    def image(colour, width, height):
        return Image.new("RGB", (width, height), colour)

    file = io.BytesIO()
    image("red", 60, 30).save(file, "PNG")
    sizes = [exhibits.thumbnail(file.getvalue(), side).size for side in (20, 60, 99)]
    assert sizes == [(20, 10), (60, 30), (60, 30)]
    both = np.asarray(exhibits.beside(image("red", 6, 3), image("blue", 6, 3)))
    expected = np.full((3, 16, 3), 255)
    expected[:, :6], expected[:, 10:] = (255, 0, 0), (0, 0, 255)
    np.testing.assert_array_equal(both, expected)


def test_the_map_lies_where_the_model_looks():
    photo = Image.new("RGB", (200, 100), "white")
    heat_map = np.full((32, 32), 0.3, np.float32)
    heat_map[:, 16:] = 0.7
    shown = np.asarray(exhibits.heated(photo, heat_map, NAMED["torchvision_v1"]), int)
    assert shown.shape == (100, 200, 3)
    frame = (shown == 255).all(2)
    rows, columns = np.flatnonzero(frame.sum(1) > 80), np.flatnonzero(frame.sum(0) > 80)
    assert (rows.tolist(), columns.tolist()) == ([6, 93], [56, 143])  # 224 of 256 of the height
    hot, cold = shown[50, 130], shown[50, 70]
    assert hot.sum() > cold.sum() + 60 and hot[0] > hot[2] + 60  # orange, violet
    assert np.ptp(shown[:, :56], axis=2).max() == 0 and shown[:, :56].max() < 128
    # Above the frame: the white photo in grey, of which 0.6 are black; 0.5 of the part is coloured.
    assert set(shown[2].ravel().tolist()) == {102}
    colours = colormaps["inferno"]([0.7, 0.3])[:, :3] * 255
    np.testing.assert_allclose([hot, cold], (255 + colours) / 2, atol=2)
