"""Slices and padding of an evaluation, by counting."""

import numpy as np
import pytest

from ops import padding


@pytest.mark.parametrize("total", [0, 1, 2, 5, 6, 7, 23, 24, 25])
@pytest.mark.parametrize(("batch_size", "hosts"), [(6, 1), (6, 2), (6, 3), (8, 8)])
def test_each_example_once_in_equally_many_batches(total, batch_size, hosts):
    shares = [padding.slices(total, batch_size, host, hosts) for host in range(hosts)]
    rows = batch_size // hosts
    assert {len(share) for share in shares} == {int(np.ceil(total / batch_size))}
    assert all(len(part) <= rows for share in shares for part in share)
    assert [i for share in shares for part in share for i in part] == list(range(total))


def test_pad_fills_with_zeros():
    batch = {"a": np.arange(2, dtype=np.int32), "b": np.ones((2, 3), np.uint8)}
    padded = padding.pad(batch, 1, 4)
    np.testing.assert_array_equal(padded["a"], np.array([0, 1, 0, 0], np.int32), strict=True)
    np.testing.assert_array_equal(padded["b"].sum(axis=1), [3, 3, 0, 0])
    assert padded["b"].dtype == np.uint8 and padded["b"].shape == (4, 3)
    np.testing.assert_array_equal(padded["mask"], np.array([1, 0, 0, 0], np.float32), strict=True)
