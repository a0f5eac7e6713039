"""Preflight: that it compiles what is run, what it says of a step, and children that die.

The compiler for TPUs is replaced by a program of the tests, but in the test that is marked slow.
"""

import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import benchmarks
import train
from commands import preflight
from commands.preflight import count_flops
from common.errors import ConfigError
from configs import ncf, resnet50
from engine.forecast import estimates, worker
from engine.forecast.estimates import Outcome
from engine.forecast.program import Program
from engine.plan import Programs, make_plan, read_settings
from tests.conftest import make_tiny_config
from tests.engine.forecast.test_estimates import JOB, TRAIN, V3

ROOT = Path(__file__).parents[2]


@pytest.fixture
def slice_of_this_machine(monkeypatch):
    """Every slice has this machine's devices."""
    slice_ = types.SimpleNamespace(devices=jax.devices())
    monkeypatch.setattr(preflight.topologies, "get_topology_desc", lambda *_, **__: slice_)


# What is preflighted is what is run.


def preflighted(
    config: Any, monkeypatch: pytest.MonkeyPatch, steps: tuple[str, ...] = ("train", "predict")
) -> list[str]:
    """The steps that preflight would compile for a slice of this machine's devices."""
    seen = []

    def program(lowered: Any, one: Any, say: Any) -> Program:
        seen.append(lowered.as_text())
        return TRAIN

    monkeypatch.setattr(preflight, "compile_program", program)
    monkeypatch.setattr(preflight, "_forward_flops", lambda benchmark: None)
    outcome = preflight.compiled(read_settings(config), V3, steps, lambda text: None)
    assert outcome.error == "" and outcome.train and bool(outcome.predict) == ("predict" in steps)
    return seen


@pytest.mark.long
@pytest.mark.parametrize("overrides", [{}, {"bn_span": 2, "moving_average_decay": 0.9}])
@pytest.mark.usefixtures("slice_of_this_machine")
def test_what_is_preflighted_is_what_is_run(overrides, tiny_records, tmp_path, monkeypatch):
    held = {"num_train_images": 90, "num_eval_images": 23, "train_steps": "2"}
    config = make_tiny_config(tiny_records, **held, **overrides).lock()
    ran = []

    class Lowered(Exception):
        """Both steps are: compiling them would only take time."""

    def record(lowered):
        ran.extend(one.as_text() for _, one in lowered)
        if len(ran) == 2:
            raise Lowered
        return lambda *arguments: None

    monkeypatch.setattr(train, "CompiledStep", record)
    with pytest.raises(Lowered):
        train.train_and_evaluate(read_settings(config, str(tmp_path)))
    assert preflighted(config, monkeypatch) == ran
    if not overrides:
        other = make_tiny_config(tiny_records, **held, label_smoothing=0.2).lock()
        assert preflighted(other, monkeypatch, ("train",))[0] != ran[0]


@pytest.mark.usefixtures("slice_of_this_machine")
def test_auto_finds_the_micro_batches_that_fit_the_slice(monkeypatch):
    full = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20G of 15.75G hbm."
    answers: list[Any] = [jax.errors.JaxRuntimeError(full), TRAIN, TRAIN]

    def program(lowered: Any, one: Any, say: Any) -> Program:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(preflight, "compile_program", program)
    monkeypatch.setattr(preflight, "_forward_flops", lambda benchmark: None)
    auto = {"gradient_accumulation_steps": "auto", "num_train_images": 90, "num_eval_images": 23}
    config, said = make_tiny_config("", **auto).lock(), []
    steps = ("train", "predict")
    outcome = preflight.compiled(read_settings(config), V3, steps, said.append)
    assert (outcome.error, outcome.micro_batches, answers) == ("", 2, [])
    assert estimates.row(outcome)["gradient_accumulation_steps"] == 2
    assert any("1 needs 20.00 GiB" in text and ": chosen" in text for text in said)
    answers[:] = [jax.errors.JaxRuntimeError(full)] * 9
    outcome = preflight.compiled(read_settings(config), V3, steps, said.append)
    assert outcome.fits is False and "no value fits" in outcome.error


