"""Keeps compiled programs between starts, and says how many came from there."""

from __future__ import annotations

import builtins
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
# What jax warns of, and compiles instead: "Error reading ... for 'NAME': TYPE: reason".
_TROUBLE = r"Error (reading|writing) persistent compilation cache entry for '[^']*': (\w+): "
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
    begun, before, trouble = time.monotonic(), _counts.copy(), ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message=_TROUBLE)
        yield
    for warning in caught:
        if re.match(_TROUBLE, str(warning.message)):
            trouble = " ".join(str(warning.message).split())
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
        if jax.process_count() > 1 and "://" not in folder:
            text += " of host 0 (for all hosts give --config.compilation_cache=gs://...)"
    say(text + (_remedy(trouble, folder) if trouble else ""))


def _remedy(trouble: str, folder: str) -> str:
    """What to say of a warning of jax's, and the end of a program that was written half.

    A kill leaves such a one, and jax would compile it anew at every start.
    """
    match = re.match(_TROUBLE, trouble)
    kind = getattr(builtins, match[2], None) if match else None
    of_files = isinstance(kind, type) and issubclass(kind, OSError)
    reason = trouble[match.end() :][:200] if match else trouble
    if not match or match[1] == "writing" or of_files:
        return f"; nothing can be kept in {folder}: {reason}"
    if not _own or "://" in _own:
        return f"; {folder} holds a damaged program, delete it: {reason}"
    shutil.rmtree(_own, ignore_errors=True)
    return f"; {folder} held a damaged program and was emptied"


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
