"""--mode=export: other programs read what it writes, and compute the same."""

import json
import pathlib
import subprocess
import sys
from functools import partial

import jax
import numpy as np
import pytest

from benchmarks.resnet.use.export import Classifier
from commands import export
from commands.export import formats
from common.data import storage
from common.errors import CheckpointError, ConfigError, OutputError
from common.images.input_spec import NAMED
from common.onnx_graph import Graph
from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.manifest import describe_run
from engine.step import model_items
from tests.benchmarks.resnet import networks
from tests.conftest import make_tiny_config, open_run, opened, plan_of


def drawn(tree, seed=0):
    """The tree with random values that no layer leaves as they are."""
    draw = np.random.default_rng(seed)

    def values(path, x):
        name = path[-1].key
        if name in ("scale", "var"):
            return draw.uniform(0.5, 1.5, x.shape).astype(np.float32)
        spread = 0.1 if name in ("mean", "bias") else np.sqrt(2 / np.prod(x.shape[:-1]))
        return draw.normal(0, spread, x.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(values, tree)


def images(size, count=3):
    return np.random.default_rng(1).integers(0, 256, (count, size, size, 3), np.uint8)


def normalised(pixels, spec=NAMED["tensorflow"]):
    mean, std = np.asarray(spec.mean, np.float32), np.asarray(spec.std, np.float32)
    return (pixels.astype(np.float32) - mean) / std


# The parts of an export, without a model.


@pytest.mark.parametrize("names", ["", ",", "savedmodel, zip"])
def test_formats_are_known_and_in_their_own_order(names):
    assert export.choose("stablehlo, savedmodel") == ("savedmodel", "stablehlo")
    with pytest.raises(ConfigError, match=f"^--format={names}: use one or more of "):
        export.choose(names)


# Networks.

VARIANTS = {
    "same": ("tensorflow", {}),
    "space to depth": ("tensorflow", {"space_to_depth": True}),
    "v1, BGR": ("keras", {"resnet_depth": 50, "resnet_version": "1", "max_pool": "torch"}),
    "v2, same": ("vgg", {"resnet_version": "2"}),
    "v2": ("tensorflow", {"resnet_depth": 50, "resnet_version": "2", "max_pool": "torch"}),
    "D, SE": ("timm_a1", {"deep_stem": True, "squeeze_excite": 0.25, "max_pool": "torch"}),
    "BlurPool": ("tensorflow", {"blur_pool": True, "num_filters": 16}),
    "RS": ("timm_a1", {"deep_stem": True, "squeeze_excite": 0.25, "max_pool": "conv"}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_computes_the_same_as_flax(name, tmp_path):
    """48 pixels become 3 before the last stage, so that D's mean-pool has an odd size."""
    spec, keys = VARIANTS[name]
    keys = {"resnet_depth": 18, **keys}
    model = networks.make_network(2, 1, 1, 1, classes=5, **keys)
    spec, pixels = NAMED[spec].at(48), images(48)
    inputs = normalised(pixels, spec)
    inputs = inputs[..., ::-1] if spec.channels == "BGR" else inputs
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), inputs, train=False))
    variables = drawn(shapes)
    expected = np.asarray(jax.jit(partial(model.apply, train=False))(variables, inputs))

    path = str(tmp_path / "model.onnx")
    draw = Classifier(networks.keys(**keys), variables, spec).draw
    formats.write("onnx", path, None, draw, {"key": "value"})
    computed = formats.read("onnx", path)({"images": pixels})["logits"]
    np.testing.assert_allclose(computed, expected, atol=1e-5 * np.abs(expected).max())


def make_workdir(workdir, records, **overrides):
    """A workdir with a checkpoint of random weights at step 3."""
    values = {"image_size": 32, "max_pool": "torch"} | overrides
    config = make_tiny_config(records, **values)
    run = open_run(config, workdir)
    state = run.programs.initial_state(plan_of(config, 90))
    items = model_items(state)
    items = items | {k: drawn(items[k]) for k in ("params", "model_state")}
    checkpoints = Checkpointer(f"{run.settings.workdir}/checkpoints", keep=1, best=lambda: None)
    opened(run.benchmark)
    checkpoints.save(3, items, {"step": np.int32(3)}, describe_run(run.programs, 90))
    checkpoints.close()
    return str(workdir), items