@pytest.mark.usefixtures("slice_of_this_machine", "nothing_held_out")
def test_a_run_without_evaluation_takes_the_time_of_its_training(monkeypatch):
    monkeypatch.setattr(preflight, "compile_program", lambda *_: TRAIN)
    monkeypatch.setattr(preflight, "_forward_flops", lambda benchmark: None)
    config = make_tiny_config("", num_train_images=90, patience=2)
    outcome = preflight.compiled(read_settings(config), V3, ("train", "predict"), print)
    row = estimates.row(outcome)
    assert (outcome.error, outcome.predict, row["evaluation_seconds"]) == ("", None, 0)
    assert row["run_seconds"] == pytest.approx(12 * TRAIN.seconds)
    assert "complete run" in estimates.tables([row], "images")


@pytest.mark.long
def test_neither_data_nor_tensorflow_are_needed():
    code = """
    import sys, types
    sys.modules["tensorflow"] = None  # an import of it raises
    import jax
    from configs import resnet50
    from engine.forecast import topology
    from commands import preflight
    from engine.plan import read_settings
    slice_ = types.SimpleNamespace(devices=jax.devices())
    preflight.topologies.get_topology_desc = lambda *_, **__: slice_
    preflight.compile_program = lambda lowered, one, say: None
    preflight.combine = lambda *_: None
    config = resnet50.get_config()
    config.resnet_depth = 18
    job = read_settings(config.lock())
    print(preflight.compiled(job, *topology.parse_slices("v3-8"), ("train", "predict"), print))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "error=''" in done.stdout
    assert "steps=112603, evaluations=90, forward_flops=3996983296" in done.stdout


@pytest.mark.parametrize(
    "overrides", [{"train_batch_size": 12}, {"bn_span": 3}, {"train_steps": "5 parsecs"}]
)
@pytest.mark.usefixtures("slice_of_this_machine")
def test_what_the_run_would_refuse_is_said_in_its_words(overrides):
    job = read_settings(make_tiny_config("", **overrides))
    outcome = preflight.compiled(job, V3, ("train",), print)
    assert next(iter(overrides)) in outcome.error and "\n" not in outcome.error
    assert outcome.fits is None


@pytest.mark.usefixtures("slice_of_this_machine")
def test_a_step_that_does_not_fit(monkeypatch):
    def full(*_: Any) -> Program:
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM (16.02G).\n  and much more"
        )

    monkeypatch.setattr(preflight, "compile_program", full)
    monkeypatch.setattr(Programs, "lower_train", lambda *_: [({}, None)])
    outcome = preflight.compiled(read_settings(make_tiny_config("")), V3, ("train",), print)
    assert outcome.fits is False and outcome.train is None
    assert outcome.error == "the train step does not fit: Ran out of memory on HBM (16.02G)."


def test_the_flops_of_a_training_example():
    """The same by both ways to normalise; and of NCF, whose prediction ranks 1,000 items."""
    config = resnet50.get_config()
    counts = set()
    for config.batch_norm, config.bn_span in (("gram", 2), ("plain", 1)):
        counts.add(preflight._forward_flops(benchmarks.load(config, "")))
    assert counts == {8_178_368_512}  # of ResNet-50's prediction, too
    config = ncf.get_config()
    assert preflight._forward_flops(benchmarks.load(config, "")) == 213_248


@pytest.mark.parametrize(
    ("counts", "steps", "flops"),
    [([10, 21], (), 15), ([10, 20], (3, 1), 12), ([10, None], (), None)],
)
def test_the_flops_of_an_example_are_the_mean_over_the_steps_or_shapes(
    counts, steps, flops, monkeypatch
):
    benchmark: Any = types.SimpleNamespace(
        init=lambda key: ((), ()),
        loss=None,
        batch_spec=lambda split, size: [count and count * size for count in counts],
        stages=lambda: [types.SimpleNamespace(steps=n) for n in steps],
    )
    monkeypatch.setattr(preflight, "count_flops", lambda loss, params, state, spec, *_, **__: spec)
    assert preflight._forward_flops(benchmark) == flops


@pytest.mark.parametrize(("period", "evaluations"), [("1", 10), ("3", 4), ("11", 1), ("0", 1)])
def test_the_last_step_is_evaluated_once(period, evaluations):
    config = ncf.get_config()
    config.update({"train_batch_size": 4, "train_steps": "10", "steps_per_eval": period})
    settings = read_settings(config)
    benchmark: Any = settings.load_benchmark("")
    programs: Any = types.SimpleNamespace(settings=settings, benchmark=benchmark)
    job = preflight._job(programs, make_plan(settings, benchmark, 40))
    assert (job.steps, job.examples, job.evaluations) == (10, 40, evaluations)


# Children.


CHILD = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from multiprocessing.connection import Connection
from commands import preflight
from tests.engine.forecast.test_estimates import JOB, PREDICT, TRAIN
from engine.forecast.estimates import Outcome

def compiled(config, one, steps, progress, lower):
    progress("compiling the train step")
    print("noise of libtpu", flush=True)
    if one.chip.name == "v6e":
        os.write(2, b"F1121 check failed: x > 0\\n*** SIGSEGV received\\n    @ 0x7f00  f()\\n")
        os.kill(os.getpid(), signal.SIGSEGV)
    if one.chip.name == "v5p":
        raise AssertionError("a fault of this program's")
    if one.chip.name == "v4":
        with open({pid!r} + ".part", "w") as file:
            file.write(str(os.getpid()))
        os.rename({pid!r} + ".part", {pid!r})
        time.sleep(600)
    return Outcome(one, config.train_batch_size, JOB, TRAIN, PREDICT)

preflight.compiled = compiled
with Connection(int(sys.argv[2])) as line:  # the first argument is the module
    preflight.work(line)
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """The path of a program that stands in for the child."""
    path = tmp_path / "child.py"
    path.write_text(CHILD.format(root=str(ROOT), pid=str(tmp_path / "pid")))
    monkeypatch.setattr(worker, "_CHILD", [sys.executable, str(path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return path


def test_a_compiler_that_dies_is_one_line_and_the_others_go_on(compiler, capfd):
    config = resnet50.get_config().lock()
    assert preflight.run(read_settings(config), "v6e-8,v5p-8,v3-8") == 1
    out, err = capfd.readouterr()
    message = "the compiler died while compiling the train step: signal 11 (SIGSEGV)"
    assert f"{message}: F1121 check failed: x > 0\n" in out
    assert "exit code 1: AssertionError: a fault of this program's\n" in out
    assert ["v3:2x2", "v3-8", "4", "8", "128"] in [line.split()[:5] for line in out.splitlines()]
    assert "noise" not in out + err and "0x7f00" not in out + err
    assert f"v6e:2x4: {message}" in err
    assert err.count("v3:2x2: compiling the train step ...\n") == 1


def test_the_compiler_has_memory_laid_out_in_the_old_way(compiler, capfd):
    """With the usual layout libtpu 0.0.42.1 dies on train steps for v6e."""
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if hard == resource.RLIM_INFINITY:  # else an unlimited stack is not allowed here
        check = "import resource; assert resource.getrlimit(resource.RLIMIT_STACK)[0] == -1\n"
        compiler.write_text(check + compiler.read_text())
    assert preflight.run(read_settings(resnet50.get_config().lock()), "v3-8") == 0


def test_json(compiler, capfd, monkeypatch):
    """One slice has enough memory, the compiler for one dies, and one is too small."""

    def inspect(config, one):
        size = config.train_batch_size
        if one.chip.name == "v6e":
            return Outcome(one, size, error="the compiler died: signal 11 (SIGSEGV)", fits=None)
        if one.chip.name == "v3":
            return Outcome(one, size, error="Ran out of memory", fits=False)
        return Outcome(one, size, JOB, TRAIN, TRAIN)

    monkeypatch.setattr(preflight, "inspect", inspect)
    job = read_settings(resnet50.get_config().lock())
    assert preflight.run(job, "v5e-8,v6e-8,v3-8", as_json=True) == 1
    out = capfd.readouterr().out
    good, dead, full = json.loads(out)
    assert out.startswith('[\n  {\n    "slice": "v5e:2x4",\n')
    assert good["collectives"] == {"all-reduce": {"count": 3, "bytes": 102_425_264}}
    assert good["error"] == "" and good["fits"] is True
    assert dead["slice"] == "v6e:2x4" and "SIGSEGV" in dead["error"] and dead["fits"] is None
    assert full["fits"] is False and full["error"] == "Ran out of memory"


def test_without_libtpu(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^.*bash scripts/setup.sh tpu.*$"):
        preflight.run(read_settings(resnet50.get_config()), "v3-8")


MAIN = """
import importlib.util, sys
from engine.forecast import worker
worker._CHILD = [sys.executable, sys.argv.pop(1)]
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: name if name == "libtpu" else find_spec(name, *rest)
import main
from absl import app
app.run(main.main, flags_parser=main.parse_flags)
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


