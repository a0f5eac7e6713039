"""What users start. A Python that is too old or lacks a package gets one line.

main.py, predict.py and resnet_main.py import this first, too. It needs the standard library only,
and the syntax of Python 3.6.
"""

import os
import shlex
import sys
import types

_before = sys.excepthook
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _advice() -> str:
    """What gives a Python with all packages, with its command."""
    venv = os.path.join(_ROOT, ".venv")
    is_active = os.path.realpath(sys.prefix) == os.path.realpath(venv)
    move = "" if os.getcwd() == _ROOT else f"cd {shlex.quote(_ROOT)} && "
    if os.path.exists(f"{venv}/bin/python") and not is_active:
        return f"activate the packages: {move}. .venv/bin/activate"
    return f"install the packages: {move}bash scripts/setup.sh && . .venv/bin/activate"


def _show(kind: type, error: BaseException, trace: "types.TracebackType | None") -> None:
    """Prints an exception: one line if a file of ours imports a package that is not installed."""
    last = trace
    while last and last.tb_next:
        last = last.tb_next
    path = os.path.relpath(last.tb_frame.f_code.co_filename if last else os.devnull, _ROOT)
    is_ours = not path.startswith((os.pardir, ".venv")) and "site-packages" not in path
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if not last or not is_ours or not name or "." in name:
        _before(kind, error, trace)
        return
    place = f"{path}, line {last.tb_lineno}, imports it"
    text = f"ERROR: {sys.executable} has no package {name!r} ({place}); {_advice()}"
    print(text, file=sys.stderr)


sys.excepthook = _show
if sys.version_info < (3, 11):  # noqa: UP036
    _PYTHON = f"{sys.executable} is Python {sys.version.split()[0]}"
    sys.exit(f"ERROR: {_PYTHON}, older than 3.11; {_advice()}")
