"""A path of a user's may be local or gs://: nothing that touches one knows local disks only.

Paths go through etils.epath or tf.io.gfile. What the standard library opens, lists or makes is
refused unless it is in ALLOWED. Functions of os.path that only cut and join text serve both.
"""

import ast
import fnmatch
import os
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LOCAL_ONLY = re.compile(
    r"(open|print_file|fileinput\..*|(io|gzip|bz2|lzma|codecs|zipfile|shelve|dbm|tarfile)\.open"
    r"|zipfile\.ZipFile|sqlite3\.connect|logging\.(handlers\..*|FileHandler)"
    r"|(shutil|glob|tempfile|pathlib|filecmp|mmap)(\..+)?"
    r"|os\.(access|chdir|chmod|chown|link|listdir|lstat|makedirs|mkdir|mkfifo|open|readlink|remove"
    r"|removedirs|rename|renames|replace|rmdir|scandir|stat|statvfs|symlink|truncate|unlink|utime"
    r"|walk|fwalk)"
    r"|os\.path\.(?!(join|basename|dirname|split|splitext|expanduser)$).+"
    r"|numpy\.(save|savez|savez_compressed|savetxt|load|loadtxt|genfromtxt|fromfile|memmap)"
    r"|PIL\.Image\.open|matplotlib\.(pyplot|image)\.(imread|imsave|savefig))"
)
# Methods, whatever their object is: makedirs is gfile's, which never returns without a bucket.
METHODS = {"savefig", "tofile", "makedirs", "add_file"}
DETECTION, TRANSLATION = (
    f"benchmarks/{family}/preparation" for family in ("detection", "translation")
)
ALLOWED = {  # (file, function, call), the last two as patterns: why it is right
    ("benchmarks/__init__.py", "modules", "pathlib.Path"): "of Python's packages",
    ("ops/array_cache.py", "*", "numpy.*"): "of bytes in memory",
    ("benchmarks/ncf/ratings.py", "_open", "zipfile.ZipFile"): "of a file that gfile opened",
    (f"{DETECTION}/zips.py", "_opened", "zipfile.ZipFile"): "of a file that gfile opened",
    (f"{TRANSLATION}/run.py", "Run.*", "*"): "pairs wait on a local disk for their shard",
    (f"{TRANSLATION}/shards.py", "*", "open"): "of that local disk",
    ("predict.py", "main", "os.open"): "/dev/null",
    ("modes/predict/outputs.py", "_place", "os.path.realpath"): "unless '://' is in it",
    ("modes/predict/boxes.py", "_write", "shutil.get_terminal_size"): "no file",
    ("modes/predict/items.py", "run", "shutil.get_terminal_size"): "no file",
    ("modes/predict/classes.py", "_write", "shutil.get_terminal_size"): "no file",
    ("modes/predict/classes.py", "_array", "numpy.save"): "of bytes in memory",
    # gfile takes no name that is not UTF-8, and no pattern with **.
    ("modes/predict/sources.py", "_of_one", "*"): "unless '://' is in it",
    ("modes/predict/sources.py", "_walk", "os.walk"): "unless '://' is in it",
    ("modes/predict/sources.py", "_read", "*"): "unless '://' is in it",
    ("modes/predict/texts.py", "_open", "open"): "unless '://' is in it",
    ("modes/predict/texts.py", "_is_picture", "open"): "unless '://' is in it",
    ("modes/predict/texts.py", "_size", "os.path.*"): "unless '://' is in it",
    ("modes/prove/__init__.py", "*", "*"): "in a temporary folder, which --workdir does not name",
    ("modes/prove/case.py", "make_images", "*"): "in that folder",
    ("modes/prove/child.py", "main", "open"): "in that folder",
    ("modes/prove/models.py", "table", "open"): "this repository's own file",
    ("modes/prove/numbers.py", "*", "open"): "this repository's own file",
    # Libraries write and read exports on a local disk; `_publish` copies them with epath.
    ("modes/demo/answers.py", "_predicted", "*"): "in a temporary folder",
    ("modes/export/__init__.py", "*", "*"): "in a temporary folder",
    ("modes/export/formats.py", "_write_hf", "open"): "in that folder",
    ("modes/export/programs.py", "*", "*"): "in that folder",
    ("modes/export/onnx_boxes.py", "export", "os.path.getsize"): "in that folder",
    ("modes/export/onnx_graph.py", "Graph.write", "open"): "in that folder",
    ("modes/export/stablehlo.py", "_save", "os.remove"): "in that folder",
    ("modes/export/stablehlo.py", "*", "open"): "in that folder",
    ("ops/limits.py", "special", "os.stat"): "unless '://' is in it",
    ("ops/files.py", "find", "os.path.isfile"): "unless '://' is in it",
    ("ops/files.py", "read_manifest", "os.path.isfile"): "unless '://' is in it",
    ("benchmarks/ncf/titles.py", "_find", "zipfile.ZipFile"): "of a file that gfile opened",
    ("benchmarks/ncf/ratings.py", "locate", "os.path.isfile"): "unless '://' is in it",
    ("ops/images/photos.py", "convert", "PIL.Image.open"): "of bytes in memory",
    ("ops/foreign/pickles.py", "_load", "zipfile.ZipFile"): "of a file that gfile opened",
    ("ops/foreign/downloads.py", "*", "*"): "the caches of this machine",
    ("modes/doctor.py", "run", "tempfile.TemporaryDirectory"): "if the workdir is read-only",
    ("modes/doctor.py", "_holders", "*"): "/proc, of this machine",
    ("modes/doctor.py", "_tpu_in_use", "os.path.exists"): "the TPU's lock on this machine",
    ("modes/doctor.py", "_surroundings", "os.access"): "/dev/shm, of this machine",
    ("scripts/tpu/gke.py", "manifest", "open"): "deploy/jobset.yaml, of this repository",
    ("scripts/tpu/gke.py", "_check_cluster", "shutil.which"): "kubectl, of this machine",
    ("engine/checkpoint.py", "Checkpointer.__init__", "os.path.abspath"): "unless '://' is in it",
    ("engine/checkpoint.py", "Checkpointer._check_space", "shutil.disk_usage"): "if _is_local",
    ("engine/checkpoint.py", "Checkpointer.wait", "shutil.rmtree"): "if _is_local",
    ("engine/cluster/hostlog.py", "HostLog.save", "open"): "gs:// has a log of its own",
    ("engine/cluster/lock.py", "LocalLock.check", "os.stat"): "of the local lock only",
    ("engine/cluster/lock.py", "LocalLock.__init__", "open"): "flock; gs:// has a lock of its own",
    ("engine/paths.py", "check_writable", "os.path.abspath"): "unless '://' is in it",
    ("engine/gpus.py", "*", "*"): "/proc and /dev, of this machine",
    ("engine/mesh.py", "tpu_chips", "glob.glob"): "/sys, of this machine",
    ("engine/mesh.py", "tpu_chips", "open"): "/sys, of this machine",
    ("engine/report/writers.py", "Reporter.live", "shutil.get_terminal_size"): "no file",
    ("engine/cluster/tunnel.py", "Tunnel.*", "*"): "a socket, on this machine only",
    ("recipe.py", "*", "*"): "the recipes of this program",
    ("resnet_main.py", "*", "os.path.*"): "files of this program",
    ("modes/preflight.py", "inspect", "tempfile.TemporaryFile"): "gone when it is read",
    ("modes/preflight.py", "_child", "tempfile.TemporaryDirectory"): "gone with the compiler",
    ("engine/aot/kernels.py", "read", "pathlib.Path"): "that folder",
    ("scripts/bench/input.py", "main", "tempfile.TemporaryDirectory"): "what is measured",
    ("scripts/bench/input.py", "write", "os.makedirs"): "in that folder",
    ("scripts/job/folder.py", "LocalFolder.*", "*"): "BucketFolder does the same for gs://",
    ("scripts/job/folder.py", "_item", "os.lstat"): "of LocalFolder",
    ("scripts/job/folder.py", "_mounts", "open"): "/proc, of this machine",
    ("scripts/job/folder.py", "open_folder", "os.path.*"): "unless it begins with gs://",
    ("ops/preparation/sources.py", "_check_local", "*"): "only called for a local folder",
    ("benchmarks/ncf/preparation/ratings.py", "write", ".makedirs"): "unless '://' is in it",
    (f"{DETECTION}/digit_scenes.py", "write_coco", ".makedirs"): "unless '://' is in it",
    ("scripts/mlperf/check.py", "check", "tempfile.TemporaryDirectory"): "what is checked",
    ("scripts/mlperf/system.py", "_host", "shutil.disk_usage"): "this machine's disk",
    ("scripts/mlperf/system.py", "_read", "open"): "/proc, of this machine",
    ("ops/files.py", "write", ".makedirs"): "unless '://' is in it",
    ("scripts/job/staging.py", "_copy", "*"): "BucketFolder leaves before, or downloads into this",
    ("scripts/job/staging.py", "_real", "os.path.realpath"): "of LocalFolder",
    ("ops/preparation/writing.py", "State._makedirs", ".makedirs"): "unless '://' is in it",
}


