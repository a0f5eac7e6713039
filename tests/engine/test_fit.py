"""config.gradient_accumulation_steps = "auto": the fewest micro-batches that fit."""

import dataclasses
import math
import shutil
import threading
import types
from typing import Any

import jax
import numpy as np
import pytest

import train
from common.errors import ConfigError, DeviceError
from engine import evaluate, fit, sharding
from engine.checkpoint.model_source import peek
from engine.cluster import guard
from engine.fit import DoesNotFit, Fit
from engine.plan import Programs, make_plan, read_settings
from engine.report.history import History
from engine.sharding import Feed
from tests.benchmarks.translation import test_translators as translators
from tests.conftest import make_tiny_config
from tests.test_train import fresh_signals, rows  # noqa: F401

AUTO = {"gradient_accumulation_steps": "auto"}
FULL = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.5G of 15.75G hbm."


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


# --- The rule.


@pytest.mark.parametrize("seed", range(40))
def test_the_smallest_number_that_fits_is_found(seed):
    """Against all divisors; needs fall with the number, but need not be proportional to 1 / n."""
    draw = np.random.default_rng(seed)
    numbers = divisors(int(draw.choice([1, 16, 60, 64, 720, 1024])))
    fixed, gradients, work = draw.uniform(1, 10), draw.uniform(0, 5), draw.uniform(0, 100)
    power = draw.choice([0.3, 0.8, 1.0, 1.5])
    needed = {n: fixed + gradients * (n > 1) + work / n**power for n in numbers}
    if seed % 4 == 0:  # a compiler that says nothing of what does not fit
        needed = {n: math.inf if need > 30 else need for n, need in needed.items()}
    free = draw.uniform(0.5, 1.1) * min(needed[numbers[0]], 60)
    asked = []

    def needs(number: int) -> float:
        asked.append(number)
        return needed[number]

    found, tried = fit.smallest(numbers, needs, fixed, free)
    assert found == min((n for n in numbers if needed[n] <= free), default=0)
    assert tried == {n: needed[n] for n in asked} and len(asked) == len(tried)
    if power == 1.0 and seed % 4:
        assert len(asked) <= 4


def test_one_program_is_enough_where_it_fits():
    asked: list[int] = []
    fit.smallest(divisors(64), lambda n: asked.append(n) or 5.0, 1.0, 5.0)
    assert asked == [1]


# --- Programs of a device with so much memory.


class Compiler:
    """Says what the program of a number of micro-batches, or for a batch of evaluation, needs."""

    def __init__(self, refuses: tuple[Any, ...] = ()):
        self.asked: list[Any] = []
        self.refuses = refuses

    def __call__(self, what: Any) -> Any:
        what = what.micro_batches if isinstance(what, Programs) else what
        self.asked.append(what)
        if what in self.refuses:
            raise jax.errors.JaxRuntimeError(FULL)
        return what


def a_fit(said: list[str], memory: Any, free: float, **overrides: Any) -> Fit:
    """The fit of a tiny ResNet in batches of 16 on two of the devices."""
    config = make_tiny_config("", **{**AUTO, **overrides})
    settings = read_settings(config)
    programs = Programs.make(settings, devices=jax.devices()[:2])
    state = programs.abstract_state(make_plan(settings, programs.benchmark, 90))
    return Fit(programs, state, True, lambda: free, memory, said.append)


def test_a_line_says_how_each_number_came_out():
    said: list[str] = []
    needs = {1: 20.0, 2: 11.0, 4: 7.0, 8: 5.0}
    compiled = Compiler()
    fitting = a_fit(said, lambda n: needs[n] * 2**30, 8.0 * 2**30)
    programs, step = fitting.train(compiled)
    assert (programs.micro_batches, step, programs.norm_examples) == (4, 4, 2)
    assert set(compiled.asked) <= {1, 2, 4, 8} and {1, 2, 4} <= set(compiled.asked)
    line, note = said
    assert line.startswith("gradient_accumulation_steps: 1 needs 20.00 GiB, the device has 8.00 G")
    assert "; 2 needs 11.00 GiB; 4 needs 7.00 GiB: chosen" in line
    assert "2 of the 16 images" in note  # on each device four parts of its eight
    assert a_fit(said, needs.get, 1.0, gradient_accumulation_steps=2).train(Compiler())[1] == 2
    assert len(said) == 2  # a number in the config is not looked into


