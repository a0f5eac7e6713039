"""Keeps compiled programs between starts, and says how many came from there."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

_HITS = "/jax/compilation_cache/cache_hits"
_MISSES = "/jax/compilation_cache/cache_misses"
_SAVED = "/jax/compilation_cache/compile_time_saved_sec"
_DAMAGED = ".*persistent compilation cache"
_counts: dict[str, float] = collections.defaultdict(float)
_own = ""  # the folder that this module chose


def use(folder: str) -> None:
    """Keeps programs in a folder below `folder`, local or gs://; "" keeps none.

    $JAX_COMPILATION_CACHE_DIR goes first, as it stands. Call before anything is compiled.
    """
    global _own
    if not _counts:  # listeners cannot be taken back: only once
        jax.monitoring.register_event_listener(_count)
        jax.monitoring.register_event_duration_secs_listener(_count_seconds)
        _counts[_HITS] = 0
    if _folder() or not folder:
        return
    _own = folder if "://" in folder else os.path.expanduser(folder)
    _own = f"{_own.rstrip('/')}/{_machine()}"
    jax.config.update("jax_compilation_cache_dir", _own)


@contextlib.contextmanager
def watched(say: Callable[[str], None]) -> Iterator[None]:
    """Says how long what is compiled inside took, and what the folder did for it."""
    begun, before, damaged = time.monotonic(), _counts.copy(), False
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message=_DAMAGED)
        yield
    for warning in caught:
        if re.match(_DAMAGED, str(warning.message)):
            damaged = True
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    text, folder = f"compiled in {time.monotonic() - begun:.1f} s", _folder()
    hits, kept = (int(_counts[name] - before[name]) for name in (_HITS, _MISSES))
    if hits:
        saved = _counts[_SAVED] - before[_SAVED]
        text += f"; {_many(hits)} from {folder}, which saved {max(saved, 0):.0f} s"
    if kept:
        text += f"; {_many(kept)} kept in {folder} for the next start"
    if damaged:  # by a kill while it was written; jax would compile it anew at every start
        text += f"; {folder} held a damaged program"
        if _own and "://" not in _own:
            shutil.rmtree(_own, ignore_errors=True)
            text += " and was emptied"
    say(text)


def _many(programs: int) -> str:
    return f"{programs} program{'' if programs == 1 else 's'}"


def _folder() -> str:
    settings: Any = jax.config  # its attributes are made when jax is imported
    return settings.jax_compilation_cache_dir or ""


def _machine() -> str:
    """A name for what a program compiled here needs: a CPU's must not run on another kind."""
    if jax.default_backend() != "cpu":
        return jax.default_backend()
    flags = ""
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass
    return f"cpu-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def _count(event: str, **_: Any) -> None:
    _counts[event] += 1


def _count_seconds(event: str, duration_secs: float, **_: Any) -> None:
    if event == _SAVED:
        _counts[event] += duration_secs
