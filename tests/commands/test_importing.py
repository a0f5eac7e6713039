"""--mode=import and config.init_from with files of other libraries, from the file to the scores."""

import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import benchmarks
from benchmarks.resnet import ImageClassifier
from commands import importing, report
from common.errors import CheckpointError, ConfigError
from common.foreign import resnets as foreign
from configs import ncf
from engine import evaluate
from engine.checkpoint import model_source
from engine.checkpoint.saver import first_state
from engine.plan import Programs, make_plan
from engine.run import Run
from tests.common.foreign.test_resnets import variables
from tests.conftest import make_tiny_config, opened, resolved
from tests.test_main import fails_with
from tests.test_main import run as command

TIMM = {"architecture": "resnet18", "label_names": ["a", "b", "c", "d", "e"]}
TIMM["pretrained_cfg"] = {
    **{"input_size": [3, 16, 16], "interpolation": "bicubic", "crop_pct": 0.8},
    **{"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
}


@pytest.fixture(scope="module")
def backbone(folder, tmp_path_factory):
    """A file of the same weights without the classifier."""
    path = str(tmp_path_factory.mktemp("backbone") / "x.safetensors")
    arrays = safetensors.numpy.load_file(f"{folder}/model.safetensors")
    arrays = {name: array for name, array in arrays.items() if not name.startswith("fc.")}
    safetensors.numpy.save_file(arrays, path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A narrow ResNet-18 for 5 classes, in timm's form."""
    folder = tmp_path_factory.mktemp("timm")
    params, state = variables(18)
    state = jax.tree.map(lambda x: 1 + x**2, state)  # a variance is not negative
    arrays = {k: np.ascontiguousarray(v) for k, v in foreign.names(params, state).items()}
    safetensors.numpy.save_file(arrays, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(TIMM))
    return str(folder)


def config_of(records="", **overrides):
    """The tiny recipe, which has another architecture, without a number of classes."""
    tiny = {"num_label_classes": 0, "num_filters": 6, "image_size": 24, "eval_batch_size": 8}
    short = {"train_steps": "2", "steps_per_checkpoint": "1", "steps_per_eval": "2"}
    return make_tiny_config(records, **{**tiny, **short, **overrides})


@pytest.fixture(scope="module")
def imported(folder, tmp_path_factory):
    """The workdir of the imported model."""
    workdir = tmp_path_factory.mktemp("imported")
    settings, _ = resolved(config_of(init_from=folder), workdir, "import")
    importing.run(settings)
    return workdir


def test_what_an_import_writes(imported, folder):
    model = model_source.load(str(imported))
    expected = {"resnet_depth": 18, "num_filters": 4, "max_pool": "torch", "image_size": 16}
    expected |= {"num_label_classes": 5, "resnet_version": "1.5"}
    assert expected.items() <= model.config.to_dict().items()
    assert (model.step, model.manifest["class_names"]) == (0, list("abcde"))
    assert model.manifest["imported"]["path"] == f"{folder}/model.safetensors"
    assert len(model.manifest["imported"]["sha256"]) == 64
    spec, benchmark = model.manifest["input_spec"], model.benchmark
    assert isinstance(benchmark, ImageClassifier)
    assert (spec["size"], spec["resize"], spec["kernel"]) == (16, 20, "bicubic")
    assert spec == benchmark.input_spec.as_dict() and spec["mean"] == [127.5] * 3
    back = foreign.names(model.params, model.model_state)
    original = safetensors.numpy.load_file(f"{folder}/model.safetensors")
    assert sorted(back) == sorted(original)
    for name, array in original.items():
        np.testing.assert_array_equal(back[name], array, strict=True)


def test_a_file_is_a_model_like_its_workdir(imported, folder, backbone):
    file = model_source.load(folder, "latest", "--model", lambda _: config_of())
    workdir = model_source.load(str(imported))
    assert (file.source, file.step) == (f"{folder}/model.safetensors", 0)
    assert file.config.image_size == 16 and file.config.num_label_classes == 5
    for key in ("class_names", "input_spec", "imported", "benchmark"):
        assert file.manifest[key] == workdir.manifest[key]
    for mine, theirs in ((file.params, workdir.params), (file.model_state, workdir.model_state)):
        jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    same = model_source.load(str(imported), "latest", "--model", lambda _: config_of())
    assert (same.source, same.config) == (workdir.source, workdir.config)
    with pytest.raises(CheckpointError, match="--model=.*x.safetensors has no classifier"):
        model_source.load(backbone, "latest", "--model", lambda _: config_of())


def test_its_report_says_where_it_is_from(imported, folder, tiny_records, capsys):
    settings, _ = resolved(config_of(tiny_records), imported, "report")
    report.report(settings, "latest")
    page = (imported / "report" / "report.html").read_text()
    assert f"The model was imported from {folder}/model.safetensors (safetensors, SHA-256 " in page
    for words in ("stopped", "device hours", "1,281,167"):
        assert words not in page
    assert "report.html" in capsys.readouterr().out


def test_its_evaluation_needs_no_keys_of_the_architecture(imported, tiny_records):
    settings, notes = resolved(config_of(tiny_records), imported, "eval")
    assert settings.config["num_filters"] == 4 and settings.config["image_size"] == 16
    assert "config.num_filters=4 instead of 6, as the weights want it" in notes
    scores = evaluate.evaluate(settings, "latest", 0)
    assert 0 <= scores["top_1_accuracy"] <= 1 and np.isfinite(scores["loss"])
    _, notes = resolved(config_of(), imported, "eval", ["num_filters"])
    assert not any("num_filters" in note for note in notes)


def begun(settings, monkeypatch):
    """(params, source) of the state that a run begins with."""
    run = Run.open(settings)
    plan = make_plan(settings, run.benchmark, 90)
    # What the arrays were before does not matter here, and takes long to compile.
    zeros = jax.tree.map(jnp.zeros_like, run.programs.abstract_state(plan))
    monkeypatch.setattr(Programs, "initial_state", lambda *_: zeros)
    state, source = first_state(run.programs, plan)
    return jax.tree.map(np.asarray, state.params), source


def test_a_run_begins_with_the_imported_model(imported, tiny_records, tmp_path, monkeypatch):
    """In a workdir of its own, or in that of the import."""
    elsewhere, _ = resolved(config_of(tiny_records, init_from=str(imported)), tmp_path)
    assert elsewhere.config["num_filters"] == 4 and elsewhere.config["num_label_classes"] == 0
    assert json.loads(elsewhere.config["input_spec"])["resize"] == 20
    settings, notes = resolved(config_of(tiny_records), imported)
    assert settings.init_from == f"{imported}/checkpoints/0" and "imported model" in notes[0]
    assert settings.config["image_size"] == 24  # a run may train at another size
    params, source = begun(settings, monkeypatch)
    model = model_source.load(str(imported))
    kernels = [x["conv_stem"]["kernel"] for x in (params, model.params)]
    np.testing.assert_array_equal(*kernels)
    assert source == settings.init_from


def test_a_run_begins_with_foreign_weights(folder, tiny_records, tmp_path, caplog, monkeypatch):
    config = config_of(tiny_records, init_from=folder, num_label_classes=4)
    settings, notes = resolved(config, tmp_path)
    assert any("input_spec" in note for note in notes)
    assert settings.config["num_label_classes"] == 4  # the recipe's, not the file's
    with caplog.at_level(logging.INFO, logger="tpu_suite"):
        params, source = begun(settings, monkeypatch)
    assert "2 new (params/head/bias, params/head/kernel)" in caplog.text
    assert source == f"{folder}/model.safetensors" and params["head"]["bias"].shape == (4,)
    original = safetensors.numpy.load_file(source)["layer4.1.conv2.weight"]
    ours = params["stage4_block2"]["conv2"]["kernel"]
    np.testing.assert_array_equal(ours, original.transpose(2, 3, 1, 0))
    spec = opened(settings.load_benchmark("")).metadata["input_spec"]
    assert (spec["size"], spec["resize"]) == (24, 30)


def test_a_resumed_run_needs_the_weights_no_more(imported, tmp_path):
    step = tmp_path / "checkpoints" / "7"
    shutil.copytree(imported / "checkpoints" / "0", step)
    manifest = json.loads((step / "manifest/metadata").read_text())
    (step / "manifest/metadata").write_text(json.dumps({**manifest, "step": 7}))
    settings, _ = resolved(config_of(init_from="/gone"), tmp_path)
    assert settings.config["num_filters"] == 4 and settings.init_from == "/gone"
    assert resolved(config_of(), tmp_path)[0].config["num_filters"] == 4
    manifest["config"]["init_from"] = ""  # the run began without another model's weights
    (step / "manifest/metadata").write_text(json.dumps({**manifest, "step": 7}))
    settings, notes = resolved(config_of(), tmp_path)
    assert settings.config["num_filters"] == 6 and not notes


def test_imports_that_cannot_be(backbone, imported, tmp_path):
    no_weights = "is not a file or folder of another library's weights"
    for source in ("", "/not/there", str(imported)):
        settings, _ = resolved(config_of(init_from=source), tmp_path, "import")
        words = "'/not/there': there is no such" if "not" in source else no_weights
        with pytest.raises(ConfigError, match=words):
            importing.run(settings)
    settings, _ = resolved(config_of(init_from=backbone), tmp_path, "import")
    with pytest.raises(CheckpointError, match="only weights to begin a run with: params/head/b"):
        importing.run(settings)
    assert not list(tmp_path.iterdir())
    settings, _ = resolved(config_of(init_from=backbone), imported, "import")
    with pytest.raises(CheckpointError, match="has checkpoints: import into another folder"):
        importing.run(settings)


def test_a_key_that_the_person_gives_is_not_changed(folder, tmp_path):
    config = config_of(init_from=folder, input_spec="vgg", resnet_depth=34)
    given = ("input_spec", "resnet_depth")
    settings, notes = resolved(config, tmp_path, given=given)
    assert (settings.config["input_spec"], settings.config["resnet_depth"]) == ("vgg", 34)
    assert not any(key in note for key in given for note in notes)
    benchmark = settings.load_benchmark("")
    with pytest.raises(ConfigError, match=r"config.resnet_depth=34, but .* has 18"):
        benchmark.uses.read_foreign(f"{folder}/model.safetensors")


def test_a_benchmark_without_foreign_weights_refuses_them(folder):
    config = ncf.get_config()
    config.init_from = folder
    with pytest.raises(ConfigError, match=f"config.init_from={folder}: .*the benchmark ncf"):
        benchmarks.adopted_values(config, f"{folder}/model.safetensors", (), whole=False)
    assert benchmarks.load(config, "").uses.read_foreign(f"{folder}/model.safetensors") is None


@pytest.mark.long
def test_a_bucket(gcs, folder, tiny_records):
    bucket = gcs.bucket()
    gcs.upload(folder, f"{bucket}/timm")
    config = config_of(init_from=f"{bucket}/timm")
    importing.run(resolved(config, f"{bucket}/model", "import")[0])
    settings, _ = resolved(config_of(tiny_records), f"{bucket}/model", "eval")
    assert settings.config["num_filters"] == 4
    assert "top_1_accuracy" in evaluate.evaluate(settings, "latest", 0)


@pytest.mark.long
def test_the_command(folder, tmp_path):
    done = command("--mode=import", f"--workdir={tmp_path}/w", init_from=folder)
    assert done.returncode == 0, done.stderr
    assert "5 classes with their names" in done.stdout and f"wrote {tmp_path}/w/ch" in done.stdout
    (tmp_path / "x.pth").write_bytes(b"PK\x03\x04 no zip")
    done = command("--mode=import", f"--workdir={tmp_path}/v", init_from=f"{tmp_path}/x.pth")
    fails_with(done, f"{tmp_path}/x.pth is damaged")
