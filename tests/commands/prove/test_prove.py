"""--mode=prove notices faults; each of its checks is tried with and without one.

The complete run is slow: bash scripts/test.sh -m slow -k prove
"""

import contextlib
import dataclasses
import getpass
import importlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import optax
import pytest

from commands import preflight, prove
from commands.prove import kernels, numbers, runs, speed, training
from commands.prove.checks import CHECKS, Case, Check, Failed
from common.errors import DataError, OutputError
from common.layers import boundary, gram_norm
from engine import start
from engine import step as steps
from engine.checkpoint import Checkpointer

ROOT = pathlib.Path(__file__).parents[3]
CASE = Case("", "", short=True, devices=8)
NCF: Any = {
    **{"num_users": 23, "num_items": 12, "num_ratings": 46, "min_ratings": 2},
    **{"eval_negatives": 50, "gmf_dim": 4, "mlp_layers": (8, 8, 4)},
    **{"train_batch_size": 24, "eval_batch_size": 8, "train_steps": "20"},
}


# --- Numbers.


@pytest.fixture
def one_model(monkeypatch):
    """The stored values and the table have the smallest model alone."""
    reference, table = numbers.reference(), numbers.model_table()
    monkeypatch.setattr(numbers, "reference", lambda: {"ncf": reference["ncf"]})
    monkeypatch.setattr(numbers, "model_table", lambda: {"ncf": table["ncf"]})


def with_gradients(monkeypatch, change, on=1):
    """Changes the gradients that are computed on meshes of at least `on` devices."""
    make = steps.make_gradients

    def changed(loss, mesh, *arguments):
        compute = make(loss, mesh, *arguments)

        def gradients(*inputs):
            gradient, *others = compute(*inputs)
            return (change(gradient) if mesh.size >= on else gradient), *others

        return gradients

    monkeypatch.setattr(steps, "make_gradients", changed)


def one_element(gradient):
    """The gradients with another sign of one bias, in the mlp's first layer."""
    layer = gradient["mlp_0"]
    return {**gradient, "mlp_0": {**layer, "bias": layer["bias"].at[3].multiply(-1)}}


def test_values_agree(one_model):
    result = numbers.check_values(CASE)
    assert result.figures.keys() == {"ncf float32", "ncf bfloat16"}
    assert max(result.figures.values()) < 1e-5
    assert all(len(text) == 64 for text in result.programs.values())


def test_a_wrong_gradient_is_noticed(one_model, monkeypatch):
    with_gradients(monkeypatch, one_element)
    with pytest.raises(Failed, match=r"^ncf float32: gradient/mlp_0/bias has a relative error"):
        numbers.check_values(CASE)


@pytest.mark.parametrize("other", [optax.adam(5.5e-4), optax.adamw(5e-4, weight_decay=1e-2)])
def test_a_wrong_optimizer_is_noticed(other, one_model, monkeypatch):
    load = numbers.load_model

    def changed(*arguments):
        model = load(*arguments)
        recipe = dataclasses.replace(model.recipe, optimizer=other)
        return dataclasses.replace(model, recipe=recipe)

    monkeypatch.setattr(numbers, "load_model", changed)
    with pytest.raises(Failed, match="^ncf float32: .* the optimizer's changes of the weights"):
        numbers.check_values(CASE)


def test_the_models_have_all_optimizers_and_dropout():
    """Else a fault there would go unnoticed."""
    names = set()
    for row in numbers.model_table().values():
        config = importlib.import_module(f"configs.{row['recipe']}").get_config()
        names.add(row["changes"].get("optimizer", config.optimizer))
    assert names == {"sgd", "lars", "lamb", "adam"}
    for name in ("transformer", "gnmt"):
        assert numbers.model_table()[name]["changes"]["dropout"] > 0


def negative(arrays):
    return {name: [-x for x in values] for name, values in arrays.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda new: new["sums"].update(loss=[float("nan"), 1.0]), "the loss is nan instead"),
        (lambda new: new["sums"].update(loss=[0.9, 1.0]), "the loss is 0.9 instead of"),
        (lambda new: new["arrays"].pop("gradient/head/kernel"), "has other arrays"),
        (lambda new: new.update(arrays=negative(new["arrays"])), "all gradients together"),
    ],
)
def test_other_values_are_noticed(change, message):
    """By the tolerance of bfloat16, too."""
    stored = numbers.reference()["ncf"]
    stored["arrays"].setdefault("gradient/head/kernel", [0.0] * 3)
    new = json.loads(json.dumps(stored))
    assert numbers.compare("ncf", new, stored, numbers.TOLERANCES["bfloat16"]) == 0
    change(new)
    with pytest.raises(Failed, match=f"^ncf.*{message}"):
        numbers.compare("ncf", new, stored, numbers.TOLERANCES["bfloat16"])