def sources() -> list[pathlib.Path]:
    """Every Python file and shell script but tests and virtual environments."""
    paths = []
    for folder, folders, files in os.walk(ROOT):
        kept = [name for name in folders if name[0] != "." and name not in ("tests", "runs")]
        folders[:] = [n for n in kept if not os.path.exists(f"{folder}/{n}/pyvenv.cfg")]
        paths += [pathlib.Path(folder, n) for n in files if n.endswith((".py", ".sh"))]
    return sorted(paths)


def _of_this_machine(call: ast.Call) -> bool:
    """Whether the path is this program's own, or written there and of the kernel's."""
    path = call.args[0] if call.args else None
    if isinstance(path, ast.JoinedStr):
        path = path.values[0]
    if isinstance(path, ast.Constant):
        return str(path.value).startswith(("/proc/", "/sys/", "/dev/"))
    return isinstance(path, ast.Name) and path.id == "__file__"


class Walker(ast.NodeVisitor):
    """Collects (function, name) of what only local disks know."""

    def __init__(self, tree: ast.AST):
        self.calls: set[tuple[str, str]] = set()
        self._names, self._place, self._memory = {"open": "open"}, [], [set()]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.split(".")[0]
                    self._names[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    self._names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        self._pil = any(name.startswith("PIL") for name in self._names.values())
        self.visit(tree)

    def _full(self, node: ast.AST) -> str:
        if isinstance(node, ast.Name):
            return self._names.get(node.id, "")
        base = self._full(node.value) if isinstance(node, ast.Attribute) else ""
        return f"{base}.{node.attr}" if base and isinstance(node, ast.Attribute) else ""

    def _add(self, name: str) -> None:
        self.calls.add((".".join(self._place), name))

    def _in_memory(self, call: ast.Call) -> bool:
        """Whether the file is an io.BytesIO that was made in this function."""
        file = call.args[0] if call.args else None
        if isinstance(file, ast.Call):
            return self._full(file.func) == "io.BytesIO"
        return isinstance(file, ast.Name) and file.id in self._memory[-1]

    def _scope(self, node: ast.AST) -> None:
        self._place.append(getattr(node, "name", ""))
        self._memory.append(
            {
                target.id
                for inner in ast.walk(node)
                if isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Call)
                for target in inner.targets
                if isinstance(target, ast.Name) and self._full(inner.value.func) == "io.BytesIO"
            }
        )
        self.generic_visit(node)
        self._place.pop()
        self._memory.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _scope

    def visit_Call(self, node: ast.Call) -> None:
        name, memory = self._full(node.func), self._in_memory(node)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if (
            (name == "PIL.Image.open" and memory)
            or (name == "tarfile.open" and any(k.arg == "fileobj" for k in node.keywords))
            or (LOCAL_ONLY.fullmatch(name) and _of_this_machine(node))
        ):
            for argument in (*node.args, *node.keywords):
                self.visit(argument)
            return
        saves = METHODS | ({"save"} if self._pil else set())
        if method in saves and not memory and not LOCAL_ONLY.fullmatch(name):
            self._add(f".{method}")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._full(node)
        if LOCAL_ONLY.fullmatch(name):
            self._add(name)
        else:
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        name = self._full(node)
        if LOCAL_ONLY.fullmatch(name) and name not in ("shutil", "glob", "tempfile", "pathlib"):
            self._add(name)


