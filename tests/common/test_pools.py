"""Results of threads, in the order of their inputs."""

import concurrent.futures
import itertools
import threading

import pytest

from common import pools


def test_results_come_in_order_whatever_ends_first():
    last = threading.Event()

    def work(i):
        if i == 0:
            assert last.wait(60)  # the first input waits for the third
        if i == 2:
            last.set()
        return i * i

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = pools.ordered(pool, work, range(5), 3)
        assert list(results) == [0, 1, 4, 9, 16]


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_no_more_is_started_than_allowed(ahead):
    taken = []

    def inputs():
        for i in itertools.count():
            taken.append(i)
            yield i

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = pools.ordered(pool, str, inputs(), ahead)
        for i in range(4):
            assert next(results) == str(i) and len(taken) == ahead + i


def test_an_error_comes_in_its_place():
    def work(i):
        return 1 // (2 - i)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = pools.ordered(pool, work, itertools.count(), 4)
        assert [next(results), next(results)] == [0, 1]
        with pytest.raises(ZeroDivisionError):
            next(results)