def test_all_devices_are_as_one(one_model):
    result = numbers.all_as_one(CASE)
    assert result.figures["devices"] == 8 and result.figures["ncf"] < 1e-5


def test_a_wrong_sum_over_devices_is_noticed(one_model, monkeypatch):
    def forgotten(gradient):
        layer = gradient["mlp_1"]
        return {**gradient, "mlp_1": {**layer, "bias": layer["bias"] / 8}}

    with_gradients(monkeypatch, forgotten, on=8)
    with pytest.raises(Failed, match="^ncf: the gradients .* mlp_1/bias$") as failure:
        numbers.all_as_one(CASE)
    (size,) = re.findall(r" by (\S+) in ", str(failure.value))
    assert float(size) == pytest.approx(7 / 8, abs=0.01)  # printed with two digits


# --- Runs.


@pytest.fixture
def two_runs(tiny_ratings, tmp_path):
    """The settings of two runs with the same checkpoint of step 1."""
    names = ("one", "other")
    both = [
        training.settings("ncf", str(tmp_path / n), data_dir=tiny_ratings, **NCF) for n in names
    ]
    trained = training.Training(both[0])
    trained.step()
    for settings in both:
        folder = f"{settings.workdir}/checkpoints"
        with contextlib.closing(Checkpointer(folder, keep=1, best=lambda: None)) as checkpoints:
            checkpoints.save(1, **steps.checkpoint_items(trained.state, trained.totals), facts={})
    return both


def flip(x):
    """The array with another last bit of its first number."""
    host = np.array(x)
    host.reshape(-1).view(np.uint8)[0] ^= 1
    return jax.device_put(host, x.sharding)


def test_a_flipped_bit_in_a_resumed_run_is_noticed(two_runs, monkeypatch):
    one, other = two_runs
    assert runs.compare_runs(one, other, 1) > 20
    restore = start.restore_state

    def flipped(checkpoints, *arguments):
        state, totals = restore(checkpoints, *arguments)
        if checkpoints.directory.startswith(other.workdir):
            layer = state.params["mlp_0"]
            state.params["mlp_0"] = {**layer, "kernel": flip(layer["kernel"])}
        return state, totals

    monkeypatch.setattr(start, "restore_state", flipped)
    with pytest.raises(Failed, match="^the resumed run has other bits in 0/params/mlp_0/kernel"):
        runs.compare_runs(one, other, 1)


@pytest.fixture
def ncf_settings(tiny_ratings, tmp_path):
    return training.settings("ncf", str(tmp_path / "run"), data_dir=tiny_ratings, **NCF)


def test_a_lost_row_is_noticed(ncf_settings, monkeypatch):
    rows = runs.evaluated(ncf_settings)
    assert sum(len(next(iter(batch.values()))) for batch in rows) == 23
    own = type(ncf_settings.load_benchmark(""))
    eval_batches = own.eval_batches

    def lossy(self, *arguments):
        for number, batch in enumerate(eval_batches(self, *arguments)):
            mask = batch["mask"].copy()
            mask[0] *= number != 1
            yield {**batch, "mask": mask}

    monkeypatch.setattr(own, "eval_batches", lossy)
    with pytest.raises(DataError, match="^evaluation saw 22 examples, the data hold 23"):
        runs.evaluated(ncf_settings)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (range(101), ""),
        (range(100), "in batches of 24, 100 rows of 100 images are evaluated instead of 101"),
        ([*range(100), 99], "in batches of 24, 101 rows of 100 images"),
        (range(1, 102), "batches of another size evaluate other images"),
    ],
)
def test_evaluations_have_every_image_once(second, message, monkeypatch):
    answers = iter([list(range(101)), list(second)])
    monkeypatch.setattr(runs, "small_run", lambda case: {})
    monkeypatch.setattr(runs, "evaluated", lambda settings: [{"id": np.array(next(answers))}])
    if not message:
        assert runs.exact_counts(CASE).figures["sizes"] == "16 and 24"
        return
    with pytest.raises(Failed, match=f"^{message}"):
        runs.exact_counts(CASE)


