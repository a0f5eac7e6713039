"""The command line, as a user types it: in a process of its own."""

import ast
import dataclasses
import importlib
import inspect
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import main
import scripts
import train
from commands import MODES, recipe
from common import keys
from common.errors import UserError
from engine import locations
from engine.plan import read_settings
from tests.conftest import TINY, make_tiny_config
from tests.test_train import assert_same_state, rows, state_on_disk, timeless

ROOT = Path(__file__).parent.parent
VARIABLES = ("TPU_MODEL_DIR", "PS_MODEL_PATH", "MLP_GCS_MODEL_DIR", "MLP_PATH_GCS_IMAGENET")


def command(*arguments, config="configs/digits.py", **overrides):
    keys = [f"--config.{key}={value}" for key, value in overrides.items()]
    return [sys.executable, "main.py", f"--config={config}", *keys, *map(str, arguments)]


def environment(**extra):
    return {k: v for k, v in os.environ.items() if k not in VARIABLES} | extra


def run(*arguments, env=None, config="configs/digits.py", **overrides):
    words = command(*arguments, config=config, **overrides)
    env = environment(**(env or {}))
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)


def started(words, **extra) -> Any:
    """A process whose output, errors among it, is read while it runs."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(words, cwd=ROOT, env=environment(**extra), text=True, **pipes)


def fails_with(done, *words):
    """The run failed with one line, without a stack trace."""
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    assert len(lines) == 1, done.stderr
    for word in words:
        assert str(word) in lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--workdir=w", "--config.trian_steps=5"],
            ["'trian_steps'", "did you mean train_steps? (all: docs/config.md)"],
        ),
        (["--workdir=w", "--wrokdir=x"], ["wrokdir", "workdir"]),
        (["--workdir=w", "extra"], ["'extra'"]),
        (["--workdir=w", "--watch"], ["--watch goes with --mode=eval, not with --mode=train_and_"]),
        (["--mode=eval", "--json"], ["--json goes with --mode=doctor or --mode=preflight, not"]),
        (["--mode=eval", "--eval_timeout=0"], ["--eval_timeout=0", "more than 0"]),
        (["--mode=eval", "--mode=export"], ["--mode=export takes no --config: the"]),
        (["--mode=preflight", "--tpu=v5e:3x"], ["--tpu=v5e:3x", "v5e:4x4"]),
        (["--config=configs/resnet51.py"], ["--config=configs/resnet51.py: there is no such file"]),
        (["--config=configs/ncf.py", "--config=configs/digits.py"], ["given more than once"]),
        (["--config=configs/_loop.py"], ["--config names no recipe"]),
        ([], ["--workdir=DIR", "TPU_MODEL_DIR"]),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(arguments, words):
    files = [word for word in arguments if word.startswith("--config=")]
    others = [word for word in arguments if word not in files[:1]]
    done = run(*others, config=(files or ["configs/digits.py"])[0].removeprefix("--config="))
    fails_with(done, *words)
    assert done.stdout == ""


@pytest.mark.parametrize("after", [["--config=configs/digits.py"], ["-config", "x.py"], []])
def test_a_key_before_its_recipe_is_refused(after):
    argv = ["main.py", "--workdir=w", "--config.seed=1", *after]
    with pytest.raises(UserError, match=r"--config.seed: give the recipe before its keys"):
        recipe.check_command(argv)
    recipe.check_command(["main.py", "--config=configs/digits.py", "--config.seed=1"])


def test_help_lists_the_flags():
    words = [sys.executable, "main.py", "--help"]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True)
    for flag in ("config", "workdir", "checkpoint"):
        assert f"  --{flag}: " in done.stdout, flag


@pytest.mark.parametrize(
    "words",
    [
        ["main.py", "--help"],
        ["main.py"],
        ["main.py", "--config=nothing.py"],
        ["main.py", "--config=configs/digits.py", "--config.batchsize=3"],
        ["resnet_main.py", "--help"],
        ["-m", "scripts.prepare", "--help"],
    ],
)
def test_a_command_line_is_read_before_the_libraries_are_imported(words):
    command = [sys.executable, "-X", "importtime", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "common.errors" in names and not names & {"jax", "flax", "tensorflow", "orbax"}


DOORS = [
    *([f"{name}.py"] for name in ("main", "predict", "resnet_main", "scripts/forecast")),
    *(
        ["-m", ".".join(path.relative_to(ROOT).with_suffix("").parts)]
        for path in sorted(ROOT.glob("scripts/**/*.py"))
        if 'if __name__ == "__main__":' in path.read_text()
    ),
    *(["-m", f"tests.{name}"] for name in ("torture", "device.models")),
]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door[-1])
def test_a_python_without_the_packages_gets_one_line(door):
    """-S leaves them out; scripts.forecast names jax by itself, because it needs nothing else."""
    words = [sys.executable, "-E", "-S", *door]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    if "forecast" in door[-1]:
        assert 'pip install "jax[tpu]"' in done.stderr
    else:
        assert re.match(r"ERROR: .*/python\S* has no package '\w+' \(\w\S*, line \d+", done.stderr)
        assert ". .venv/bin/activate\n" in done.stderr


@pytest.mark.parametrize("door", ["scripts/__init__", "main", "predict", "resnet_main"])
def test_an_old_python_gets_one_line(door):
    """It must be able to read the file, up to its first import."""
    tree = ast.parse((ROOT / f"{door}.py").read_text(), feature_version=(3, 7))
    first = next(node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
    assert door == "scripts/__init__" or ast.unparse(first) == "import scripts"
    code = "import sys; sys.version_info = (3, 9, 2); sys.version = '3.9.2 (x)'; import scripts"
    words = [sys.executable, "-E", "-S", "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "is Python 3.9.2, older than 3.11; " in done.stderr


@pytest.mark.parametrize("is_made", [False, True])
def test_the_advice_is_a_command_for_this_folder(is_made, tmp_path, monkeypatch):
    monkeypatch.setattr(scripts, "_ROOT", str(tmp_path))
    if is_made:
        (tmp_path / ".venv/bin").mkdir(parents=True)
        (tmp_path / ".venv/bin/python").touch()
    setup = "" if is_made else "bash scripts/setup.sh && "
    for folder, move in ((ROOT, f"cd {tmp_path} && "), (tmp_path, "")):
        monkeypatch.chdir(folder)
        assert scripts._advice().endswith(f" the packages: {move}{setup}. .venv/bin/activate")


@pytest.mark.parametrize(
    "line", ["1 / 0", "import json.nosuch", "import common.nosuch", "import nosuch"]
)
def test_other_exceptions_keep_their_traceback(line):
    """Also where a package that is installed imports one that is not."""
    words = [sys.executable, "-c", f"import scripts; exec(compile({line!r}, '/x.py', 'exec'))"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("Traceback")


def test_every_mode_names_a_function_that_takes_its_flags():
    """`main.py` imports it when the mode is chosen."""
    choices: Any = main.flags.FLAGS["mode"].parser
    for name, mode in MODES.items():
        module, _, function = mode.function.partition(":")
        arguments = mode.arguments(*mode.flags)
        joining = [None] if mode.hosts == "unjoined" else []
        called = getattr(importlib.import_module(module), function)
        inspect.signature(called).bind("settings", *arguments, *joining)
        assert name in choices.enum_values
        assert all(flag in main.flags.FLAGS for flag in mode.flags)


@pytest.mark.parametrize(
    ("text", "argument", "message"),
    [
        ("x = 1", "", "has no function get_config()"),
        ("def get_config(:", "", ", line 1: invalid syntax"),
        ("import nosuchmodule", "", ", line 1: ModuleNotFoundError: No module named"),
        ("def get_config():\n    raise RuntimeError('a\\nb')", "", ", line 2: RuntimeError: a"),
        ("def get_config():\n    return 3", "", "get_config() returns 'int', not a ConfigDict"),
        ("def get_config():\n    return {}", "", "get_config() returns 'dict', not a ConfigDict"),
        ("def get_config(name):\n    return {}", "", "mine.py: TypeError: get_config() missing 1"),
        ("def get_config():\n    return {}", ":small", "this recipe takes no name; use --config="),
        ("def get_config(name):\n    return {}[name]", ":x", ", line 2: KeyError: 'x'"),
    ],
)
def test_a_file_that_is_no_recipe(text, argument, message, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        recipe.load(f"{path}{argument}")
    line = str(caught.value)
    assert message in line and str(path) in line and "\n" not in line


def test_a_recipe_that_lacks_keys(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import ml_collections\n"
        "def get_config():\n    return ml_collections.ConfigDict({'benchmark': 'resnet'})"
    )
    fails_with(run("--workdir=w", config=path), "has no config.seed; configs", "_loop.py")


def test_a_recipe_runs_once(tmp_path):
    """Also where its values, or a mistake in them, are compared with the file's."""
    path = tmp_path / "mine.py"
    path.write_text("print('it runs')\nfrom configs.digits import get_config")
    unknown = run("--workdir=w", config=path, trian_steps=5)
    fails_with(unknown, "did you mean train_steps")
    nowhere = run(f"--workdir={tmp_path}/run", config=path, data_dir="/nowhere")
    fails_with(nowhere, "/nowhere")
    assert [done.stdout.count("it runs") for done in (unknown, nowhere)] == [1, 1]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"data_dir": "/nowhere"}, ["/nowhere", "no such folder", "--config.data_dir"]),
        (
            {"image_size": 16_384, "train_batch_size": 4096},
            ["are free", "--config.train_batch_size=4096 and --config.image_size=16384"],
        ),
        ({"data_dir": __file__}, [__file__, "it is a file, not a folder", "--config.data_dir"]),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_compiled(
    overrides, words, tiny_records, tmp_path, monkeypatch
):
    """The errors that main.py makes lines of; see `test_an_error_is_one_line`."""
    monkeypatch.setattr(train.Trainer, "_compile", None)
    config = make_tiny_config(**{"data_dir": tiny_records, **overrides})
    with pytest.raises(UserError) as caught:
        train.train_and_evaluate(read_settings(config.lock(), str(tmp_path)))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_failed_write_is_one_line_and_its_details_are_in_the_log(tiny_ratings, tmp_path):
    """TensorStore prints a traceback for each file, Orbax logs several."""
    job = {"data_dir": tiny_ratings, "compilation_cache": "", "min_ratings": 2, "gmf_dim": 4}
    job |= {"eval_negatives": 20, "train_batch_size": 16, "eval_batch_size": 8, "train_steps": 2}
    job |= {"mlp_layers": "(512,256)"}  # half a megabyte; the step is quick to compile
    env = {k: v for k, v in environment().items() if k != "JAX_COMPILATION_CACHE_DIR"}
    words = command(f"--workdir={tmp_path}/run", config="configs/ncf.py", **job)
    # In KiB: less than the arrays, more than the picture of the curves.
    limit = ["bash", "-c", 'ulimit -f 200; exec "$@"', "bash"]
    done = subprocess.run([*limit, *words], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"ERROR: the last checkpoint could not be saved in {tmp_path}")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "Traceback" in (tmp_path / "run" / "hosts" / "host-000.log").read_text()


