"""Tells what jax raises when another host may be lost from other errors."""

from __future__ import annotations

import re

import jax

_LOST = re.compile("(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|INTERNAL|UNAVAILABLE|UNKNOWN): ")


def may_explain(error: BaseException | None) -> bool:
    """Whether jax failed, in a step or in a save, for another reason than lack of memory."""
    while error is not None:
        text = str(error)
        if isinstance(error, jax.errors.JaxRuntimeError):
            return not text.startswith("RESOURCE_EXHAUSTED")
        # Of a program that jax starts while the connection is lost; TensorStore's look alike.
        if isinstance(error, ValueError) and _LOST.match(text) and "tensorstore" not in text:
            return True
        error = error.__cause__
    return False