@pytest.fixture
def ncf_training():
    return training.Training(training.settings("ncf", **NCF))


def test_a_save_while_training_goes_on(ncf_training, tmp_path, monkeypatch):
    figures = runs.saved(ncf_training, str(tmp_path / "good"))
    assert figures["bytes"] > 3 * 397 * 4 and int(ncf_training.state.step) == 10
    restore = Checkpointer.restore

    def flipped(self, *arguments):
        items = restore(self, *arguments)
        layer = items["model"]["params"]["mlp_0"]
        layer["kernel"] = flip(layer["kernel"])
        return items

    monkeypatch.setattr(Checkpointer, "restore", flipped)
    with pytest.raises(Failed, match="other bits .* in model/params/mlp_0/kernel"):
        runs.saved(ncf_training, str(tmp_path / "bad"))


# --- Kernels and speed.


@pytest.mark.parametrize(("factor", "message"), [(1.0, ""), (1.1, "^double differs .* by 0.1$")])
def test_a_wrong_kernel_is_noticed(factor, message, monkeypatch):
    one = kernels.Kernel(
        "double", lambda x: factor * 2 * x, lambda x: x + x, lambda: (np.ones(5),), 1e-5
    )
    monkeypatch.setattr(kernels, "KERNELS", (one,))
    monkeypatch.setattr(kernels.jax, "default_backend", lambda: "tpu")
    if message:
        with pytest.raises(Failed, match=message):
            kernels.check_kernels(CASE)
    else:
        assert kernels.check_kernels(CASE).figures.keys() == {"double ms", "double plain ms"}


@pytest.mark.parametrize("argument", [None, "norm1", "w3"])
def test_elsewhere_the_kernels_are_interpreted(argument, monkeypatch):
    """An argument that arrives in another order is noticed."""
    fused = boundary.fused

    def other(arguments, interpret):
        assert interpret
        if argument is None:
            return fused(arguments, interpret)
        reversed_ = {argument: getattr(arguments, argument)[:, ::-1]}
        return fused(arguments._replace(**reversed_), interpret)

    one = kernels._boundary(3, 2, 64)._replace(
        kernel=lambda *arrays: other(boundary.Arguments(*arrays), True)
    )
    monkeypatch.setattr(kernels, "_SMALL", (one,))
    if argument is None:
        assert "interpreter" in kernels.check_kernels(CASE).summary
    else:
        with pytest.raises(Failed, match="^block boundary, 3 x 2 x 2 x 256 differs"):
            kernels.check_kernels(CASE)


class _Lax:
    """jax.lax, where an operation of several devices sees this device alone."""

    def __init__(self, missing):
        self.missing = missing

    def __getattr__(self, name):
        return (lambda x, axis: x) if name == self.missing else getattr(jax.lax, name)