def test_the_compiler_of_a_tpu_may_refuse():
    said: list[str] = []
    fitting = a_fit(said, lambda n: 3.0, math.inf)  # only the compiler knows the memory
    assert fitting.train(Compiler(refuses=(1, 2)))[0].micro_batches == 4
    assert "1 is refused; 2 is refused; 4 needs" in said[0]
    fitting = a_fit(said, lambda n: 3.0, 16.0 * 2**30)
    assert fitting.train(Compiler(refuses=(1,)))[0].micro_batches == 2
    assert "1 needs 20.50 GiB, the device has 16.00 GiB; 2 needs 0.00 GiB: chosen" in said[-2]


def test_what_never_fits_is_refused_with_figures():
    fitting = a_fit([], lambda n: 9.0 * 2**30, 8.0 * 2**30)
    for work, key in ((fitting.train, "gradient_accumulation_steps"), (fitting.predict, "eval_")):
        with pytest.raises(DoesNotFit, match=rf"{key}.*: no value fits: .*9.00 GiB.* 8.00 GiB"):
            work(Compiler())
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):  # another error is another

        def broken(programs: Any) -> Any:
            raise jax.errors.JaxRuntimeError("INTERNAL: no")

        fitting.train(broken)


def test_evaluation_predicts_the_largest_part_that_fits():
    said: list[str] = []
    fitting = a_fit(said, lambda size: size * 2.0**30, 4.5 * 2**30)  # a batch of 8 on 2 devices
    assert fitting.predict(Compiler()) == (4, 4)
    assert said[0].startswith("eval_batch_size: 8 needs 8.00 GiB") and "4 needs 4.00 G" in said[0]
    fixed = a_fit(said, lambda size: 1e30, 0.0, gradient_accumulation_steps=1)
    assert fixed.predict(Compiler()) == (8, 8)


def test_hosts_take_the_number_that_fits_all_of_them(monkeypatch):
    """Two hosts, of which one has less memory and the other a program that needs more."""
    meeting, values, found = threading.Barrier(2, timeout=60), {}, {}

    def largest(value: float) -> float:
        values[threading.current_thread().name] = value
        meeting.wait()
        result = max(values.values())
        meeting.wait()
        return result

    monkeypatch.setattr(sharding, "largest_of_processes", largest)
    fits = [a_fit([], lambda n, k=k: (24.0 + k) / n, 20.0 - 8 * k) for k in (0, 1)]
    monkeypatch.setattr(fit, "_batch", lambda *_: 0.0)

    def host(number: int) -> None:
        compiled = Compiler()
        found[number] = fits[number].train(compiled)[1], compiled.asked

    threads = [threading.Thread(target=host, args=(k,), name=str(k)) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] and found[0][0] == 4  # 25 / 2 is more than 12


def test_a_span_in_images_fixes_the_number():
    config = make_tiny_config("", bn_span="2/8", **AUTO)
    programs = Programs.make(read_settings(config), devices=jax.devices()[:4])
    assert (programs.micro_batches, programs.norm_examples) == (2, 2)
    with pytest.raises(DeviceError, match="bn_span=2/6"):
        Programs.make(read_settings(make_tiny_config("", bn_span="2/6", **AUTO)))


def test_mlperf_needs_a_number():
    config: Any = make_tiny_config("", **AUTO)
    config.mlperf.format = "mllog"
    with pytest.raises(ConfigError, match="gradient_accumulation_steps='auto'"):
        read_settings(config)


# --- The memory of this run's devices.


def test_simulated_devices_share_the_memory_of_their_host(monkeypatch):
    fitting = a_fit([], lambda step: 0.0, 0.0)
    programs, state = fitting.programs, fitting.state
    arrays = jax.tree.leaves(state)
    asked = []

    def memory_free(limit: float) -> int:
        asked.append(limit)
        return 10**9

    monkeypatch.setattr(guard, "memory_free", memory_free)
    needed = {"train": {("a",): 10**6, ("b",): 10**5}, "eval": {("c",): 10**7}}
    monkeypatch.setattr(type(programs.benchmark), "host_bytes", lambda _, split, *__: needed[split])
    alone, later = Fit.of_run(programs, state, "eval"), 2**29  # threads and other libraries
    assert alone.free() == (10**9 - later - 10**7) / 2 and not alone.trains
    copied = sum(4 * x.size for x in arrays)  # by a save
    own = Fit.of_run(programs, state, "train", "eval")
    assert own.free() == (10**9 - later - 11_100_000 - copied) / 2 and own.trains
    assert asked == [0.95] * 2  # config.host_memory_limit


def test_a_gpu_has_what_jax_may_still_take():
    def device(**stats: int) -> Any:
        return types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats or None)

    def free(*devices: Any) -> float:
        mesh = types.SimpleNamespace(local_devices=devices, devices=np.array(devices))
        programs: Any = types.SimpleNamespace(mesh=mesh, settings=None)
        state: Any = {}
        return Fit.of_run(programs, state, "train").free()

    full = device(bytes_limit=1000, bytes_in_use=400)
    assert free(device(bytes_limit=900), full) == pytest.approx(0.95 * 600)
    assert free(device()) == math.inf  # some TPUs


