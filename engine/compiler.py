"""Options of XLA that make train steps faster on some kinds of TPU."""

from __future__ import annotations

import os

from jax.sharding import Mesh

_LIMIT = "xla_tpu_scoped_vmem_limit_kib"
_KIB = {"TPU v5 lite": 32 * 1024, "TPU v5": 48 * 1024, "TPU v5p": 48 * 1024}


def larger_windows(mesh: Mesh) -> dict[str, str]:
    """The `compiler_options` of `jax.jit` for a train step of many convolutions.

    The option is the limit of scoped VMEM: how much of a core's vector memory one operation may use
    for its windows on arrays in the main memory, 16 MiB by default on these chips. With larger
    windows there are fewer copies, and compiling takes longer. The rest of the vector memory holds
    arrays between operations. A limit in `LIBTPU_INIT_ARGS` has priority. docs/performance.md has
    the estimates, and why other chips have no entry.
    """
    kib = _KIB.get(mesh.devices.flat[0].device_kind)
    if kib is None or _LIMIT in os.environ.get("LIBTPU_INIT_ARGS", ""):
        return {}
    return {_LIMIT: str(kib)}
