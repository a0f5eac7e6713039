"""Every module of the program can be imported with the versions that are installed here."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
OWN = ("benchmarks", "commands", "common", "configs", "engine", "scripts")
PROGRAM = """
import importlib, sys, traceback
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException:
        traceback.print_exc()
        failed.append(name)
sys.exit(", ".join(failed) or 0)
"""


def test_every_module_can_be_imported():
    """In a process of its own: main.py defines flags, and others import TensorFlow."""
    files = [*ROOT.glob("*.py"), *(path for name in OWN for path in (ROOT / name).rglob("*.py"))]
    paths = sorted({str(path.relative_to(ROOT)) for path in files})
    modules = [
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths
    ]
    assert len(modules) > 200
    command = [sys.executable, "-c", PROGRAM, *(name.replace("/", ".") for name in modules)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
