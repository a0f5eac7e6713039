"""Trained models are opened by their workdir alone."""

import json
import pathlib
import re
import shutil
import sys
import types

import numpy as np
import pytest

import commands.predict
import predict
from benchmarks.resnet import ImageClassifier
from benchmarks.uses import Uses
from commands import export, report
from common.data.shards import Shards
from common.errors import CheckpointError, ConfigError, UserError
from common.images.input_spec import NAMED
from engine.checkpoint import model_source
from engine.checkpoint.model_source import initial_weights
from engine.plan import Programs
from scripts import demo

COMPILES = types.SimpleNamespace(use_cache=lambda *_: sys.exit("compiles"))


@pytest.fixture
def workdir(tmp_path, untrained_run):
    """A workdir with step 4 of a ResNet for 4 classes."""
    return str(shutil.copytree(untrained_run, tmp_path / "run"))


def change_manifest(workdir, **changes):
    path = pathlib.Path(workdir) / "checkpoints" / "4" / "manifest" / "metadata"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | changes))
    return manifest


@pytest.mark.parametrize("end", ["", "/", "/checkpoints/4", "/checkpoints/4/"])
def test_a_workdir_or_a_step_is_a_model(workdir, end):
    model = model_source.load(workdir + end)
    assert (model.source, model.step) == (f"{workdir}/checkpoints/4", 4)
    assert model.manifest["class_names"] == ["n0", "n1", "n2", "n3"]
    weights = initial_weights(workdir, Uses().read_foreign)  # the run kept an average
    ours, theirs = (x.params["head"]["kernel"] for x in (model, weights))
    np.testing.assert_array_equal(ours, theirs, strict=True)
    assert model.model_state.keys() == {"batch_stats"}
    assert model.benchmark.unit == "images"


@pytest.mark.parametrize("recipe", [None, {}])  # of --workdir, and of --model
def test_a_workdir_may_be_named_as_a_number_and_have_weights_beside_its_checkpoints(
    workdir, tmp_path, recipe
):
    own = pathlib.Path(workdir).rename(tmp_path / "7")
    (own / "model.safetensors").touch()
    (tmp_path / "8/checkpoints").mkdir(parents=True)
    assert model_source.load(f"{own}/", recipe=lambda _: recipe).source == f"{own}/checkpoints/4"
    with pytest.raises(CheckpointError, match=r"^--model=.*/8: .* has no complete checkpoint"):
        model_source.load(f"{tmp_path}/8", "best", "--model", lambda _: recipe)


def test_a_workdir_does_not_choose_the_folder_of_compiled_programs(workdir):
    """Whoever can write there could have this machine run programs."""
    config = change_manifest(workdir)["config"]
    change_manifest(workdir, config=config | {"compilation_cache": "/somebody/elses"})
    assert model_source.load(workdir).config.compilation_cache == "~/.cache/tpu_suite"


def write_names(folder, *names):
    """The manifest of a data folder whose classes have these names."""
    rows = [{"label": label, "name": name} for label, name in enumerate(names, 1)]
    folder.mkdir(exist_ok=True)
    content = {"classes": rows, "num_label_classes": len(rows), "splits": {}}
    (folder / "manifest.json").write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize(
    ("names", "difference"),
    [
        (("n0", "n1", "n2", "n3"), ""),
        (("n0", "n2", "n1", "n3"), r"entry 1 .* \(2 differ\): 'n1' in the checkpoint, 'n2' in the"),
        (("n0", "n1", "n2"), r"entry 3 .* 4 then, 3 now\): 'n3' in the checkpoint, nothing in the"),
        (("n0", "n1", "n2", "n3", "x"), r"entry 4 .* 4 then, 5 now\): nothing in the .*, 'x' in"),
    ],
)
@pytest.mark.parametrize("use", ["demo", "export", "predict", "report"])
def test_a_model_is_not_used_where_its_data_have_other_classes(
    workdir, tmp_path, names, difference, use, monkeypatch
):
    config = change_manifest(workdir)["config"]
    folder = write_names(tmp_path / "data", *names)
    change_manifest(workdir, config=config | {"data_dir": folder})
    monkeypatch.setattr(commands.predict, "compiler", COMPILES)
    monkeypatch.setattr(export.programs, "of", lambda *_: sys.exit("prepares"))
    for method in ("open", "num_examples"):
        monkeypatch.setattr(ImageClassifier, method, lambda *_: 4)
    source = types.SimpleNamespace(class_names=names, shards=Shards((), ()))
    monkeypatch.setattr(ImageClassifier, "source", lambda *_: source)
    monkeypatch.setattr(ImageClassifier, "host_bytes", lambda *_: {})
    monkeypatch.setattr(Programs, "lower_predict", lambda *_: sys.exit("compiles"))
    command = {
        "demo": lambda: demo.make_answer(model_source.load(workdir)),
        "export": lambda: export.run(workdir, "latest", "stablehlo"),
        "predict": lambda: predict.main(["x.jpg", f"--workdir={workdir}"]),
        "report": lambda: report.report(model_source.settings(workdir), "latest"),
    }[use]
    with pytest.raises((UserError, SystemExit)) as caught:
        command()
    if not difference:
        assert str(caught.value) in ("prepares", "compiles")
        return
    message = rf"{workdir}/checkpoints/4 was trained on .*{difference}.*accept_other_data"
    assert re.search(message, str(caught.value))


