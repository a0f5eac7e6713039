"""What Google's cloud says about this VM: attributes, and notices that the VM will go away."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import urllib.request

import entry
from engine.cluster import preemption

_PERIOD = 5.0  # seconds between two looks for a notice


def metadata(path: str, timeout: float) -> str:
    """Asks the VM's metadata server for `path`; waits up to `timeout` seconds.

    Raises:
      OSError: there is no such server, or it does not know the path.
    """
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/{path}", headers={"Metadata-Flavor": "Google"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=timeout) as answer:
        return answer.read().decode().strip()


def watch() -> None:
    """Looks for a notice of preemption or maintenance, in a thread; it has the effect of SIGTERM.

    Source: Compute Engine's metadata keys `preempted` and `maintenance-event`.
    """
    threading.Thread(target=_watch, daemon=True, name="cloud notice").start()


def _watch() -> None:
    while not preemption.requested():
        for key, quiet in (("preempted", "FALSE"), ("maintenance-event", "NONE")):
            with contextlib.suppress(OSError):
                if (notice := metadata(f"instance/{key}", 10)) not in ("", quiet):
                    entry.note(f"\nthis VM's {key} is {notice}\n")
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
        time.sleep(_PERIOD)
