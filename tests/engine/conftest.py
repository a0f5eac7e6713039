"""What tests of the engine share."""

import time
import types

import pytest


@pytest.fixture
def clock(monkeypatch):
    """A clock to be set by hand."""
    now = types.SimpleNamespace(seconds=5000.0)
    monkeypatch.setattr(time, "monotonic", lambda: now.seconds)
    return now
