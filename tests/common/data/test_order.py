"""The order of training: each example once per epoch, on any number of hosts; permutations."""

import collections
import dataclasses
import itertools
import math
import operator

import numpy as np
import pytest

from common.data.order import Order, Permutation, example_numbers, hash64
from common.errors import DataError
from configs import resnet50

MASK = 2**64 - 1
COUNTS = {
    "short last": (9,) * 7 + (4,),  # ImageNet in miniature: 1,023 full files and a short one
    "empty files": (0, 5, 0, 0, 11, 1, 0),
    "one file": (23,),
    "ones": (1,) * 19,
}


def splitmix(*words):
    """`hash64` of single numbers, from the published splitmix64."""
    state = 0
    for word in words:
        z = ((state ^ (int(word) & MASK)) + 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        state = z ^ (z >> 31)
    return state


def plain_turns(sequence, starts, order):
    """The examples of a stream in the order of reading: its files take turns."""
    files = []  # lists of the stream's examples
    for i in sequence:
        if not files or i in starts or i != files[-1][-1] + 1:
            files.append([])
        files[-1].append(i)
    most = max(map(len, files))
    files_per_slot = math.ceil(len(sequence) / (most * order.interleaved))
    number = math.ceil(len(sequence) / (most * files_per_slot))
    slots, run, reading = [[] for _ in range(number)], max(1, order.block // number), []
    while files or any(slots):
        for slot in slots:
            if not slot and files:
                slot += files.pop(0)
            reading += slot[:run]
            del slot[:run]
    return reading


def plain_epoch(order, stream, epoch):
    """[(id, seeds)] of one epoch of one stream, in training order, with loops."""
    counts = order.counts
    starts = [sum(counts[:i]) for i in range(len(counts))]
    shuffled = sorted(range(len(counts)), key=lambda f: splitmix(order.seed, 1, epoch, f))
    sequence = [starts[f] + i for f in shuffled for i in range(counts[f])]
    n = len(sequence)
    mine = sequence[stream * n // order.streams : (stream + 1) * n // order.streams]
    mine = plain_turns(mine, starts, order)
    order_of_ids = []
    for at in range(0, len(mine), order.block):
        block = mine[at : at + order.block]
        order_of_ids += sorted(block, key=lambda i: splitmix(order.seed, 2, epoch, i))
    seed = order.seed
    return [(i, [splitmix(seed, 3, epoch, i, k) >> 33 for k in range(3)]) for i in order_of_ids]


def plain_steps(order, steps):
    """[step][stream][row] of (id, seeds)."""
    needed, streams = steps * order.rows, []
    for stream in range(order.streams):
        rows, epoch = [], 0
        while len(rows) < needed:
            rows += plain_epoch(order, stream, epoch)
            epoch += 1
        streams.append(rows)
    cut = [slice(i * order.rows, (i + 1) * order.rows) for i in range(steps)]
    return [[rows[part] for rows in streams] for part in cut]


def make(counts, seed=5, batch=8, max_streams=4, buffer=12):
    return Order.make(counts, seed, batch, max_streams, buffer)


def test_hash_is_splitmix64():
    # The generator's first output from states 0 and 1234567, as its authors publish them.
    assert int(hash64(0)) == 0xE220A8397B1DCDAF
    assert int(hash64(1234567)) == 6457827717110365317
    # Golden numbers of `splitmix` above: a change would reorder every run that is under way.
    assert int(hash64(1, 2, 3)) == 0xD0734750FDE362B3
    assert int(hash64(0, 3, 89, 1281166, 2)) == 0xC4E463157794E298
    for words in [(7,), (0, 0), (-1, 5), (2**63 + 11, 3, 2**40), (1, 2, 3, 1281166, 2)]:
        assert int(hash64(*words)) == splitmix(*words)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("batch", "max_streams", "buffer"), [(8, 4, 12), (6, 2, 1), (5, 1, 999)])
def test_order_is_the_documented_one(counts, batch, max_streams, buffer):
    order = make(counts, 3, batch, max_streams, buffer)
    assert order.streams == max_streams and order.block == max(1, buffer // max_streams)
    batches = zip(plain_steps(order, 40), order.steps(range(order.streams), 0), strict=False)
    for streams, (ids, seeds) in batches:
        expected = [row for rows in streams for row in rows]
        assert list(zip(ids.tolist(), seeds.tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    ("total", "batch", "max_streams", "streams"),
    [(100, 8, 32, 8), (100, 1024, 32, 32), (3, 8, 8, 2), (1, 8, 8, 1), (4, 15, 15, 3)],
)
def test_streams_divide_the_batch_and_none_is_empty(total, batch, max_streams, streams):
    order = make((total,), batch=batch, max_streams=max_streams)
    assert (order.streams, order.rows) == (streams, batch // streams)
    bounds = [order.bounds(stream) for stream in range(streams)]
    assert bounds[0][0] == 0 and bounds[-1][1] == total
    assert all(begin < end for begin, end in bounds)
    assert len(order.batch_ids(3)) == batch


def test_a_batch_draws_from_many_files_of_imagenet():
    """1,023 files of 1,252 examples and one of 371: the layout of TensorFlow's records."""
    counts = (1252,) * 1023 + (371,)
    config, first = resnet50.get_config(), np.cumsum((0, *counts))
    keys = ("train_batch_size", "input_streams", "shuffle_buffer_size")
    batch, streams, buffer = (operator.attrgetter(key)(config) for key in keys)
    order = Order.make(counts, 0, batch, streams, buffer)
    assert (sum(counts), order.rows * order.streams) == (1_281_167, 1024)
    assert (order.streams, order.interleaved, order.block) == (64, 8, 256)
    files, classes = [], []
    for step in (0, 1, 50, 300, 600, 626, 640, 900, 1200, 1240, 1250, 1251, 2000):
        ids = order.batch_ids(step)
        files.append(len(set(np.searchsorted(first, ids, side="right"))))
        classes.append(len(set(ids * 1000 // sum(counts))))  # as if the records were sorted
    # The tutorial on 8 hosts: 299 files and 367 classes. A uniform draw: 647 and 641.
    assert np.mean(files) > 450 and np.mean(classes) > 430
    assert min(files) > 380 and min(classes) > 367


def test_a_step_needs_no_step_before_it():
    order = make(COUNTS["short last"])
    far = 10**6 + 3
    (low, high), at = order.bounds(2), far * order.rows
    rows = plain_epoch(order, 2, at // (high - low))[at % (high - low) :]
    rows += plain_epoch(order, 2, at // (high - low) + 1)
    ids = order.batch_ids(far).reshape(order.streams, order.rows)[2]
    assert ids.tolist() == [i for i, _ in rows[: order.rows]]


def test_flips_and_crops_draw_evenly_and_independently():
    order = make((4000,), max_streams=1, buffer=4000)
    _, _, ids, seeds = next(order.blocks(0, 0))
    assert sorted(ids) == list(range(4000))
    assert 0.47 < (seeds[:, 2] % 2).mean() < 0.53
    assert len(set(map(tuple, seeds[:, :2].tolist()))) == 4000 and (seeds >= 0).all()
    correlation = np.corrcoef(np.concatenate([seeds.T, ids[None], np.arange(4000)[None]]))
    assert np.abs(correlation - np.eye(5)).max() < 0.06


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("rows", "block"), [(1, 3), (3, 50), (20, 3)])
@pytest.mark.parametrize("interleaved", [1, 2])
def test_reads_are_the_whole_blocks_of_a_step(counts, rows, block, interleaved):
    order = Order(counts, 3, 3, rows, block, interleaved=interleaved)
    for step in (0, 1, 2, 7, 30):
        for stream, plain in enumerate(plain_steps(order, step + 1)[step]):
            ids = example_numbers(counts, order.reads(range(stream, stream + 1), step)).tolist()
            needed = {i for i, _ in plain}
            assert needed <= set(ids)
            # Blocks are whole, and at both ends one is needed.
            assert len(ids) <= len(plain) + 2 * (block - 1)


# --- Repeated augmentation, against the plain order.

UNEVEN = (9, 30, 7, 25, 31)


def rows_of(order: Order, stream: int, start: int, steps: int) -> list[list[tuple[int, ...]]]:
    """(id, seeds) of a stream's rows at each step."""
    batches = itertools.islice(order.steps(range(stream, stream + 1), start), steps)
    return [[(int(i), *map(int, s)) for i, s in zip(*batch, strict=True)] for batch in batches]


@pytest.mark.parametrize("interleaved", [1, 2])
@pytest.mark.parametrize(("size", "repeats"), [(12, 3), (8, 3), (4, 5)])
def test_each_example_fills_so_many_rows_in_turn(size, repeats, interleaved):
    """Over three epochs of the examples; 12 rows of a step are 4 whole examples, 8 are not."""
    once = Order(UNEVEN, 5, 2, 1, 10, interleaved=interleaved)
    order = dataclasses.replace(once, rows=size, repeats=repeats)
    for stream in range(2):
        steps = -(-3 * 51 * repeats // size)
        examples = [row for (row,) in rows_of(once, stream, 0, steps * size // repeats + 1)]
        seen: dict[int, list[tuple[int, ...]]] = collections.defaultdict(list)
        for number, batch in enumerate(rows_of(order, stream, 0, steps)):
            places = [place // repeats for place in range(number * size, (number + 1) * size)]
            assert sorted(row[0] for row in batch) == sorted(examples[p][0] for p in places)
            for id_, *seeds in batch:
                seen[id_].append(tuple(seeds))
        assert all(len(set(seeds)) == len(seeds) for seeds in seen.values())
        plain = {(id_, tuple(seeds)) for id_, *seeds in examples[: 3 * 51]}
        assert plain <= {(id_, s) for id_, every in seen.items() for s in every}


def test_neighbours_are_different_examples():
    """So that mixing an image with its neighbour mixes two images. 8 examples are 2 steps."""
    order = Order((16, 32), 5, 1, 12, 8, repeats=3)
    for batch in rows_of(order, 0, 0, 20):
        ids = [row[0] for row in batch]
        assert ids == ids[:4] * 3 and len(set(ids)) == 4


def test_streams_have_rows_for_all_copies_of_an_example():
    """24 rows of 12 streams would be 2 each."""
    streams = {r: Order.make(UNEVEN, 0, 24, 12, 48, r).streams for r in (1, 2, 3, 5, 24, 100)}
    assert streams == {1: 12, 2: 12, 3: 6, 5: 4, 24: 1, 100: 1}
    one, other = (Order.make(UNEVEN, 0, 24, 12, 48, *r).batch_ids(3) for r in ((), (1,)))
    np.testing.assert_array_equal(one, other)


def test_what_a_seed_draws_never_changes():
    """A change would reorder the runs that are under way."""
    order = Order(UNEVEN, 5, 2, 4, 10, interleaved=2, repeats=2)
    (ids, seeds), *_ = itertools.islice(order.steps(range(2), 7), 1)
    assert ids.tolist() == [53, 54, 53, 54, 87, 89, 87, 89]
    assert seeds[:3].tolist() == [
        [483983584, 1227258725, 680219602],
        [2023133647, 229272730, 664891110],
        [931290489, 1387976766, 1970747878],
    ]


def test_hosts_that_cannot_share_the_streams():
    order = Order((100,), 0, 6, 2, 9)
    assert [order.share(host, 3) for host in range(3)] == [range(2), range(2, 4), range(4, 6)]
    with pytest.raises(DataError, match="^6 input streams cannot be shared by 4 hosts: set --conf"):
        order.share(0, 4)


def test_the_files_have_another_order_in_each_epoch():
    mixed = Order.make((1,) * 20, 3, 8, 4, 8)
    assert mixed.files(0).tolist() != mixed.files(1).tolist()


@pytest.mark.parametrize(
    ("files", "streams", "buffer", "interleaved"),
    [
        *((512, 32, 10**6, 16), (600, 64, 10**6, 8)),  # 512 files are open at most
        *((31, 2, 10**6, 15), (3, 4, 10**6, 1)),
        *((99, 2, 12, 6), (99, 2, 1, 1)),  # one of each file in a block
    ],
)
def test_how_many_files_take_turns(files, streams, buffer, interleaved):
    order = Order.make((9,) * files, 0, streams, streams, buffer)
    assert (order.streams, order.interleaved) == (streams, interleaved)
    assert order.block == max(1, buffer // streams)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 115, 1000, 4096, 4097, 99_999])
def test_a_permutation_has_every_number_once(size):
    images = Permutation(size, 3, 1)(np.arange(size))
    assert np.array_equal(np.sort(images), np.arange(size))


def test_a_permutation_is_the_same_in_any_pieces_and_order():
    images = Permutation(1000, 7)(np.arange(1000))
    positions = np.random.default_rng(0).permutation(1000)
    assert np.array_equal(Permutation(1000, 7)(positions), images[positions])


def test_permutations_look_random():
    """Over 2000 keys, a number is about as often at each position, and after each other number."""
    size, keys = 10, 2000
    images = np.array([Permutation(size, 5, key)(np.arange(size)) for key in range(keys)])
    positions = np.broadcast_to(np.arange(size), images.shape)
    for other in (positions, np.roll(images, 1, axis=1)):
        counts = np.zeros((size, size))
        np.add.at(counts, (images.ravel(), other.ravel()), 1)
        expected = counts.sum() / np.count_nonzero(counts)
        freedom = np.count_nonzero(counts) - 2 * size + 1
        chi2 = ((counts[counts > 0] - expected) ** 2 / expected).sum()
        assert abs(chi2 - freedom) < 5 * (2 * freedom) ** 0.5, chi2


def test_permutations_never_change():
    """The order of every NCF epoch that is under way depends on these."""
    assert Permutation(10, 7)(np.arange(10)).tolist() == [9, 6, 5, 3, 0, 4, 8, 1, 2, 7]
    assert Permutation(100, 0, 2)(np.arange(8)).tolist() == [53, 94, 68, 0, 93, 52, 5, 54]
