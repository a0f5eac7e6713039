"""Batches of decoded records, padded in the evaluation, and records that cannot be decoded."""

import itertools

import numpy as np
import pytest

from common.data import decoding
from common.data.decoding import Reader
from common.data.order import Order
from common.data.shards import Shards
from common.errors import DataError
from common.tensorflow import tensorflow

COUNTS = (5, 0, 7)


def store(folder, odd=()):
    """Records "0", "1", ... of which the `odd` ones are in hexadecimal."""
    tf, numbers, paths = tensorflow(), itertools.count(), []
    for i, count in enumerate(COUNTS):
        paths.append(str(folder / f"text-{i}"))
        with tf.io.TFRecordWriter(paths[-1]) as writer:
            for number in itertools.islice(numbers, count):
                writer.write((hex(number) if number in odd else str(number)).encode())
    return Shards(tuple(paths), COUNTS)


def decimal(serialized, seeds=None):
    tf = tensorflow()
    row = {"number": tf.strings.to_number(serialized, tf.int64)}
    return row if seeds is None else row | {"seed": seeds[0]}


def length(serialized, seeds=None):
    tf = tensorflow()
    return {"number": tf.cast(tf.strings.length(serialized), tf.int64)}


def accept(batch):
    assert set(batch) >= {"number", "id", "host_seconds"}


def test_a_record_that_none_can_decode_is_named(tmp_path):
    shards = store(tmp_path, odd=(6, 7))
    batches = Reader(shards, [decimal], accept).eval_batches(4, 0, 1)
    next(batches)
    place = r"text-2, record 1 \(counted from 0\) cannot be used: .*0x6"
    with pytest.raises(DataError, match=place):
        next(batches)


def with_step(decode):
    return lambda serialized, seeds, step: decode(serialized) | {"step": step}


@pytest.mark.parametrize("odd", [(), (7,)])
def test_numbered_batches_know_their_step(tmp_path, odd):
    """Also where the second decoder takes over."""
    shards = store(tmp_path, odd)
    order = Order.make(shards.counts, 3, 4, 2, 6)
    decoders = [with_step(decimal), with_step(length)]
    batches = Reader(shards, decoders, accept).train_batches(order, range(2), 2, numbered=True)
    longest = []
    for step, batch in zip(range(2, 9), batches, strict=False):
        assert batch["step"].tolist() == [step] * 4
        assert batch["id"].tolist() == order.batch_ids(step).tolist()
        longest.append(batch["number"].max())
    assert bool(odd) == (longest[-1] <= 3)  # lengths


def test_a_fault_in_training_is_named(tmp_path):
    """A record that none can decode, and a file that has become shorter."""
    shards = store(tmp_path, odd=(9,))
    order = Order.make(shards.counts, 3, 4, 2, 6)
    first = next(step for step in range(1, 9) if 9 in order.batch_ids(step))
    batches = Reader(shards, [decimal], accept).train_batches(order, range(2), 1)
    for _ in range(1, first):
        next(batches)
    with pytest.raises(DataError, match=r"text-2, record 4 \(counted from 0\) cannot .*0x9"):
        next(batches)
    counted = Shards(shards.paths, (5, 0, 8))
    order = Order.make(counted.counts, 3, 4, 1, 13)
    batches = Reader(counted, [length], accept).train_batches(order, range(1), 2)
    with pytest.raises(DataError, match="text-2, record 7 .* fewer records than when"):
        list(itertools.islice(batches, 9))


# --- Slices and padding of the evaluation.


@pytest.mark.parametrize("total", [0, 1, 2, 5, 6, 7, 23, 24, 25])
@pytest.mark.parametrize(("batch_size", "hosts"), [(6, 1), (6, 2), (6, 3), (8, 8)])
def test_each_example_once_in_equally_many_batches(total, batch_size, hosts):
    shares = [decoding.eval_slices(total, batch_size, host, hosts) for host in range(hosts)]
    rows = batch_size // hosts
    assert {len(share) for share in shares} == {int(np.ceil(total / batch_size))}
    assert all(len(part) <= rows for share in shares for part in share)
    assert [i for share in shares for part in share for i in part] == list(range(total))


def test_pad_fills_with_zeros():
    batch = {"a": np.arange(2, dtype=np.int32), "b": np.ones((2, 3), np.uint8)}
    padded = decoding.pad_batch(batch, 1, 4)
    np.testing.assert_array_equal(padded["a"], np.array([0, 1, 0, 0], np.int32), strict=True)
    np.testing.assert_array_equal(padded["b"].sum(axis=1), [3, 3, 0, 0])
    assert padded["b"].dtype == np.uint8 and padded["b"].shape == (4, 3)
    np.testing.assert_array_equal(padded["mask"], np.array([1, 0, 0, 0], np.float32), strict=True)
