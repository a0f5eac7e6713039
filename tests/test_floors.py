"""Imports go only downwards, or within one's own package; and importing does nothing else."""

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
PACKAGES = ("benchmarks", "commands", "common", "configs", "engine", "scripts")
SOURCES = [
    *ROOT.glob("*.py"),
    *(path for name in PACKAGES for path in ROOT.glob(f"{name}/**/*.py")),
]

# Who may import what, besides itself. "seam": the files of benchmarks/ that name no benchmark.
ROWS = {
    "main": "commands train engine common",
    "predict": "commands common",
    "train": "engine common",
    "commands": "engine seam common",
    "engine": "seam common",
    "benchmark": "family seam models input_pipeline common",  # no other family, not the engine
    "models": "common",
    "input_pipeline": "common",
    "common": "",
    "configs": "",
    # Beside the nine: what the rows above stand on, and the doors, which go anywhere.
    "seam": "common",
    "resnet_main": "common",
    "scripts": "main predict train commands engine benchmark seam models input_pipeline common",
}
EXCEPTIONS = {  # file: what it may import besides, and why
    "commands/scaling/parts.py": "train",  # the parts are runs
    # `scripts` itself: a Python without the packages gets one line. Flags of the tutorial.
    "main.py": "scripts|resnet_main",
    # Of others' weights; before TensorFlow.
    "predict.py": r"scripts|configs\.resnet50|configs\.finetune|engine\.environment",
    "resnet_main.py": "scripts",
    "engine/checkpoint/model_source.py": r"configs\._loop",  # the folder of compiled programs
}
ONLY_IN = {
    "orbax": ["engine/checkpoint/checkpointer.py"],
    "clu": ["engine/report/writers.py"],
    # mllog; the checkers
    "mlperf_logging": ["engine/mlperf.py", "scripts/mlperf/check.py"],
}
# The floors inside two packages, from above: an import goes down, or stays on its floor. What has
# no name here is on the lowest.
INSIDE = {
    "engine": (
        *("evaluate pace checks", "fit intervals stopping corruption mlperf", "run checkpoint"),
        *("plan", "report cluster"),
    ),
    "common": (
        "preparation foreign exportable translator_files",
        "data images locks text",
        "tensorflow onnx_graph keys entry cli limits trees",
    ),
}
RECIPES_NEED = r"ml_collections|collections\.abc|math|typing"


def imports(path: str, source: str) -> set[str]:
    """Full names of all that a file imports, at its top or later: {"engine.sharding.Feed", ...}."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = path.split("/")[: -node.level] if node.level else []
            module = [*package, *filter(None, [node.module])]
            names |= {".".join([*module, alias.name]) for alias in node.names}
    return names


def floor(name: str) -> str:
    """Where a module is, or what it has; "" if it is not ours."""
    top, *rest = name.split(".")
    if top == "benchmarks" and rest:
        modules = [path.stem for path in (ROOT / top).glob("*.py")]
        is_seam = rest[0] in modules or (len(rest) == 1 and not (ROOT / top / rest[0]).is_dir())
        return "seam" if is_seam else "benchmark"
    if top == "benchmarks":
        return "seam"
    return top if top in PACKAGES or (ROOT / f"{top}.py").exists() else ""


def faults(path: str, source: str) -> list[str]:
    """What a file imports against the rules; `path` is relative to the root."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    own = floor(module)
    if own not in ROWS:
        return [f"{path} has no floor"]
    neighbours = [
        f"{package}."
        for package in benchmarks.modules().values()
        if not f"{module}.".startswith(package)
    ]
    violations = []
    for name in sorted(imports(path, source)):
        other, top = floor(name), name.split(".")[0]
        if other and re.match(rf"({EXCEPTIONS.get(path, '$')})(\.|$)", name):
            continue
        if own == other == "benchmark":  # of the same family, and no neighbour there
            wrong = module.split(".")[1] != name.split(".")[1]
            wrong |= any(f"{name}.".startswith(package) for package in neighbours)
        elif other:
            wrong = other not in (own, *ROWS[own].split())
        else:
            wrong = path not in ONLY_IN.get(top, [path])
            wrong |= top == "flax" and own in ("train", "engine")
            wrong |= own == "configs" and not re.match(rf"({RECIPES_NEED})(\.|$)", name)
        violations += [f"{path} imports {name}"] if wrong else []
    return violations


@pytest.mark.parametrize("package", INSIDE)
def test_imports_inside_a_package_go_down(package):
    floors = [names.split() for names in INSIDE[package]]

    def level(part: str) -> int:
        return next((i for i, names in enumerate(floors) if part in names), len(floors))

    parts = {path.stem for path in (ROOT / package).iterdir()}
    assert all(name in parts for names in floors for name in names)
    climbs = []
    for path in (ROOT / package).glob("**/*.py"):
        own = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
        for name in imports(str(path.relative_to(ROOT)), path.read_text()):
            top, _, rest = name.partition(".")
            if top == package and rest and level(rest.split(".")[0]) < level(own):
                climbs.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not climbs


def test_imports_go_downwards():
    found = [
        fault
        for path in SOURCES
        for fault in faults(path.relative_to(ROOT).as_posix(), path.read_text())
    ]
    assert found == []


def test_every_exception_is_needed():
    """An exception that nobody uses any more goes away."""
    for path, allowed in EXCEPTIONS.items():
        names = imports(path, (ROOT / path).read_text())
        for one in allowed.split("|"):
            assert any(re.match(rf"{one}(\.|$)", name) for name in names), (path, one)


@pytest.mark.parametrize(
    ("path", "line", "forbidden"),
    [
        ("main.py", "def f():\n  import models", "models"),
        ("train.py", "from flax import linen", "flax.linen"),
        ("engine/plan.py", "from benchmarks.ncf import make", "benchmarks.ncf.make"),
        ("benchmarks/ncf/models.py", "from ..resnet import ResNet", "benchmarks.resnet.ResNet"),
        (
            "benchmarks/detection/ssd/use.py",
            "from benchmarks.detection.mask_rcnn import models",
            "benchmarks.detection.mask_rcnn.models",
        ),
        ("engine/step.py", "from . import checkpoint\nfrom .. import train", "train"),
        ("engine/report/writers.py", "import orbax.checkpoint as ocp", "orbax.checkpoint"),
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
    packages = "".join(f", {module}" for module in benchmarks.modules().values())
    code = f"""
import sys
import train, engine.evaluate{packages}
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
