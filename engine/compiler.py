"""XLA's options for the programs of a run, by the kind of the devices."""

from __future__ import annotations

import os

from jax.sharding import Mesh

_LIMIT = "xla_tpu_scoped_vmem_limit_kib"
_KIB = {"TPU v5 lite": 32 * 1024, "TPU v5": 48 * 1024, "TPU v5p": 48 * 1024}
_LIBRARY = "xla_cpu_experimental_ynn_fusion_type"
_ALL_BUT_CONVOLUTIONS = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"


def options(mesh: Mesh, larger_windows: bool = False) -> dict[str, str] | None:
    """The `compiler_options` of `jax.jit` for a program on `mesh`; None: there are none.

    On CPUs XLA computes convolutions itself: YNNPACK, which keeps products and sums, takes up to
    six times as long for the gradient in the kernel. `larger_windows` raises the limit of scoped
    VMEM on some TPUs, so that there are fewer copies and compiling takes longer. A choice of these
    in `XLA_FLAGS` or `LIBTPU_INIT_ARGS` has priority. docs/performance.md has the figures.
    """
    kind = mesh.devices.flat[0].device_kind
    if kind == "cpu" and _LIBRARY not in os.environ.get("XLA_FLAGS", ""):
        return {_LIBRARY: _ALL_BUT_CONVOLUTIONS}
    kib = _KIB.get(kind) if larger_windows else None
    if kib is None or _LIMIT in os.environ.get("LIBTPU_INIT_ARGS", ""):
        return None
    return {_LIMIT: str(kib)}
