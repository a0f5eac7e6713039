"""Detectors of other libraries from their file to scores: imported, evaluated, fine-tuned."""

import json
import types
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import safetensors.numpy

import benchmarks
import train
from benchmarks.base import Group
from benchmarks.detection.mask_rcnn import weights as torchvision
from benchmarks.detection.ssd import weights as reference
from commands import importing
from common.trees import Parts, by_name
from configs import finetune, mask_rcnn, ssd
from engine import evaluate
from engine.checkpoint import model_source
from engine.checkpoint.saver import adopt, first_state
from engine.plan import make_plan
from engine.run import Run
from tests.benchmarks.detection.test_weights import shapes, written
from tests.conftest import resolved


class Case(NamedTuple):
    """A small detector, and a file of it."""

    recipe: Any  # a module in configs
    weights: Any  # the module that knows the other library's names
    data: str  # the fixture of records, whose 4 categories have ids up to 90
    sizes: dict[str, Any]  # keys that the file decides
    own: dict[str, Any]  # keys of the run
    classes: int  # of the file
    heads: set[str]  # the parts that are new for other classes


EXTRAS = {"extra_squeezed": (4,) * 5, "extra_filters": (8, 8, 4, 4, 4)}
CASES = [
    Case(
        ssd,
        reference,
        "tiny_scenes",
        {"resnet_stages": (1, 1, 1), "num_filters": 4, **EXTRAS},
        {"crop_side_min": 0.3, "max_samples": 3, "max_boxes": 6},
        4,
        {f"head{i}" for i in range(1, 7)},
    ),
    Case(
        mask_rcnn,
        torchvision,
        "tiny_masks",
        {"resnet_stages": (1, 1, 1, 1), "resnet_bottleneck": False, "num_filters": 4}
        | {"pyramid_filters": 8, "box_features": (6, 5), "mask_features": (3, 3)},
        {"image_short": 48, "image_long": 64, "image_shape": (64, 64), "region_samples": 8}
        | {"proposals_before_nms": 20, "proposals_after_nms": 10, "max_boxes": 6}
        | {"eval_proposals_before_nms": 20, "eval_proposals_after_nms": 10},
        90,
        {"box_head/class", "box_head/code", "mask_head/mask"},
    ),
]


def configured(case, data_dir, **values) -> Any:
    config = case.recipe.get_config()
    config.update({"data_dir": data_dir, "precision": "float32", "compilation_cache": ""})
    config.update({"train_batch_size": 8, "eval_batch_size": 8, "train_steps": "2"})
    config.update({"warmup_steps": "1", "learning_rate_decay_steps": "", "max_detections": 20})
    config.update({"input_streams": 2, "log_step_count_steps": "1", **case.own, **values})
    return config


def write_file(case, classes, path):
    """Writes a file of random weights, with the names and layouts of the other library."""
    config = case.recipe.get_config()
    config.update({"num_classes": classes, **case.sizes})
    model = benchmarks.load(config.lock(), "")
    draw = np.random.default_rng(1)
    arrays = written(case.weights, shapes(model), np.random.default_rng(0), **config.to_dict())
    for name, shape in {name: array.shape for name, array in arrays.items()}.items():
        scale = (2 / max(np.prod(shape[1:]), 1)) ** 0.5 if len(shape) > 1 else 0.1
        values = draw.normal(0, scale, shape) + name.endswith(("running_var", "bn1.weight"))
        arrays[name] = np.abs(values) if name.endswith("running_var") else values
    safetensors.numpy.save_file({k: v.astype(np.float32) for k, v in arrays.items()}, path)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.recipe.__name__)
def test_a_file_is_imported_and_evaluated(case, request, tmp_path):
    """With its own keys; with ids as numbers, the gaps between them are classes as well."""
    data_dir, path = request.getfixturevalue(case.data), str(tmp_path / "model.safetensors")
    write_file(case, case.classes, path)
    workdir = tmp_path / "imported"
    importing.run(resolved(configured(case, "", init_from=path), workdir, "import")[0])
    manifest = model_source.peek(str(workdir))
    assert manifest and manifest["config"]["num_classes"] == case.classes
    assert manifest["config"]["max_pool"] == "torch" and manifest["imported"]["channels"] == "RGB"
    ready, _ = resolved(configured(case, data_dir), workdir, "eval")
    assert 0 <= evaluate.evaluate(ready, "latest", 0)["mAP"] <= 1
    rows = json.loads((workdir / "eval/detections.json").read_text())
    assert rows and {row["category_id"] for row in rows} <= {3, 7, 12, 90}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.recipe.__name__)
def test_a_file_is_fine_tuned(case, request, tmp_path):
    """Sizes follow the file. Other classes get new heads; with the same classes nothing is new."""
    data_dir, path = request.getfixturevalue(case.data), str(tmp_path / "model.safetensors")
    write_file(case, 7, path)
    config = configured(case, data_dir, init_from=path)
    ready, notes = resolved(config, tmp_path, "train")
    assert "config.max_pool='torch' instead of 'same', as the weights want it" in notes
    run = Run.open(ready)
    first_state(run.programs, make_plan(ready, run.benchmark, 90))
    rows = [line.split("\t") for line in (tmp_path / "init_from.txt").read_text().splitlines()]
    new = {name.removeprefix("params/").rpartition("/")[0] for what, name in rows if what == "new"}
    assert new == case.heads and sum(what == "taken" for what, _ in rows) > 2 * len(case.heads)

    config = configured(case, data_dir, init_from=path, num_classes=7)
    same = resolved(config, tmp_path / "same", "train")[0].load_benchmark("")
    drawn = jax.eval_shape(same.init, jax.random.key(0))
    params, state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), drawn)
    weights = model_source.initial_weights(path, same.uses.read_foreign)
    adopted = adopt(same.adopt, params, state, weights, Parts("init_without", ""))[2]
    assert not adopted.new and not adopted.left


