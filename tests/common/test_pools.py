"""Results of threads, in the order of their inputs."""

import concurrent.futures
import itertools
import os
import threading

import pytest

from common import pools


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 6),
        ({"cpu.max": "max 100000\n"}, 6),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 6),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 6),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ],
)
@pytest.mark.parametrize("affinity", [True, False])
def test_cores_are_those_of_the_process_and_of_its_container(
    affinity, files, cores, tmp_path, monkeypatch
):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    if affinity:
        monkeypatch.setattr(os, "cpu_count", lambda: 64)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    else:
        monkeypatch.setattr(os, "cpu_count", lambda: 6)
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert pools.cores(str(tmp_path)) == cores


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


def test_remote_files_have_more_threads(monkeypatch):
    monkeypatch.setattr(pools, "cores", lambda: 6)
    assert [pools.threads("/a", "b"), pools.threads("/a", "gs://b")] == [6, 48]
    monkeypatch.setattr(pools, "cores", lambda: 40)
    assert pools.threads("gs://b") == 256
    monkeypatch.setattr(pools, "cores", lambda: 300)
    assert pools.threads("gs://b") == 300


def test_the_first_error_stops_the_others():
    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with pytest.raises(ZeroDivisionError):
            pools.all_done([pool.submit(stop.wait, 60), pool.submit(lambda: 1 // 0)], stop)
        assert stop.is_set()
        pools.all_done([pool.submit(int)], stop)