# A signal of each kind: SIGINT is SIGTERM with another code, which test_train.py sees.
@pytest.mark.parametrize(
    ("signum", "code", "slices"),
    [(signal.SIGTERM, 143, "v3-8,v4-8"), (signal.SIGKILL, -signal.SIGKILL, "v4-8")],
)
def test_a_signal_ends_the_compiler_as_well(signum, code, slices, compiler, tmp_path):
    command = [sys.executable, "-c", MAIN, str(compiler), "--mode=preflight", f"--tpu={slices}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command.append("--config=configs/resnet50.py")
    with subprocess.Popen(command, cwd=ROOT, env=env, **pipes) as process:
        while process.poll() is None and not (tmp_path / "pid").exists():
            time.sleep(0.05)
        assert process.poll() is None, process.communicate()
        child = int((tmp_path / "pid").read_text())
        process.send_signal(signum)
        out, _ = process.communicate()
    assert process.returncode == code, out
    assert "Traceback" not in out
    assert ("ms at least" in out) == (signum != signal.SIGKILL)  # what was compiled before
    while is_alive(child):  # a test that hangs here has failed
        time.sleep(0.05)


# The compiler itself.


@pytest.mark.slow
def test_resnet_50_compiles_for_a_tpu():
    """XLA's FLOPs leave out the padding that the analytic count has, and add what is no product."""
    pytest.importorskip("libtpu", reason="libtpu is not installed (requirements-tpu.txt)")
    outcome = preflight.inspect(read_settings(resnet50.get_config().lock()), V3)
    assert outcome.error == ""
    assert outcome.job and outcome.train and outcome.predict and outcome.job.forward_flops
    analytic = outcome.job.forward_flops * 128
    assert 0.95 < outcome.train.flops / (3 * analytic) < 1.10
    images = outcome.predict.flops / outcome.job.forward_flops  # of 128 among 8
    assert 0.9 < images / 16 < 1.1
    assert outcome.train.collectives["all-reduce"][1] >= 4 * 25_557_032
    assert 0.05 < estimates.row(outcome)["step_seconds"] < 0.3
    assert outcome.train.memory < V3.chip.memory / 2


def shaped(*sides):
    return jax.ShapeDtypeStruct(sides, jnp.float32)


def test_flops_of_matrix_products_and_loops():
    assert count_flops(jnp.matmul, shaped(3, 4), shaped(4, 5)) == 2 * 3 * 4 * 5
    assert count_flops(jax.jit(jnp.matmul), shaped(2, 3, 4), shaped(2, 4, 5)) == 2 * 2 * 3 * 4 * 5

    def powers(x):
        return jax.lax.scan(lambda y, _: (y @ x, None), x, None, length=6)[0]

    assert count_flops(powers, shaped(4, 4)) == 6 * 2 * 4**3

    def either(x):
        return jax.lax.cond(x[0, 0] > 0, lambda: x, lambda: x @ x)

    assert count_flops(either, shaped(4, 4)) == 2 * 4**3

    def by_platform(x):  # a form for some hardware is not the definition
        return jax.lax.platform_dependent(x, tpu=lambda x: x @ x @ x, default=lambda x: x @ x)

    assert count_flops(by_platform, shaped(4, 4)) == 2 * 4**3

    def endless(x):
        return jax.lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y @ x, x)

    assert count_flops(endless, shaped(4, 4)) is None


def test_flops_of_convolutions():
    def convolve(x, kernel, groups=1):
        return jax.lax.conv_general_dilated(
            x, kernel, (2, 2), "SAME", feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    expected = 2 * (2 * 4 * 4 * 6) * (3 * 3 * 4)
    assert count_flops(convolve, shaped(2, 8, 8, 4), shaped(3, 3, 4, 6)) == expected
    grouped = count_flops(lambda x, k: convolve(x, k, 2), shaped(2, 8, 8, 4), shaped(3, 3, 2, 6))
    assert grouped == expected // 2


def test_flops_of_resnet_50(tmp_path):
    """4.09 billion multiplications and additions for one image of 224 x 224, as published."""
    benchmark = benchmarks.load(resnet50.get_config().lock(), str(tmp_path))
    weights = jax.eval_shape(benchmark.init, jax.random.key(0))
    count = count_flops(benchmark.predict, *weights, *benchmark.batch_spec("eval", 1))
    assert count == pytest.approx(2 * 4.09e9, rel=0.001)
