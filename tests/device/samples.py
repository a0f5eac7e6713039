"""Tests that end in every way, for tests/commands/test_prove.py; pytest does not look for them."""

import importlib.util
import os
import time

import pytest

from common.errors import DataError

pytestmark = pytest.mark.device


def test_passes(case, answer):
    answer(f"{case.devices} devices", {"count": 3, "rate": 0.1234567}, {"step": "ab" * 32})


def test_skips():
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("no TensorFlow")


def test_fails():
    answer = 41
    assert answer == 42, f"the answer is {answer}"


def test_raises():
    raise DataError("no space")


def test_crashes():
    os.abort()


def test_hangs():
    time.sleep(600)