RECIPES = {
    name: types.SimpleNamespace(get_config=finetune.RECIPES[name]) for name in ("ssd", "mask_rcnn")
}
tuned = pytest.mark.parametrize(
    ("case", "recipe"), [*zip(CASES, RECIPES.values(), strict=True)], ids=RECIPES
)


@pytest.mark.long
@tuned
def test_a_model_is_fine_tuned(case, recipe, request, tmp_path):
    """The model is a workdir; its classes are as many as the data's, but others."""
    data_dir, path = request.getfixturevalue(case.data), str(tmp_path / "model.safetensors")
    model, workdir = str(tmp_path / "model"), tmp_path / "run"
    write_file(case, 4, path)
    importing.run(resolved(configured(case, "", init_from=path), model, "import")[0])
    case = case._replace(recipe=recipe)
    ready, notes = resolved(configured(case, data_dir, init_from=model), workdir, "train")
    assert {f"config.{key}" for key in case.sizes} <= {note.partition("=")[0] for note in notes}
    train.train_and_evaluate(ready, evaluating=False)
    rows = [line.split("\t") for line in (workdir / "init_from.txt").read_text().splitlines()]
    part = {
        name.removeprefix("params/").rpartition("/")[0] for what, name in rows if what == "part"
    }
    assert part == case.heads and "new" not in {what for what, _ in rows}
    before, after = (model_source.load(str(folder)) for folder in (model, workdir))
    jax.tree.map(np.testing.assert_array_equal, before.model_state, after.model_state)
    same = [
        np.array_equal(value, by_name(after.params)[name])
        for name, value in by_name(before.params).items()
    ]
    assert not all(same)


@pytest.mark.parametrize("case", CASES, ids=RECIPES)
def test_heads_of_as_many_new_classes_are_taken_in_part(case):
    """Also of shapes alone, before the run is compiled: else the other classes are refused."""
    config = configured(case, "", **case.sizes, num_classes=4, new_classes=True)
    detector: Any = benchmarks.load(config.lock(), "")
    params, state = jax.eval_shape(detector.init, jax.random.key(0))
    arrays = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), (params, state))
    weights, new = model_source.Weights("model", *arrays), Parts("init_without", "")
    adoption = adopt(detector.adopt, params, state, weights, new)[2]
    heads = {name.removeprefix("params/").rpartition("/")[0] for name in adoption.part}
    assert heads == case.heads and not adoption.is_complete


RATES = [
    {"head decayed": Group(True, 3.0), "decayed": Group(True)},
    {
        **{"head decayed": Group(True, 3.0), "head biases": Group(rate=6.0)},
        **{"decayed": Group(True), "biases": Group(rate=2.0), "frozen": Group(rate=0.0)},
    },
]


@pytest.mark.parametrize(
    ("case", "by_label"), [*zip(CASES, RATES, strict=True)], ids=["ssd", "mask_rcnn"]
)
def test_heads_have_a_rate_of_their_own(case, by_label):
    config = configured(case, "", **case.sizes, num_classes=4, head_learning_rate=3.0)
    detector = benchmarks.load(config.lock(), "")
    params, _ = jax.eval_shape(detector.init, jax.random.key(0))
    labels = {name: detector.label(name) for name in by_name(params)}
    assert {label: detector.groups[label] for label in labels.values()} == by_label
    heads = {name.rpartition("/")[0] for name, label in labels.items() if label[:4] == "head"}
    assert heads == case.heads


def numbered(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_boxes_and_background_of_an_ssd_stay():
    """Of each box the features are 4 deltas, the logit of the background, and those of classes."""
    config = configured(CASES[0], "", **CASES[0].sizes, num_classes=2)
    detector: Any = benchmarks.load(config.lock(), "")
    counts = detector.settings.maps.default_boxes.boxes_per_cell
    heads = [(f"head{i}", count) for i, count in enumerate(counts, 1)]
    own = {f"{head}/bias": -1 - numbered(7 * count) for head, count in heads}
    own |= {f"{head}/kernel": numbered(1, 7 * count) for head, count in heads}
    other = {f"{head}/bias": numbered(8 * count) for head, count in heads}
    other["head2/bias"] = numbered(8 * counts[1] + 1)  # of other boxes
    del other["head3/bias"]
    mixed = reference.renew_heads(detector.settings, own, other)
    assert mixed["head1/bias"][:14].tolist() == [
        *(0, 1, 2, 3, 4, -6, -7),
        *(8, 9, 10, 11, 12, -13, -14),
    ]
    for path in ("head2/bias", "head3/bias", "head1/kernel"):
        assert mixed[path] is own[path]


def test_new_classes_of_a_mask_rcnn_begin_with_the_mean_box_and_mask():
    """The background stays; 3 classes become 2."""
    sizes = {"box_head/class": 1, "box_head/code": 4, "mask_head/mask": 1}
    own = {f"{layer}/bias": -numbered(3 * size) for layer, size in sizes.items()}
    own |= {f"{layer}/kernel": numbered(1, 3 * size) for layer, size in sizes.items()}
    other = {f"{layer}/bias": numbered(4 * size) for layer, size in sizes.items()}
    mixed = torchvision.renew_heads(None, own, other)
    biases = {path: values.tolist() for path, values in mixed.items() if path.endswith("bias")}
    assert biases == {
        "box_head/class/bias": [0, -1, -2],
        "box_head/code/bias": [0, 1, 2, 3, 8, 9, 10, 11, 8, 9, 10, 11],
        "mask_head/mask/bias": [0, 2, 2],
    }
    for path in set(own) - set(other):
        assert mixed[path] is own[path]
