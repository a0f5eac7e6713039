"""All modules can be imported with the versions installed here, beside those of a plug-in."""

import ast
import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from tests.conftest import FIXTURES
from tests.test_main import environment

ROOT = pathlib.Path(__file__).parents[1]
OWN = ("benchmarks", "commands", "common", "configs", "engine", "scripts")
FILES = [*ROOT.glob("*.py"), *(path for name in OWN for path in (ROOT / name).rglob("*.py"))]
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

# The program keeps main, train, models, input_pipeline, predict, resnet_main and the names of its
# packages for itself; its other modules are inside of these packages.
OF_A_PLUG_IN = (
    *("run", "start", "programs", "saving", "resuming", "evaluate", "recipe", "locations"),
    *("corruption", "patience", "diverging", "keys", "errors", "entry", "progress", "limits"),
)
PLUG_IN = f"""
import importlib

from benchmarks import languages

for name in {OF_A_PLUG_IN}:
    assert importlib.import_module(name).OWNER == "the plug-in", name


def make(config, cache_dir):
    return languages.make(config, cache_dir)
"""
PLUG_IN_RECIPE = """
from recipes import languages


def get_config():
    config = languages.get_config()
    config.benchmark = "plug_in"
    return config
"""


def test_every_module_can_be_imported():
    """In a process of its own: main.py defines flags, and others import TensorFlow."""
    paths = sorted({str(path.relative_to(ROOT)) for path in FILES})
    modules = [
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths
    ]
    modules.remove("scripts.bench.peers.torch_networks")  # PyTorch is no dependency
    assert len(modules) > 200
    command = [sys.executable, "-c", PROGRAM, *(name.replace("/", ".") for name in modules)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_imported_package_is_declared():
    """A module imports the dependencies; what only an extra has is imported where it is used."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements):
        return {re.split(r"[^\w-]", word)[0] for word in requirements}

    required = names(project["dependencies"])
    known = required | names(sum(project["optional-dependencies"].values(), []))
    of_module = importlib.metadata.packages_distributions()
    own = {path.stem for path in ROOT.glob("*.py")}

    def is_of(module, packages):
        distributions = of_module.get(module.split(".")[0], ())
        if len(distributions) == 1:  # else a namespace, such as google.cloud
            module = distributions[0].lower()
        words = re.sub(r"[._]", "-", module) + "-"
        return any(words.startswith(f"{package}-") for package in packages)

    undeclared = []
    for path in FILES:
        tree = ast.parse(path.read_text())
        at_start = {*tree.body}
        for node in ast.walk(tree):
            modules = []
            if isinstance(node, ast.Import):
                modules = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{each.name}" for each in node.names]
            packages = required if node in at_start else known
            undeclared += [
                f"{path.relative_to(ROOT)}: {module}"
                for module in modules
                if module.split(".")[0] not in (*OWN, *own, *sys.stdlib_module_names)
                and not is_of(module, packages)
            ]
    assert not undeclared


def run_python(*words, **variables):
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment(**variables),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def plug_in(tmp_path):
    """A folder with a benchmark and its modules, which have names that this program uses inside."""
    package = tmp_path / "mine/benchmarks/plug_in"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PLUG_IN)
    (tmp_path / "mine/plug_in_recipe.py").write_text(PLUG_IN_RECIPE)
    for name in OF_A_PLUG_IN:
        (tmp_path / f"mine/{name}.py").write_text('OWNER = "the plug-in"\n')
    return tmp_path / "mine"


def test_the_program_imports_no_module_of_a_plug_in(plug_in):
    """Even where the plug-in's folder comes before the program's."""
    for name in OF_A_PLUG_IN:
        (plug_in / f"{name}.py").write_text(f'raise SystemExit("{name} is shadowed")\n')
    names = "main, train, predict, resnet_main, models, input_pipeline"
    run_python("-P", "-c", f"import {names}", PYTHONPATH=f"{plug_in}:{ROOT}")


@pytest.mark.long
def test_a_plug_in_imports_its_own_modules_and_trains(plug_in, tiny_texts, tmp_path):
    words = [f"--config={plug_in}/plug_in_recipe.py", f"--workdir={tmp_path}/run"]
    words += [f"--config.{key}=2" for key in ("train_steps", "steps_per_eval")]
    words += ["--config.num_train_texts=72", "--config.num_eval_texts=23"]
    words += [f"--config.data_dir={tiny_texts}"]
    output = run_python("main.py", *words, PYTHONPATH=f"{plug_in}:{FIXTURES}")
    assert "finished: step 2 of 2" in output
