"""Detectors of other libraries from their file to scores: imported, evaluated, fine-tuned."""

import json
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import safetensors.numpy

import benchmarks
import run as runs
from benchmarks.detection.mask_rcnn import weights as torchvision
from benchmarks.detection.ssd import weights as reference
from configs import mask_rcnn, ssd
from engine import adoption
from engine import weights as saved
from engine.parts import Parts
from modes import evaluating, importing
from ops.trees import by_name
from start import Run, first_state


class Case(NamedTuple):
    """A small detector, and a file of it.

    Attributes:
      recipe: a module in configs.
      data: the fixture of records, whose 4 categories have ids up to 90.
      sizes: keys that the file decides.
      own: keys of the run.
      classes: of the file.
      heads: the parts that are new for other classes.
    """

    recipe: Any
    data: str
    sizes: dict[str, Any]
    own: dict[str, Any]
    classes: int
    heads: set[str]


EXTRAS = {"extra_squeezed": (4,) * 5, "extra_filters": (8, 8, 4, 4, 4)}
CASES = [
    Case(
        ssd,
        "tiny_scenes",
        {"resnet_stages": (1, 1, 1), "num_filters": 4, **EXTRAS},
        {"crop_side_min": 0.3, "max_samples": 3, "max_boxes": 6},
        4,
        {f"head{i}" for i in range(1, 7)},
    ),
    Case(
        mask_rcnn,
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
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    shapes = {
        k: tuple(x.shape) for k, x in by_name({"params": params, "model_state": state}).items()
    }
    of_ssd = case.recipe is ssd
    theirs = reference.theirs(shapes, classes) if of_ssd else torchvision.theirs(shapes)
    draw, arrays = np.random.default_rng(1), {}
    for name, shape in theirs.items():
        scale = (2 / max(np.prod(shape[1:]), 1)) ** 0.5 if len(shape) > 1 else 0.1
        values = draw.normal(0, scale, shape) + name.endswith(("running_var", "bn1.weight"))
        arrays[name] = np.abs(values) if name.endswith("running_var") else values
    safetensors.numpy.save_file({k: v.astype(np.float32) for k, v in arrays.items()}, path)


def settings(config, workdir, mode):
    notes = importing.settle(config, str(workdir), mode, ())
    return runs.read(config.lock(), str(workdir)), notes


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.recipe.__name__)
def test_a_file_is_imported_and_evaluated(case, request, tmp_path):
    """With its own keys; with ids as numbers, the gaps between them are classes as well."""
    data_dir, path = request.getfixturevalue(case.data), str(tmp_path / "model.safetensors")
    write_file(case, case.classes, path)
    workdir = tmp_path / "imported"
    importing.run(settings(configured(case, "", init_from=path), workdir, "import")[0])
    manifest = saved.peek(str(workdir))
    assert manifest and manifest["config"]["num_classes"] == case.classes
    assert manifest["config"]["max_pool"] == "torch" and manifest["imported"]["channels"] == "RGB"
    ready, _ = settings(configured(case, data_dir), workdir, "eval")
    assert 0 <= evaluating.evaluate(ready, "latest", 0)["mAP"] <= 1
    rows = json.loads((workdir / "eval/detections.json").read_text())
    assert rows and {row["category_id"] for row in rows} <= {3, 7, 12, 90}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.recipe.__name__)
def test_a_file_is_fine_tuned(case, request, tmp_path):
    """Sizes follow the file. Other classes get new heads; with the same classes nothing is new."""
    data_dir, path = request.getfixturevalue(case.data), str(tmp_path / "model.safetensors")
    write_file(case, 7, path)
    config = configured(case, data_dir, init_from=path)
    ready, notes = settings(config, tmp_path, "train")
    assert "config.max_pool='torch' instead of 'same', as the weights want it" in notes
    run = Run.open(ready)
    first_state(run, runs.plan(ready, run.benchmark, 90))
    rows = [line.split("\t") for line in (tmp_path / "init_from.txt").read_text().splitlines()]
    new = {name.removeprefix("params/").rpartition("/")[0] for what, name in rows if what == "new"}
    assert new == case.heads and sum(what == "taken" for what, _ in rows) > 2 * len(case.heads)

    config = configured(case, data_dir, init_from=path, num_classes=7)
    same = settings(config, tmp_path / "same", "train")[0].load_benchmark("")
    shapes = jax.eval_shape(same.init, jax.random.key(0))
    params, state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    weights = adoption.load(path, same.uses.read_foreign)
    adopted = adoption.adopt(same.adopt, params, state, weights, Parts("init_without", ""))[2]
    assert not adopted.new and not adopted.left
