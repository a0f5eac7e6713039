"""XLA's options for the programs of a run, and the folder that keeps compiled programs."""

import collections
import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh

_LIMIT = "xla_tpu_scoped_vmem_limit_kib"
_KIB = {"TPU v5 lite": 32 * 1024, "TPU v5": 48 * 1024, "TPU v5p": 48 * 1024}
_LEVEL = "xla_backend_optimization_level"
_LIBRARY = "xla_cpu_experimental_ynn_fusion_type"
_ALL_BUT_CONVOLUTIONS = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"

# Events of jax, and how often each has come.
_HITS = "/jax/compilation_cache/cache_hits"
_MISSES = "/jax/compilation_cache/cache_misses"
_counts: dict[str, int] = collections.defaultdict(int)


def options(
    mesh: Mesh, larger_windows: bool = False, runs_once: bool = False
) -> dict[str, str] | None:
    """The `compiler_options` of `jax.jit` for a program on `mesh`; None if it needs none.

    On CPUs XLA computes convolutions itself: YNNPACK, which keeps products and sums, takes up to
    six times as long for the gradient in the kernel. `larger_windows` raises the limit of scoped
    VMEM on some TPUs, so that there are fewer copies and compiling takes longer. A program that
    `runs_once` compiles in 40 % of the time on CPUs; below level 1 initial weights change in their
    last bits. A choice of these in `XLA_FLAGS`, `LIBTPU_INIT_ARGS` or
    `JAX_DISABLE_MOST_OPTIMIZATIONS` has priority.
    """
    device_kind = mesh.devices.flat[0].device_kind
    flags = os.environ.get("XLA_FLAGS", "")
    if device_kind == "cpu" and runs_once:
        is_chosen = _LEVEL in flags or "JAX_DISABLE_MOST_OPTIMIZATIONS" in os.environ
        return None if is_chosen else {_LEVEL: "1"}
    if device_kind == "cpu" and _LIBRARY not in flags:
        return {_LIBRARY: _ALL_BUT_CONVOLUTIONS}
    kib = _KIB.get(device_kind) if larger_windows else None
    if kib is None or _LIMIT in os.environ.get("LIBTPU_INIT_ARGS", ""):
        return None
    return {_LIMIT: str(kib)}


def use_cache(folder: str) -> None:
    """Keeps programs in a subfolder of `folder`, local or gs://; "" keeps none.

    $JAX_COMPILATION_CACHE_DIR replaces the subfolder. Call this before anything is compiled.
    """
    if not _counts:  # listeners cannot be removed, so they are registered only once
        jax.monitoring.register_event_listener(_count)
        _counts[_HITS] = 0
    if folder and not cache_folder():
        parent = folder if "://" in folder else os.path.expanduser(folder)
        jax.config.update("jax_compilation_cache_dir", f"{parent.rstrip('/')}/{_hardware()}")


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Logs how long the block took to compile, and how many programs came from the folder."""
    start, before = time.monotonic(), _counts.copy()
    yield
    text, folder = f"compiled in {time.monotonic() - start:.1f} s", cache_folder()
    hits, misses = (_counts[name] - before[name] for name in (_HITS, _MISSES))
    if hits:
        text += f"; {hits} program{'s' * (hits > 1)} from {folder}"
    if misses:
        text += f"; {misses} program{'s' * (misses > 1)} kept in {folder} for the next start"
        if jax.process_count() > 1 and "://" not in folder:
            text += " of host 0 (for all hosts give --config.compilation_cache=gs://...)"
    logging.getLogger("tpu_suite").info("%s", text)


def cache_folder() -> str:
    """The folder of the programs; "" if none are kept."""
    settings: Any = jax.config  # the type checker does not know its attributes
    return settings.jax_compilation_cache_dir or ""


def _hardware() -> str:
    """Names the hardware of a program: a program of one kind of CPU may crash on another kind."""
    if jax.default_backend() != "cpu":
        return jax.default_backend()
    flags = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    return f"cpu-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def _count(event: str, **_: Any) -> None:
    _counts[event] += 1