@pytest.fixture(scope="module")
def trained(tiny_records, tmp_path_factory):
    return make_workdir(tmp_path_factory.mktemp("run"), tiny_records)


@pytest.fixture(scope="module")
def exported(trained):
    export.run(trained[0], "latest", "hf,onnx,savedmodel,stablehlo")
    return pathlib.Path(trained[0]) / "export"


def logits(items, size=32):
    """By flax, of `images(size)`."""
    model = networks.make_network(resnet_depth=10, classes=4, max_pool="torch")
    variables = {"params": items["params"], **items["model_state"]}
    inputs = normalised(images(size))
    return np.asarray(jax.jit(partial(model.apply, train=False))(variables, inputs))


READER = """
import sys
import jax.export, numpy, onnxruntime, safetensors.numpy, tensorflow as tf
pixels, result = numpy.load("pixels.npy"), {}
session = onnxruntime.InferenceSession("model.onnx")
result["onnx"] = session.run(None, {"images": pixels})[0]
exported = jax.export.deserialize(bytearray(open("model.stablehlo", "rb").read()))
assert exported.platforms == ("cpu", "tpu", "cuda")
result["stablehlo"] = exported.call(pixels)
signatures = tf.saved_model.load("savedmodel/1").signatures
result["savedmodel"] = signatures["images"](images=tf.constant(pixels))["logits"]
pngs = [tf.io.encode_png(numpy.kron(p, numpy.ones((4, 4, 1), "u1"))).numpy() for p in pixels]
served = signatures["serving_default"](image_bytes=tf.constant(pngs))
result |= {name: served[name] for name in ("classes", "probabilities", "top5_scores")}
result["names"] = [[name.decode() for name in row] for row in served["top5_names"].numpy()]
numpy.savez("results.npz", **result)
assert not [name for name in sys.modules if name in ("models", "commands", "benchmarks")]
"""


@pytest.mark.long
def test_other_programs_read_it_in_another_process(trained, exported):
    expected = logits(trained[1])
    np.save(exported / "pixels.npy", images(32))
    subprocess.run([sys.executable, "-c", READER], cwd=exported, check=True)
    results = np.load(exported / "results.npz")
    for name in ("onnx", "stablehlo", "savedmodel"):
        np.testing.assert_allclose(results[name], expected, atol=1e-5 * np.abs(expected).max())
    probabilities = results["probabilities"]
    assert probabilities.shape == (3, 4)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    assert results["classes"].tolist() == probabilities.argmax(axis=1).tolist()
    assert (np.diff(results["top5_scores"]) <= 0).all()
    names = json.loads((exported / "export.json").read_text())["labels"]
    assert results["names"][:, 0].tolist() == [names[i] for i in results["classes"]]


def test_the_list_describes_the_export(exported):
    facts = json.loads((exported / "export.json").read_text())
    assert facts["benchmark"] == "resnet" and facts["step"] == 3 and "jax" in facts["versions"]
    assert all(row["error"] < 1e-5 for row in facts["formats"].values())
    files = {str(path.relative_to(exported)) for path in exported.rglob("*") if path.is_file()}
    files -= {"pixels.npy", "results.npz"}  # of the test of the programs
    assert {*facts["files"], "export.json"} == files and "savedmodel/1/saved_model.pb" in files
    for name in files:
        for secret in (str(exported.parent), str(pathlib.Path(export.__file__).parents[2])):
            assert secret.encode() not in (exported / name).read_bytes(), name


def test_pytorch_names_in_a_width_that_timm_lacks(exported):
    """transformers' own ResNet has a free width; its names are those of its source."""
    from safetensors.numpy import load_file

    arrays = load_file(exported / "model.safetensors")
    assert arrays["resnet.embedder.embedder.convolution.weight"].shape == (4, 3, 7, 7)
    assert arrays["classifier.1.weight"].shape == (4, 32)
    config = json.loads((exported / "config.json").read_text())
    assert config["hidden_sizes"] == [4, 8, 16, 32] and config["layer_type"] == "basic"


def test_a_pool_that_pytorch_lacks(tiny_records, tmp_path):
    workdir, _ = make_workdir(tmp_path, tiny_records, max_pool="same")
    with pytest.raises(ConfigError, match="pads its max-pool as TensorFlow does"):
        export.run(workdir, "latest", "hf", str(tmp_path / "out"))
    assert not (tmp_path / "out" / "export.json").exists()
    export.run(workdir, "latest", "hf", str(tmp_path / "out"), True)
    row = json.loads((tmp_path / "out" / "export.json").read_text())["formats"]["hf"]
    assert row["error"] > 1e-3 and "max-pool" in row["remark"]


