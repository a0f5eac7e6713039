"""Trained models are opened by their workdir alone."""

import json
import pathlib
import shutil
import tarfile

import numpy as np
import pytest

from benchmarks.resnet import ResNet
from engine.weights import load_weights
from errors import ConfigError, UserError
from modes import trained
from ops.images.libraries import NAMED

STORED = pathlib.Path(__file__).parents[1] / "data" / "run_of_e107b0f.tar.xz"


@pytest.fixture
def workdir(tmp_path):
    """A run of an older version of the program: step 4 of a ResNet-18 for 4 classes."""
    with tarfile.open(STORED) as archive:
        archive.extractall(tmp_path, filter="data")
    return str(tmp_path / "run")


def change_manifest(workdir, **changes):
    path = pathlib.Path(workdir) / "checkpoints" / "4" / "manifest" / "metadata"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | changes))
    return manifest


@pytest.mark.parametrize("end", ["", "/", "/checkpoints/4", "/checkpoints/4/"])
def test_a_workdir_or_a_step_is_a_model(workdir, end):
    model = trained.load(workdir + end)
    assert (model.source, model.step) == (f"{workdir}/checkpoints/4", 4)
    assert model.manifest["class_names"] == ["n0", "n1", "n2", "n3"]
    weights = load_weights(workdir)  # the run kept an average
    np.testing.assert_array_equal(
        model.params["head"]["kernel"], weights.params["head"]["kernel"], strict=True
    )
    assert model.model_state.keys() == {"batch_stats"}
    assert model.benchmark.unit == "images"


def test_a_workdir_does_not_choose_the_folder_of_compiled_programs(workdir):
    """Whoever can write there could have this machine run programs."""
    config = change_manifest(workdir)["config"]
    change_manifest(workdir, config=config | {"compilation_cache": "/somebody/elses"})
    assert trained.load(workdir).config.compilation_cache == "~/.cache/tpu_suite"


def test_checkpoints_have_names(workdir):
    assert [trained.load(workdir, name).step for name in ("latest", "best", "4")] == [4, 4, 4]


def test_the_number_of_classes_is_that_of_the_checkpoint_not_of_the_data(workdir):
    config = change_manifest(workdir)["config"]
    change_manifest(workdir, config=config | {"num_label_classes": 0, "data_dir": "/not/here"})
    model = trained.load(workdir)
    assert model.config.num_label_classes == 4
    assert trained.load(workdir, image_size=24).config.image_size == 24
    with pytest.raises(AttributeError, match="locked"):
        model.config.another = 1


def test_the_pixels_are_those_of_the_checkpoint_whatever_a_name_means_now(workdir):
    change_manifest(workdir, input_spec={**NAMED["vgg"].at(32).as_dict(), "resize": 40})
    model = trained.load(workdir, image_size=32)
    assert isinstance(model.benchmark, ResNet)
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
    assert trained.class_names({"class_names": names}, count) == expected


def test_mistakes_end_in_one_line(workdir, tmp_path):
    for path, checkpoint, message in (
        (tmp_path / "other", "latest", "--workdir=.*other: there is no .*other/checkpoints"),
        ("s3://bucket/x", "latest", "s3:// is not supported"),
        (f"{workdir}/checkpoints/5", "latest", r"has the checkpoints \[4\]"),
        (workdir, "5", r"--checkpoint=5 is not in .*\[4\]"),
        (workdir, "first", r"--checkpoint=first is not in .*\[4\]"),
        (f"{workdir}/checkpoints/4", "best", "--checkpoint=best: .* already names a step"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            trained.load(str(path), checkpoint)
        assert "\n" not in str(caught.value)
    change_manifest(workdir, benchmark="chess")
    with pytest.raises(ConfigError, match="'chess' is not one of"):
        trained.load(workdir)


def test_another_kind_of_model_can_be_refused_before_arrays_are_read(workdir):
    shutil.rmtree(f"{workdir}/checkpoints/4/model")
    model = trained.load(workdir, flag="--model")
    assert model.config.benchmark == "resnet"
    with pytest.raises(UserError, match="damaged"):
        _ = model.params