def test_environment_names_the_folders(monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO", logger="tpu_suite")
    from configs import resnet50

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    config = keys.read_config(locations.Keys, resnet50.get_config())
    with pytest.raises(UserError, match="--workdir=DIR"):
        locations.workdir(None)
    assert locations.data_dir(config) == "gs://cloud-tpu-test-datasets/fake_imagenet"
    assert "WARNING" in caplog.text
    monkeypatch.setenv("MLP_GCS_MODEL_DIR", "gs://b/mlp")
    assert locations.workdir(None) == "gs://b/mlp"
    monkeypatch.setenv("PS_MODEL_PATH", "/artifacts")
    assert locations.workdir(None) == "/artifacts"
    monkeypatch.setenv("TPU_MODEL_DIR", f"{tmp_path}/")
    assert locations.workdir(None) == str(tmp_path)
    assert locations.workdir("gs://b/flag") == "gs://b/flag"
    assert locations.data_dir(config) == config.data_fallback
    (tmp_path / "input_data").mkdir()
    assert locations.data_dir(config) == f"{tmp_path}/input_data"
    monkeypatch.setenv("MLP_PATH_GCS_IMAGENET", "gs://b/imagenet")
    assert locations.data_dir(config) == "gs://b/imagenet"
    config = dataclasses.replace(config, data_dir="mine")
    assert locations.data_dir(config) == "mine"


@pytest.fixture(scope="module")
def uninterrupted(tiny_records, tmp_path_factory):
    """The workdir of a whole run from the command line, and what it printed."""
    workdir = tmp_path_factory.mktemp("whole")
    env = {"TPU_MODEL_DIR": str(workdir), "MLP_PATH_GCS_IMAGENET": tiny_records}
    done = run(env=env, **TINY, data_dir="")
    assert done.returncode == 0, done.stderr
    return workdir, done


@pytest.mark.long
def test_the_whole_run_prints_what_a_newcomer_needs(uninterrupted):
    workdir, done = uninterrupted
    out = done.stdout
    assert f"workdir: {workdir} (from $TPU_MODEL_DIR)" in out
    assert "(from $MLP_PATH_GCS_IMAGENET)" in out
    assert "90 images to train; 23 to evaluate" in out
    assert "12 steps of 16 images = 2.13 epochs" in out
    assert out.count("\nstep ") == 6
    assert out.count("\nEVAL step ") == 3
    assert " left\n" in out
    assert "finished: step 12 of 12, top 1 accuracy" in out
    for name in ("checkpoints", "metrics.jsonl", "learning_curves.png"):
        assert f"{workdir}/{name}" in out
    assert done.stderr == ""
    config = json.loads((workdir / "config.json").read_text())
    assert config["train_steps"] == "12"


@pytest.mark.long
def test_eval_mode_says_the_same(uninterrupted):
    workdir, _ = uninterrupted
    data = json.loads((workdir / "config.json").read_text())["data_dir"]
    done = run(f"--workdir={workdir}", "--mode=eval", "--checkpoint=12", **TINY, data_dir=data)
    assert done.returncode == 0, done.stderr
    last = rows(workdir)[-1]
    assert f"top 1 accuracy {100 * last['top_1_accuracy']:.2f} %" in done.stdout
    assert rows(workdir / "eval")[-1]["loss"] == pytest.approx(last["loss"], rel=1e-6)


def wait_for(process, path, needle):
    """Until `needle` is in a file, or the process has ended."""
    while process.poll() is None and not (path.exists() and needle in path.read_text()):
        time.sleep(0.02)


@pytest.mark.parametrize("seed", [pytest.param(i, marks=pytest.mark.slow) for i in range(9)])
def test_kill_9_at_random_moments(seed, uninterrupted, tiny_records, tmp_path):
    workdir, _ = uninterrupted
    draw = random.Random(seed)
    arguments = command(f"--workdir={tmp_path}", **TINY, data_dir=tiny_records)
    kills = 0
    for _ in range(20):
        with open(tmp_path / "log", "w") as log:
            process = subprocess.Popen(
                arguments, cwd=ROOT, env=environment(), stdout=log, stderr=log, text=True
            )
            wait_for(process, tmp_path / "log", "compiled in")
            time.sleep(draw.uniform(0, 2.5))
            process.kill()
            if process.wait() == 0:
                break
            kills += 1
        if kills == 3:
            assert run(*arguments[3:], **{}).returncode == 0
            break
    assert_same_state(state_on_disk(workdir, 12), state_on_disk(tmp_path, 12))
    assert timeless(rows(workdir)) == timeless(rows(tmp_path))


# What is slow in each phase of a command's start: modules and a name of theirs, or an import.
PHASES = {
    "imports": "",
    "the workdir": "engine.run check_folder",
    "counting": "common.data.files find",
    "restoring": "engine.checkpoint.checkpointer:Checkpointer restore",
}

STOPPED = """
import importlib, runpy, sys, time

def slow(*args, **kwargs):
    print("slow now", flush=True)
    time.sleep(60)

class Finder:
    def find_spec(self, name, path=None, target=None):
        slow() if name == "train" else None

*owners, name = sys.argv.pop(1).split() or [""]
for owner in owners:
    module, _, kind = owner.partition(":")
    holder = importlib.import_module(module)
    setattr(getattr(holder, kind) if kind else holder, name, slow)
if not owners:
    sys.meta_path.insert(0, Finder())
sys.argv[0] = "main.py"
runpy.run_path("main.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    "phase",
    ["counting", *(pytest.param(p, marks=pytest.mark.slow) for p in PHASES if p != "counting")],
)
def test_sigterm_in_any_phase_of_a_start(phase, tiny_records, tmp_path, request):
    """Whatever the program was at: exit code 143, and no other error is made of it."""
    workdir = tmp_path / "run"
    if phase == "restoring":
        shutil.copytree(request.getfixturevalue("uninterrupted")[0], workdir)
    words = command(f"--workdir={workdir}", **{**TINY, "train_steps": 15}, data_dir=tiny_records)
    with started([words[0], "-c", STOPPED, PHASES[phase], *words[2:]]) as process:
        output = ""
        for line in process.stdout:
            output += line
            if "slow now" in line:
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 143, output
    assert "ERROR" not in output and "Traceback" not in output, output