def test_mistakes_take_one_line(trained, tmp_path, monkeypatch):
    def attempt(**values):
        export.run(**{"path": trained[0], "checkpoint": "latest", "formats": "onnx"} | values)

    with pytest.raises(CheckpointError, match="there is no .*/nothing; give a workdir"):
        attempt(path=str(tmp_path / "nothing"))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").touch()
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="has thesis.txt, which no export wrote"):
            attempt(out=str(tmp_path / "taken"), overwrite=overwrite)
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None)
    for name in ("onnx", "ctranslate2"):
        with pytest.raises(ConfigError, match=f"needs the package {name}, .*: pip install {name}"):
            attempt(formats=name)
    monkeypatch.undo()
    with pytest.raises(
        ConfigError, match="^--format=ctranslate2: .* which is exported as hf, onnx"
    ):
        attempt(formats="hf,ctranslate2", out=str(tmp_path / "out"))


def test_a_wrong_file_is_deleted(trained, tmp_path, monkeypatch):
    good = Graph.constant

    def bad(graph, name, array, *args):
        return good(graph, name, array + (name == "logits/bias"), *args)

    monkeypatch.setattr(Graph, "constant", bad)
    with pytest.raises(OutputError, match="off by .* nothing is exported"):
        export.run(trained[0], "latest", "onnx", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_an_export_is_replaced_only_where_that_is_asked_for(trained, tmp_path, monkeypatch):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    out.symlink_to(elsewhere)
    request = partial(export.run, trained[0], "latest", "onnx", str(out))

    def fail(path, parts):
        if path.endswith("model.onnx"):
            raise OSError("no space left")
        write(path, parts)

    write = storage.write
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write", fail)
        with pytest.raises(OutputError, match="no space left"):
            request()
    elsewhere.mkdir(exist_ok=True)
    request()  # what was cut short is gone
    (out / "model.onnx").write_bytes(b"of before")
    with pytest.raises(ConfigError, match=f"^--out={out} has an export: give --overwrite to"):
        request()
    (out / "old").mkdir()
    (out / "old/mine").touch()
    with pytest.raises(ConfigError, match=f"^--out={out} has old/mine, which no export wrote"):
        request(overwrite=True)
    (out / "old/mine").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write", fail)
        with pytest.raises(OutputError, match="no space left"):
            request(overwrite=True)
    assert (out / "model.onnx").read_bytes() == b"of before"
    request(overwrite=True)
    assert (out / "model.onnx").stat().st_size > 1000 and not (out / "old").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "elsewhere"} and out.is_symlink()


def test_an_export_that_is_killed_can_be_replaced(trained, tmp_path, monkeypatch):
    def killed(path, parts):
        if path.endswith("model.onnx"):
            raise KeyboardInterrupt
        write(path, parts)

    write, request = storage.write, partial(export.run, trained[0], "latest", "onnx", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            request()
    assert any(tmp_path.iterdir()) and not (tmp_path / "model.onnx").exists()
    request(overwrite=True)
    assert (tmp_path / "model.onnx").stat().st_size > 1000


def test_a_diverged_model_is_refused(tiny_records, tmp_path, monkeypatch):
    def nan(tree):
        return jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), tree)

    monkeypatch.setattr("tests.commands.export.test_export.drawn", nan)
    workdir, _ = make_workdir(tmp_path, tiny_records)
    with pytest.raises(CheckpointError, match="not finite; the run diverged"):
        export.run(workdir, "latest", "onnx")


def test_a_bucket(trained, gcs):
    out = gcs.bucket() + "/shared/model"
    export.run(trained[0], "latest", "onnx", out)
    names = set(gcs.names(out)) - {""}  # an object may stand for the folder
    export.run(trained[0], "latest", "onnx", out, overwrite=True)
    assert (
        set(gcs.names(out)) - {""} == names
        and json.loads(gcs.read(f"{out}/export.json"))["formats"]
    )
    assert {name.split("/")[0] for name in gcs.names(out.removesuffix("/model"))} <= {"", "model"}
