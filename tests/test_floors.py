"""Imports go only downwards, or within one's own room; and importing does nothing else."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

import benchmarks
from tests.conftest import FIXTURES

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("benchmarks", "configs", "engine", "modes", "ops", "scripts")
SOURCES = [*ROOT.glob("*.py"), *(path for name in FOLDERS for path in ROOT.glob(f"{name}/**/*.py"))]
LOCAL = {*FOLDERS, *(path.stem for path in SOURCES if path.parent == ROOT)}

# It names no benchmark.
_SEAM = r"benchmarks$|benchmarks\.(base|hints|load|module|modules|names|settling|uses|mlperf)"
_PREPARATION = r"benchmarks(\.\w+)*\.preparation"
_BELOW = rf"errors|keys|engine|ops\.(files|progress|shards|trees)|{_SEAM}"
_RUN = rf"{_BELOW}|run|programs|start"
ALLOWED = {  # by floor: which modules, of those that are ours, with all that is in them
    "entry": r"errors",
    "main": rf"entry|{_RUN}|evaluate|train|modes|locations|recipe",
    "locations": r"errors|engine\.paths|ops\.foreign$",
    "recipe": r"errors|keys|resnet_main",
    "resnet_main": r"entry|errors",
    # _loop: the keys of the loop that an older run lacks
    "modes": rf"entry|{_RUN}|evaluate|patience|resuming|configs\._loop|modes|"
    r"ops\.(foreign$|layers\.(boundary|gram_norm)|limits|network|parallel|portable|tables)|"
    r"ops\.images\.(input_spec|photos|prepared)",
    "predict": r"entry|errors|engine|modes|configs\.resnet50|ops\.(console|limits)",
    "train": rf"{_RUN}|corruption|mlperf_log|evaluate|patience|saving",
    "saving": rf"{_RUN}|resuming|diverging",
    "diverging": _RUN,
    "corruption": _RUN,
    "evaluate": _RUN,
    "patience": rf"{_RUN}|evaluate",
    "mlperf_log": _RUN,
    "start": rf"{_BELOW}|run|programs|resuming",
    "resuming": rf"{_BELOW}|run|programs",
    "programs": rf"{_BELOW}|run",
    "run": _BELOW,
    "benchmarks": r"errors|keys|models|input_pipeline|ops|"
    r"benchmarks$|benchmarks\.(base|hints|mlperf|module|sharded|uses|FAMILY)",
    "models": r"errors|keys|ops",
    "input_pipeline": r"errors|keys|ops",
    "engine": r"entry|errors|keys|engine|ops\.trees",
    "ops": r"errors|ops",
    "keys": r"errors",
    "errors": r"errors",
    "configs": r"configs|ml_collections|collections\.abc|math|typing",
    "scripts": rf"entry|{_RUN}|evaluate|train|recipe|modes\.(demo|prove|trained)|predict|scripts|"
    rf"{_PREPARATION}|ops\.(console|limits|preparation|records)|ops\.images\.(manifest|photos)",
    "scripts/bench": rf"entry|{_RUN}|scripts|modes|input_pipeline|ops|"
    r"benchmarks\.resnet\.(input|records|settings)",
    "scripts/bench/peers": rf"{_RUN}|modes|scripts|models|ops|benchmarks",  # our shapes and inputs
}
ONLY_IN = {
    "orbax": ["engine/checkpoint.py"],
    "clu": ["engine/report/writers.py"],
    # mllog; the checkers
    "mlperf_logging": ["engine/mlperf_formats.py", "scripts/mlperf/official.py"],
}


def imports(path: str, source: str) -> set[str]:
    """Full names of all that a file imports, at its top or later: {"engine.mesh.Feed", ...}."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = path.split("/")[: -node.level] if node.level else []
            module = [*package, *filter(None, [node.module])]
            names |= {".".join([*module, alias.name]) for alias in node.names}
    return names


def faults(path: str, source: str) -> list[str]:
    """What a file imports against the rules; `path` is relative to the root."""
    floor, *rest = path.removesuffix(".py").split("/")
    for inner in ("scripts/bench", "scripts/bench/peers"):
        floor = inner if path.startswith(f"{inner}/") else floor
    if floor not in ALLOWED:
        return [f"{path} has no floor"]
    allowed = ALLOWED[floor].replace("FAMILY", rest[0] if rest else "")
    module = f"{path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}."
    rooms = [f"{room}." for room in benchmarks.modules().values()]
    others = [room for room in rooms if not module.startswith(room)]  # no neighbour is imported
    violations = []
    for name in sorted(imports(path, source)):
        top = name.split(".")[0]
        if top in LOCAL or floor == "configs":
            wrong = not re.match(rf"({allowed})(\.|$)", name)
            if floor == "benchmarks":
                wrong |= any(f"{name}.".startswith(room) for room in others)
        else:
            wrong = path not in ONLY_IN.get(top, [path])
            wrong |= top == "flax" and floor in ("train", "evaluate", "engine")
        violations += [f"{path} imports {name}"] if wrong else []
    return violations


def test_imports_go_downwards():
    found = [
        fault
        for path in SOURCES
        for fault in faults(path.relative_to(ROOT).as_posix(), path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("path", "line", "forbidden"),
    [
        ("main.py", "def f():\n  import models", "models"),
        ("train.py", "import benchmarks.resnet as b", "benchmarks.resnet"),
        ("train.py", "from flax import linen", "flax.linen"),
        ("evaluate.py", "from train import Trainer", "train.Trainer"),
        ("benchmarks/ncf/models.py", "from ..resnet import ResNet", "benchmarks.resnet.ResNet"),
        (
            "benchmarks/resnet/mlperf.py",
            "from benchmarks.resnet50 import x",
            "benchmarks.resnet50.x",
        ),
        ("engine/step.py", "from . import checkpoint\nfrom .. import train", "train"),
        ("engine/report/curves.py", "import orbax.checkpoint as ocp", "orbax.checkpoint"),
        ("ops/shards.py", "from engine.mesh import Feed", "engine.mesh.Feed"),
        ("configs/ncf.py", "import jax", "jax"),
        ("helpers.py", "", ""),
    ],
)
def test_a_planted_fault_is_found(path, line, forbidden):
    harmless = "import ml_collections\n" if path.startswith("configs/") else "import jax\n"
    expected = f"{path} imports {forbidden}" if forbidden else f"{path} has no floor"
    assert faults(path, f"{harmless}{line}\n") == [expected]


def test_importing_starts_no_device_and_no_tensorflow():
    """With a platform that does not exist, asking jax for a device raises."""
    rooms = "".join(f", {module}" for module in benchmarks.modules().values())
    code = f"""
import sys
import train, evaluate{rooms}
print(sorted(name for name in sys.modules if name.split(".")[0] == "tensorflow"))
import jax
try:
    jax.devices()
except RuntimeError as error:
    print("no_such_platform" in str(error))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "no_such_platform", "PYTHONPATH": str(FIXTURES)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["[]", "True", ""]