def faults(source: str) -> set[tuple[str, str]]:
    """(function, name) of what only local disks know in a Python file."""
    return Walker(ast.parse(source)).calls


_COMMANDS = r"cp|mv|rm|ln|mkdir|rmdir|touch|cat|ls|cd|find|du"


def shell_faults(source: str) -> set[str]:
    """Lines that give to a command for local files what may hold a user's path.

    That is a variable of the environment that main.py reads, or one made of it or of an argument.
    """
    names = {r"TPU_MODEL_DIR", "MLP_GCS_MODEL_DIR", r"MLP_PATH_GCS\w*"}
    for name, value in re.findall(r"\b(\w+)=(\S+)", source):
        if re.search(rf"\$\{{?({'|'.join(names)}|argument|word)\b", value):
            names.add(name)
    path = rf"""["']?\$\{{?({"|".join(sorted(names))})\b"""
    uses = (
        rf"(^|[;&|(]|\bthen|\bdo|\belse|\bif|!)\s*({_COMMANDS})\b[^;&|]*\s{path}",
        rf"[<>]\s*{path}",
        rf"(\[\[?|\btest)\s(.*\s)?-[defrswxL]\s+{path}",
    )
    lines = [line.strip() for line in source.splitlines()]
    return {line for line in lines if any(re.search(use, line.split(" #")[0]) for use in uses)}


def everything() -> set[tuple[str, str, str]]:
    """(file, function, call) of all that only local disks know."""
    calls = set()
    for path in sources():
        file, text = path.relative_to(ROOT).as_posix(), path.read_text()
        if path.suffix == ".py":
            calls |= {(file, *row) for row in faults(text)}
        else:
            calls |= {(file, "", line) for line in shell_faults(text)}
    return calls


def matches(call: tuple[str, str, str], allowed: tuple[str, str, str]) -> bool:
    return call[0] == allowed[0] and all(map(fnmatch.fnmatchcase, call[1:], allowed[1:]))


