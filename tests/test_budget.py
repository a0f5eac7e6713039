"""The house stays small: lines and files of each package, and own imports inside functions.

A change that needs more raises the number here and says why in the same commit. docs/design.md has
the reasons for the measure.
"""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("benchmarks", "commands", "common", "configs", "engine", "scripts")
MOST = {  # lines, files that are not empty; 4,800 lines are the preparations of any folder of data
    # 1,600 more since photos have several labels, heat maps, tiles and empty images; 830 since logs
    # have full ranking, dates, baselines, rows that grow and vectors; 600 since translators begin
    # with OPUS-MT's models and CTranslate2 takes them
    "benchmarks": (25_380, 125),
    # 840 more since --mode=scaling: parts of the data, law, picture; 160 since config.steps_of
    # and similar items; 280 since translators are exported for CTranslate2, with their script; 420
    # since .po, XLIFF and TMX come back in their form
    "commands": (5_780, 30),
    # 175 more since placeholders survive translation, 130 since translators' files are read;
    # 15 since a container's CPU quota counts
    "common": (6_660, 47),
    "configs": (1_720, 24),
    # 2,080 more since any JAX program has a forecast, with its error; 400 since a step always fits;
    # 25 since sorts and gathers have a time; 15 since the totals come from the gradients' trace;
    # 80 since no save, report or evaluation keeps the devices waiting
    "engine": (10_480, 49),
    "scripts": (4_600, 24),
    # flags and recipes of predict.py; 20 more since garbage is collected at set steps
    "top": (1_400, 6),
}
MOST_LATE_IMPORTS = 14


def sources() -> dict[str, list[pathlib.Path]]:
    """The product's Python files by package."""
    files = {name: sorted(ROOT.glob(f"{name}/**/*.py")) for name in PACKAGES}
    return {**files, "top": sorted(ROOT.glob("*.py"))}


def late_imports(source: str, own: set[str]) -> set[int]:
    """The lines inside functions that import modules of this repository."""
    lines = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module or ""]
                elif isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                else:
                    continue
                if own & {name.split(".")[0] for name in names}:
                    lines.add(node.lineno)
    return lines


def test_every_package_keeps_to_its_lines_and_files():
    for name, paths in sources().items():
        sizes = [len(path.read_text().splitlines()) for path in paths]
        used = sum(sizes), sum(map(bool, sizes))
        assert used[0] <= MOST[name][0] and used[1] <= MOST[name][1], (name, used)


def test_own_modules_are_imported_at_the_top():
    files = [path for paths in sources().values() for path in paths]
    own = {*PACKAGES, *(path.stem for path in ROOT.glob("*.py"))}
    late = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line in sorted(late_imports(path.read_text(), own))
    ]
    assert len(late) <= MOST_LATE_IMPORTS, late


def test_a_late_import_is_counted_once():
    inner = """def f():
  def g():
    import engine.sharding
    from common import text
    import jax
"""
    assert late_imports(f"import engine\n{inner}", {"engine", "common"}) == {4, 5}