@pytest.fixture
def own_caches():
    """As a check has, whose process is its own."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("own_caches")
@pytest.mark.parametrize("fault", ["", "psum", "pmean", "a gradient's sign"])
def test_a_fault_of_gram_is_noticed(fault, monkeypatch):
    if not fault:
        assert "are those of" in kernels.check_gram(CASE).summary
        return
    if fault.startswith("p"):
        monkeypatch.setattr(gram_norm, "lax", _Lax(fault))
    else:
        right = gram_norm.pull_back

        def wrong(*arguments):
            dx, dkernel, dscale, dbias = right(*arguments)
            return dx, dkernel, -dscale, dbias

        monkeypatch.setattr(gram_norm, "pull_back", wrong)
    with pytest.raises(Failed, match="^BatchNorm of moments differs"):
        kernels.check_gram(CASE)


def test_the_kernels_are_those_of_resnet50():
    """Shapes and forms; a chip compares the values."""
    names = []
    for one in kernels.KERNELS:
        arrays = jax.eval_shape(one.arguments)
        shapes = [jax.eval_shape(form, *arrays) for form in (one.kernel, one.plain)]
        assert shapes[0] == shapes[1]
        names.append(one.name)
    assert names[0] == "block boundary, 128 x 56 x 56 x 256" and len(set(names)) == 3


@pytest.mark.parametrize(
    ("kind", "count", "name"), [("TPU v3", 8, "v3:2x2"), ("TPU v4", 4, "v4:2x2x1")]
)
def test_the_estimate_is_of_the_slice_that_is_here(kind, count, name, monkeypatch):
    def inspect(settings, one, parts):
        return preflight.Outcome(one, 8, error=f"of {one.name}", fits=None)

    monkeypatch.setattr(preflight, "inspect", inspect)
    settings = training.settings("ncf", **NCF)
    assert speed.estimate(settings, kind, count) == {"no_estimate": f"of {name}"}


def test_an_unknown_chip_has_no_estimate():
    settings = training.settings("ncf", **NCF)
    assert "TPU v99" in speed.estimate(settings, "TPU v99", 8)["no_estimate"]
    assert speed.estimate(settings, "cpu", 8) == {}


# --- The proof.


def checks(*names, limit=60.0):
    return [Check(n, f"tests.commands.prove.checks:{n}", f"{n}.py", (1, 1), limit) for n in names]


@pytest.mark.long
def test_every_way_in_which_a_check_ends_is_a_row(tmp_path, capsys):
    planned = checks("passes", "skips", "fails", "raises", "crashes") + checks("hangs", limit=3)
    assert prove.run("", True, str(tmp_path / "out"), planned) == 1
    text = (tmp_path / "out/prove.json").read_text()
    content = json.loads(text)
    rows = {row["name"]: row for row in content["checks"]}
    assert [row["status"] for row in rows.values()] == ["ok", "skipped", *["failed"] * 4]
    assert rows["passes"]["figures"] == {"count": 3, "rate": 0.12346}
    assert rows["fails"]["summary"] == "the answer is 41" and rows["fails"]["look"] == "fails.py"
    assert rows["raises"]["summary"] == "OSError: no space in PATH"
    assert rows["crashes"]["summary"] == "the check's process ended with signal 6 (SIGABRT)"
    assert rows["hangs"]["summary"] == "not done after 0:03"
    assert content["programs"] == {"step": "ab" * 32}
    assert content["versions"]["jax"] == jax.__version__ and content["short"] is True
    assert "someone" not in text and str(tmp_path) not in text
    output = capsys.readouterr().out
    assert "prove: 4 of 6 checks failed, 1 skipped; wrote" in output
    folder = output.split("logs of the failed checks: ")[1].split("\n")[0]
    assert sorted(os.listdir(folder)) == ["crashes.log", "fails.log", "hangs.log", "raises.log"]
    shutil.rmtree(folder)


def test_a_proof_without_a_fault(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert prove.run(str(tmp_path / "work"), False, "", checks("passes")) == 0
    assert (tmp_path / "work/prove.json").exists()
    assert "prove: 0 of 1 checks failed" in capsys.readouterr().out


@pytest.mark.parametrize(("workdir", "out"), [("", "FILE"), ("FILE", ""), ("/w", "FILE")])
def test_a_folder_that_cannot_be_written_is_refused_before_the_checks(workdir, out, tmp_path):
    (tmp_path / "file").write_text("")
    workdir, out = (text.replace("FILE", f"{tmp_path}/file/x") for text in (workdir, out))
    flag = "--out" if out else "--workdir"
    with pytest.raises(OutputError, match=f"^cannot write to {flag}={tmp_path}/file/x: "):
        prove.run(workdir, True, out, ())


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("cannot read /home/ann/run/x.py: no", "cannot read PATH: no"),
        ("gs://my-bucket/run failed", "PATH failed"),
        ("~/data and ../up", "PATH and ../up"),
        ("token hf_AbCdEf0123456789AbCdEf0123 of ann@example.com", "token REMOVED of REMOVED"),
        ("host 10.0.0.7:8470", "host REMOVED:8470"),
        ("two\nlines\x1b[31m", "two lines\\x1b[31m"),
        ("resnet float32: gradient/bn1/bias has 0.5", "resnet float32: gradient/bn1/bias has 0.5"),
        ("marigold may not write", "NAME may not write"),
    ],
)
def test_nothing_private_is_written(text, kept, monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "marigold")
    assert prove.anonymous(text) == kept


def test_every_check_can_be_imported():
    for check in CHECKS:
        module, _, function = check.function.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 8])
def test_the_complete_proof(count, tmp_path):
    flags = f"--xla_force_host_platform_device_count={count}"
    done = subprocess.run(
        [sys.executable, "main.py", "--mode=prove", "--short", f"--out={tmp_path}"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "prove.json").read_text())
    assert content["devices"]["count"] == count
    assert {row["name"] for row in content["checks"]} == {check.name for check in CHECKS}