# --- Runs.


@pytest.fixture(scope="module")
def shared(tmp_path_factory, data):
    """(settings of a run in a folder, what each number of micro-batches needs of a device).

    The Transformer has no BatchNorm, and here no dropout, whose masks depend on the number.
    """
    sizes = {"train_batch_size": 64, "eval_batch_size": 64, "dropout": 0.0}

    def settings(folder: Any, steps: Any = "auto") -> Any:
        more = {"gradient_accumulation_steps": steps, **sizes}
        return translators.settings("transformer", data["transformer"], folder, **more)

    programs = Programs.make(settings(tmp_path_factory.mktemp("unused"), 1))
    examples = programs.benchmark.open("train")
    plan = make_plan(programs.settings, programs.benchmark, examples)
    state, needs = programs.abstract_state(plan), {}
    for number in (1, 2, 4, 8):  # 8 of 64 rows are on a device
        cut = dataclasses.replace(programs, micro_batches=number)
        ((batch, lowered),) = cut.lower_train(plan, state, programs.abstract_totals(plan, state))
        sizes_ = lowered.compile().memory_analysis()
        parts = ("argument", "output", "generated_code", *3 * ["temp"])  # see engine/fit.py
        needs[number] = sum(getattr(sizes_, f"{part}_size_in_bytes") for part in parts)
        needs[number] -= sizes_.alias_size_in_bytes
        needs[number] += 3 * sum(4 * x.size for x in jax.tree.leaves(batch)) / 8  # that wait
    return settings, needs


data = translators.data


def trained(settings: Any, free: float, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(the losses of a run whose devices have so much memory, its manifest, its batches)."""
    batches = []

    class Recorded(Feed):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                batches.append(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(batch)))
                yield batch

    monkeypatch.setattr(train, "Feed", Recorded)
    monkeypatch.setattr(fit, "_free", lambda *_: free)
    train.train_and_evaluate(settings)
    losses = [row["loss"] for row in rows(settings.workdir) if row["split"] == "train"]
    return losses, peek(settings.workdir), batches


@pytest.mark.long
def test_half_the_memory_gives_the_same_losses_and_scores(shared, tmp_path, monkeypatch, caplog):
    settings, needs = shared
    assert needs[1] > needs[2] > needs[4]
    plain, manifest, batches = trained(settings(tmp_path / "1"), needs[1], monkeypatch)
    assert manifest["gradient_accumulation_steps"] == 1
    with caplog.at_level("INFO", logger="tpu_suite"):
        short = needs[2] - 1
        losses, manifest, same = trained(settings(tmp_path / "4"), short, monkeypatch)
    assert manifest["gradient_accumulation_steps"] == 4
    assert manifest["config"]["gradient_accumulation_steps"] == "auto"
    assert same == batches and "4 needs" in caplog.text
    assert "BatchNorm" not in caplog.text
    np.testing.assert_allclose(losses, plain, rtol=1e-5)
    scores = [History(str(tmp_path / x), writes=False).scores()[4] for x in "14"]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    monkeypatch.setattr(fit, "_memory", lambda step, times: 1.0 * step.batch_size)
    monkeypatch.setattr(fit, "_batch", lambda *_: 0.0)
    monkeypatch.setattr(fit, "_free", lambda *_: 20.0)
    with caplog.at_level("INFO", logger="tpu_suite"):
        parts = evaluate.evaluate(settings(tmp_path / "1"), "latest", 0.0)
    assert "eval_batch_size: 64 needs" in caplog.text and "; 16 needs" in caplog.text
    assert {name: parts[name] for name in scores[0]} == pytest.approx(scores[0], rel=1e-5)


@pytest.mark.long
def test_a_run_goes_on_with_another_number(shared, tmp_path, monkeypatch):
    settings, needs = shared
    whole, _, batches = trained(settings(tmp_path), needs[2] - 1, monkeypatch)
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    losses, manifest, rest = trained(settings(tmp_path), needs[1], monkeypatch)
    assert manifest["gradient_accumulation_steps"] == 1 and rest == batches[2:]
    np.testing.assert_allclose(losses, whole, rtol=1e-5)
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    losses, manifest, _ = trained(settings(tmp_path, steps=2), 0.0, monkeypatch)
    assert manifest["gradient_accumulation_steps"] == 2
    np.testing.assert_allclose(losses, whole, rtol=1e-5)
