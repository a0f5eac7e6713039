"""What the tests get that --mode=prove runs: see `commands.prove.Case`."""

import json
import os

import jax
import pytest

from commands.prove import Case


@pytest.fixture
def case(tmp_path_factory):
    """The case of --mode=prove; in another run of the tests, the short one."""
    if "PROVE" in os.environ:
        return Case(**json.loads(os.environ["PROVE"]))
    folder = str(tmp_path_factory.mktemp("prove"))
    return Case(folder, folder, short=True, devices=jax.device_count())
