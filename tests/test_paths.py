"""A path of a user's may be local or gs://: nothing that touches one knows local disks only.

Paths go through etils.epath or tf.io.gfile. What the standard library opens, lists or makes is
refused unless it is in ALLOWED. Functions of os.path that only cut and join text serve both.
"""

import ast
import fnmatch
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("benchmarks", "commands", "common", "configs", "engine", "scripts")
LOCAL_ONLY = re.compile(
    r"open|print_file|fileinput\..*|(io|gzip|bz2|lzma|codecs|zipfile|shelve|dbm|tarfile)\.open"
    r"|zipfile\.ZipFile|sqlite3\.connect|logging\.(handlers\..*|FileHandler)"
    r"|(shutil|glob|tempfile|pathlib|filecmp|mmap)\..+"
    r"|os\.(access|chdir|chmod|chown|link|listdir|lstat|makedirs|mkdir|mkfifo|open|readlink|remove"
    r"|removedirs|rename|renames|replace|rmdir|scandir|stat|statvfs|symlink|truncate|unlink|utime"
    r"|walk|fwalk)"
    r"|os\.path\.(?!(join|basename|dirname|split|splitext|expanduser)$).+"
    r"|numpy\.(save|savez|savez_compressed|savetxt|load|loadtxt|genfromtxt|fromfile|memmap)"
    r"|\.(tofile|makedirs|add_file)"  # of any object: gfile's makedirs never ends without a bucket
)
ALLOWED = {  # by file: the calls
    # Bytes in memory, files that gfile opened, files of this program, no file at all.
    "benchmarks/__init__.py": "pathlib.Path",
    "benchmarks/resnet/preparation/recognise.py": "os.path.commonpath",
    "benchmarks/resnet/preparation/annotations.py": "os.path.commonprefix",
    "benchmarks/ncf/names.py": "zipfile.ZipFile",
    "benchmarks/translation/vocabulary.py": "zipfile.ZipFile",  # of bytes
    "engine/report/writers.py": "shutil.get_terminal_size",
    "commands/predict/classes.py": "numpy.save",
    "commands/predict/items.py": "numpy.save",
    "common/data/caches.py": "numpy.*",
    "common/preparation/unread.py": "os.path.commonpath",
    "common/foreign/pickles.py": "zipfile.ZipFile",
    "commands/recipe.py": "os.*",
    "resnet_main.py": "os.path.relpath",
    # On this machine: /dev/null, /proc, /sys, temporary folders; epath copies what stays.
    "common/entry.py": "os.open",
    "engine/forecast/kernels.py": "pathlib.Path",
    "engine/compiler.py": "open",
    "engine/devices.py": "glob.glob open",
    "commands/doctor.py": "glob.glob open os.* tempfile.*",
    "commands/export/*": "os.* pathlib.Path tempfile.* shutil.copy",
    "benchmarks/translation/transformer/ctranslate.py": "pathlib.Path",
    "engine/forecast/buffers.py": "pathlib.Path",
    "engine/forecast/cache.py": "gzip.open open os.* .makedirs pathlib.Path tempfile.*",
    "engine/forecast/forecasts.py": "os.path.abspath os.path.isfile",
    "engine/forecast/stablehlo.py": "open",
    "engine/forecast/user_program.py": "os.*",
    "engine/forecast/worker.py": "tempfile.*",
    "commands/prove.py": "open os.* shutil.rmtree tempfile.*",
    "scripts/demo.py": "tempfile.*",
    "scripts/bench/calibrate.py": "pathlib.Path",
    "scripts/bench/input.py": "tempfile.*",
    "scripts/mlperf/results.py": "glob.escape",
    "scripts/mlperf/check.py": "os.path.abspath tempfile.*",
    # Unless '://' is in the path, or another class does the same for gs://.
    "benchmarks/ncf/ratings.py": "zipfile.ZipFile",
    "engine/checkpoint/checkpointer.py": "os.path.abspath shutil.*",
    "engine/cluster/processes.py": "open",
    "engine/locations.py": "os.path.abspath",
    "commands/predict/outputs.py": "shutil.get_terminal_size",
    "commands/predict/sources.py": "glob.* open os.*",
    "common/data/files.py": "os.path.isfile",
    "common/data/data_manifest.py": "os.path.isfile",
    "common/data/storage.py": ".makedirs os.path.lexists glob.has_magic",
    "common/locks.py": "open os.* .makedirs tempfile.TemporaryFile",
    "common/limits.py": "os.path.exists os.path.isdir os.path.isfile",
    "common/foreign/tf_checkpoints.py": "glob.has_magic os.path.abspath os.symlink shutil.* "
    "tempfile.*",
    "common/foreign/__init__.py": "open os.* shutil.* pathlib.Path",
    "common/preparation/sources.py": "os.* tarfile.open zipfile.ZipFile",
    "scripts/__init__.py": "os.path.*",  # this program's own
    "scripts/prepare.py": "os.path.*",
    "scripts/archives.py": "open os.* shutil.* .makedirs tarfile.open zipfile.ZipFile",
    "scripts/forecast.py": "open os.path.isdir",
    "scripts/gradient.py": "os.*",
    "scripts/public_sets.py": "os.makedirs .makedirs",
}


def calls(source: str) -> set[str]:
    """The names of what only local disks know in a Python file."""
    nodes, names = [*ast.walk(ast.parse(source))], {"open": "open"}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}

    def full(node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            base = full(node.value)
            return f"{base}.{node.attr}" if base else ""
        return names.get(node.id, "") if isinstance(node, ast.Name) else ""

    called = [node for node in nodes if isinstance(node, ast.Call)]
    own = {c.func for c in called if ast.unparse(c).endswith("(__file__)")}
    found = {full(node) for node in nodes if node not in own}
    found |= {f".{c.func.attr}" for c in called if isinstance(c.func, ast.Attribute)}
    return {name for name in found if LOCAL_ONLY.fullmatch(name)}


def test_every_path_may_be_local_or_gs():
    paths = [*ROOT.glob("*.py"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.py"))]
    found = {(p.relative_to(ROOT).as_posix(), c) for p in paths for c in calls(p.read_text())}
    assert len(paths) > 200
    rows = [(file, call) for file, allowed in ALLOWED.items() for call in allowed.split()]
    wrong = [one for one in found if not any(all(map(fnmatch.fnmatchcase, one, r)) for r in rows)]
    assert not sorted(wrong), "works on local disks only; use epath or tf.io.gfile"
    stale = [r for r in rows if not any(all(map(fnmatch.fnmatchcase, one, r)) for one in found)]
    assert not stale, "no longer needed in ALLOWED"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from os import path as p\nlist(map(p.isdir, open(x)))", {"open", "os.path.isdir"}),
        ("import shutil\nshutil.move(a, b), gfile.makedirs(c)", {"shutil.move", ".makedirs"}),
        ("from pathlib import Path\nPath(path), Path(__file__)", {"pathlib.Path"}),
        ("import os\nos.path.join(a, os.path.abspath(__file__)), epath.Path(b).open()", set()),
    ],
)
def test_planted_code_is_found(source, found):
    assert calls(source) == found