def test_every_path_may_be_local_or_gs():
    calls = everything()
    wrong = sorted(row for row in calls if not any(matches(row, a) for a in ALLOWED))
    assert not wrong, "works on local disks only; use epath or tf.io.gfile"
    stale = [row for row in ALLOWED if not any(matches(f, row) for f in calls)]
    assert not stale, "no longer needed in ALLOWED"


def test_the_walk_finds_the_files():
    names = {path.relative_to(ROOT).as_posix() for path in sources()}
    expected = {
        "main.py",
        "ops/preparation/writing.py",
        "scripts/test.sh",
        "engine/mesh.py",
        "ops/shards.py",
    }
    assert expected <= names and not [name for name in names if "tests/" in name or "venv" in name]


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("open(path)", "open"),
        ("import io\nio.open(path)", "io.open"),
        ("import os\nos.path.exists(path)", "os.path.exists"),
        ("from os import path as p\np.isdir(x)", "os.path.isdir"),
        ("from os.path import getsize\ngetsize(x)", "os.path.getsize"),
        ("import os as o\no.makedirs(path, exist_ok=True)", "os.makedirs"),
        ("import os\nlist(map(os.remove, paths))", "os.remove"),
        ("import os.path\nos.path.abspath(path)", "os.path.abspath"),
        ("import shutil\nshutil.copyfile(a, b)", "shutil.copyfile"),
        ("from shutil import rmtree as r\nr(path)", "shutil.rmtree"),
        ("import glob\nglob.glob(f'{path}/*')", "glob.glob"),
        ("from glob import iglob\niglob(path)", "glob.iglob"),
        ("from pathlib import Path\nPath(path).mkdir()", "pathlib.Path"),
        ("import tempfile\ntempfile.mkdtemp()", "tempfile.mkdtemp"),
        ("import numpy as np\nnp.save(path, x)", "numpy.save"),
        ("import numpy as np\nnp.load(path)", "numpy.load"),
        ("import json\njson.dump(x, open(path, 'w'))", "open"),
        ("from PIL import Image\nImage.open(path)", "PIL.Image.open"),
        ("from PIL import Image\nimage.save(path, 'JPEG')", ".save"),
        ("import gzip\ngzip.open(path)", "gzip.open"),
        ("import tarfile\ntarfile.open(path)", "tarfile.open"),
        ("figure.savefig(path)", ".savefig"),
        ("array.tofile(path)", ".tofile"),
        ("gfile.makedirs(path)", ".makedirs"),
        ("import os\nif '/proc/' in x:\n    os.listdir(x)", "os.listdir"),
    ],
)
def test_planted_code_is_found(source, call):
    assert faults(source) == {("", call)}
    lines, indent = source.splitlines(), "\n        "
    method = f"class A:\n    def f(self):{indent}{indent.join(lines)}\n"
    assert faults(method) == {("A.f", call)}


@pytest.mark.parametrize(
    "source",
    [
        "from etils import epath\nepath.Path(path).open('w').write(x)",
        "import os\nos.path.join(folder, os.path.basename(name)), os.environ, os.getpid()",
        "import os\nos.path.dirname(os.path.abspath(__file__))",
        "open('/proc/meminfo'), open(f'/sys/{name}')",
        "import io\ndef f():\n    out = io.BytesIO()\n    figure.savefig(out, format='png')",
        "import io\nfrom PIL import Image\nImage.open(io.BytesIO(data), formats=kinds)",
        "import tarfile\ntarfile.open(fileobj=window)",
        "checkpointer.save(step, state)",
        "from tensorflow.io import gfile\ngfile.GFile(path), gfile.listdir(path)",
    ],
)
def test_code_for_both_is_left_alone(source):
    assert faults(source) == set()


def test_a_function_is_named():
    source = "class A:\n    def f(self):\n        def g():\n            open(x)\nopen(y)"
    assert faults(source) == {("A.f.g", "open"), ("", "open")}


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ('mkdir -p "$TPU_MODEL_DIR"', True),
        ("cp a.txt ${MLP_PATH_GCS_IMAGENET}/x", True),
        ('if [[ -d "$workdir" ]]; then', True),
        ('echo done >"$workdir/log"', True),
        ('test -e $TPU_MODEL_DIR && rm -rf "$workdir"', True),
        ('.venv/bin/python main.py --workdir="$workdir"', False),
        ('[[ -n "$TPU_MODEL_DIR" && "$workdir" != gs://* ]]', False),
        ('mkdir -p "$venv"', False),
        ("echo $workdir # then rm", False),
    ],
)
def test_shell_commands_for_local_files_are_found(line, is_found):
    assert bool(shell_faults(f'workdir="${{argument#*=}}"\n{line}\n')) == is_found
