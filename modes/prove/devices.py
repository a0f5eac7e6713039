"""Says which devices there are, and compares all of them with one of them on the same batch."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from benchmarks.base import BATCH_AXES
from engine import mesh as meshes
from modes.prove import models, numbers
from modes.prove.case import Case, Failed, Result

_TOLERANCE = 1e-3  # of float32 in another order of additions, see `numbers.TOLERANCES`


def describe(case: Case) -> Result:
    """The kind and the number of the devices, and the memory of one in bytes.

    Raises:
      DeviceError: this machine has a TPU that jax does not use.
    """
    del case
    meshes.check_platform()
    devices = jax.devices()
    kind, chips = devices[0].device_kind, meshes.num_chips(meshes.make(BATCH_AXES, 1))
    memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    figures = {"kind": kind, "platform": devices[0].platform, "count": len(devices)}
    figures |= {"chips": chips} if devices[0].platform == "tpu" else {}
    figures |= {"memory_bytes": memory} if memory else {}
    return Result(f"{len(devices)} x {kind}", figures)


def all_as_one(case: Case) -> Result:
    """Computes the batch of every model on all devices and on one of them, in float32."""
    del case
    count = math.gcd(models.ROWS, 1 << (jax.device_count().bit_length() - 1))
    if count == 1:
        return Result("there is one device", status="skipped")
    figures: dict[str, Any] = {"devices": count}
    programs: dict[str, str] = {}
    for name in models.table():
        model = models.load(name)
        (one, sums, state), _ = numbers.gradients(model, _mesh(1))
        (many, all_sums, all_state), programs[name] = numbers.gradients(model, _mesh(count))
        figures[name] = max(
            differ(f"{name}: the sums", sums, all_sums),
            differ(f"{name}: the gradients", one, many),
            differ(f"{name}: the statistics", state, all_state),
        )
    worst = max(figures[name] for name in programs)
    text = f"{count} of {jax.device_count()} devices" if count < jax.device_count() else "all"
    return Result(f"{text} = 1; largest relative error {worst:.1e}", figures, programs)


def differ(what: str, one: Any, many: Any) -> float:
    """Returns the largest relative difference of an array in two trees.

    The unit is the array's norm in the first tree, or a share of the largest norm there.

    Raises:
      Failed: it is larger than the tolerance, or not finite; the message names the array.
    """
    first, second = models.named(one), models.named(many)
    norms = {name: float(np.linalg.norm(x)) for name, x in first.items()}
    least, worst = numbers.LEAST * max(norms.values(), default=0.0), 0.0
    for name, x in first.items():
        error = float(np.linalg.norm(second[name] - x)) / (max(norms[name], least) or 1.0)
        if not error <= _TOLERANCE:
            raise Failed(f"{what} of all devices differ from those of one by {error:.2g} in {name}")
        worst = max(worst, error)
    return worst


def _mesh(count: int) -> Any:
    return meshes.make(BATCH_AXES, 0, jax.devices()[:count])
