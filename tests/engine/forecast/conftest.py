"""What tests of places in source code need."""

import jax
import pytest


@pytest.fixture
def lines_in_programs():
    """Programs that jax lowers have lines of source code; exports leave them out for good."""
    limit = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 10)
    yield
    jax.config.update("jax_traceback_in_locations_limit", limit)
