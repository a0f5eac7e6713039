"""Results of threads, in the order of their inputs."""

import concurrent.futures
import itertools
import threading
from typing import Any

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

    results = pools.in_order(work, itertools.count())
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)


@pytest.mark.parametrize(("cores", "threads"), [(3, 3), (None, 1)])
def test_a_thread_per_core_and_two_results_ahead(monkeypatch, cores, threads):
    taken, sizes = [], []

    class Pool(concurrent.futures.ThreadPoolExecutor):
        def __init__(self, size):
            sizes.append(size)
            super().__init__(size)

    monkeypatch.setattr(pools.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(pools.concurrent.futures, "ThreadPoolExecutor", Pool)
    results: Any = pools.in_order(str, (taken.append(i) or i for i in itertools.count()))
    assert next(results) == "0" and sizes == [threads] and len(taken) == threads + 2
    results.close()