def test_other_classes_may_be_accepted_and_an_unreadable_manifest_is_a_note(
    workdir, tmp_path, caplog
):
    def notes():
        return [text for text in caplog.messages if text.startswith("NOTE ")]

    caplog.set_level("INFO", logger="tpu_suite")
    folder = write_names(tmp_path / "data", "n0", "n2", "n1", "n3")
    model_source.load(workdir).changed(data_dir=folder).check_data(True)
    (note,) = notes()
    assert "was trained on other data: entry 1 of class_names" in note
    (tmp_path / "data/manifest.json").write_bytes(b"[" * 200_000)
    model_source.load(workdir).changed(data_dir=folder).check_data(False)
    _, note = notes()
    assert "NOTE the data cannot be compared" in note and "nested too deeply" in note
    elsewhere = model_source.load(workdir).changed(data_dir="gs://nowhere/x")
    elsewhere.check_data(False)
    change_manifest(workdir, imported={})
    model_source.load(workdir).changed(data_dir=folder).check_data(False)
    assert len(notes()) == 2


def test_the_number_of_classes_is_that_of_the_checkpoint_not_of_the_data(workdir):
    config = change_manifest(workdir)["config"]
    change_manifest(workdir, config=config | {"num_label_classes": 0, "data_dir": "/not/here"})
    model = model_source.load(workdir)
    assert model.config.num_label_classes == 4
    assert model_source.load(workdir).changed(image_size=24).config.image_size == 24
    with pytest.raises(AttributeError, match="locked"):
        model.config.another = 1


def test_the_pixels_are_those_of_the_checkpoint_whatever_a_name_means_now(workdir):
    change_manifest(workdir, input_spec={**NAMED["vgg"].at(32).as_dict(), "resize": 40})
    model = model_source.load(workdir).changed(image_size=32)
    assert isinstance(model.benchmark, ImageClassifier)
    spec = model.benchmark.input_spec
    assert (spec.resize, spec.std) == (40, (1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("names", "count", "expected"),
    [
        (["a", "b"], 2, ("a", "b")),
        (["a", "", "c"], 3, ("a", "1", "c")),
        (["a", "b", "c"], 4, ()),  # only ImageNet's have a background
        ([f"n{i}" for i in range(1000)], 1001, ("background", *(f"n{i}" for i in range(1000)))),
        (["", ""], 2, ()),
        ([], 2, ()),
    ],
)
def test_names_of_classes(names, count, expected):
    assert model_source.class_names({"class_names": names}, count) == expected


def test_mistakes_end_in_one_line(workdir, tmp_path):
    change_manifest(workdir, evaluations=[])
    pathlib.Path(workdir, "metrics.jsonl").unlink(missing_ok=True)
    for path, checkpoint, message in (
        (tmp_path / "other", "latest", "--workdir=.*other: "),
        (f"{workdir}/checkpoints/5", "latest", r"has the checkpoints \[4\]"),
        (workdir, "5", r"--checkpoint=5 is not in .*\[4\]"),
        (workdir, "first", r"--checkpoint=first is not in .*\[4\]"),
        (f"{workdir}/checkpoints/4", "best", "--checkpoint=best: "),
        (workdir, "best", r"=best, of a run without evaluations, .* use latest or one of \[4\]$"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            model_source.load(str(path), checkpoint)
        assert "\n" not in str(caught.value)
    change_manifest(workdir, benchmark="chess")
    with pytest.raises(ConfigError, match="'chess' is not one of"):
        model_source.load(workdir)


def replace_step(workdir):
    """What a training run does that keeps one checkpoint: 4 makes way for 6."""
    folder = pathlib.Path(workdir) / "checkpoints"
    if (folder / "4").exists():
        change_manifest(workdir, step=6)
        (folder / "4").rename(folder / "6")


def test_a_run_replaces_the_checkpoint_before_its_arrays_are_read(workdir):
    model = model_source.load(workdir)
    replace_step(workdir)
    assert model.params["head"]["kernel"].any()
    assert (model.step, model.source) == (6, f"{workdir}/checkpoints/6")


def test_a_run_replaces_the_checkpoint_while_its_manifest_is_looked_for(workdir, monkeypatch):
    real = model_source.epath.Path

    class Late(type(real())):
        def read_bytes(self):
            replace_step(workdir)
            return super().read_bytes()

    monkeypatch.setattr(model_source.epath, "Path", Late)
    manifest = model_source.peek(workdir)
    assert manifest and manifest["step"] == 6


def test_another_kind_of_model_can_be_refused_before_arrays_are_read(workdir):
    shutil.rmtree(f"{workdir}/checkpoints/4/model")
    model = model_source.load(workdir, flag="--model")
    assert model.config.benchmark == "resnet"
    with pytest.raises(UserError, match="damaged"):
        _ = model.params
