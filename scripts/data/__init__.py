"""Former names of commands: `python -m scripts.data.coco` runs `python -m scripts.prepare coco`."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import pathlib
import sys
from collections.abc import Sequence
from types import ModuleType

_FORMER = pathlib.Path(__file__).parents[1] / "former.py"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds a program for every module `scripts.data.NAME`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, _ = fullname.rpartition(".")
        if package != __name__:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(_FORMER))

    def get_source(self, fullname: str) -> str:
        name = fullname.rpartition(".")[2]
        command = name if name == "validate" else f"prepare {name}"
        run = f"runpy.run_path({str(_FORMER)!r}, run_name={command!r})"
        return f"import runpy\n\nif __name__ == '__main__':\n    {run}\n"


sys.meta_path.append(_Finder())
