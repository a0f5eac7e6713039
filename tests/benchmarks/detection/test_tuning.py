"""Recipes that fine-tune detectors: a model's sizes, new heads, two rates, kept statistics."""

from typing import Any

import jax
import numpy as np
import pytest

import benchmarks
import train
from benchmarks.base import Group
from benchmarks.detection.mask_rcnn import heads as mask_heads
from benchmarks.detection.ssd import heads as ssd_heads
from configs import finetune_mask_rcnn, finetune_ssd
from engine import weights as saved
from engine.adoption import adopt
from engine.parts import Parts
from errors import ConfigError
from modes import importing
from ops.trees import by_name
from tests.benchmarks.detection.test_imported import CASES, configured, settings, write_file

RECIPES = {"ssd": finetune_ssd, "mask_rcnn": finetune_mask_rcnn}
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
    importing.run(settings(configured(case, "", init_from=path), model, "import")[0])
    case = case._replace(recipe=recipe)
    ready, notes = settings(configured(case, data_dir, init_from=model), workdir, "train")
    assert {f"config.{key}" for key in case.sizes} <= {note.partition("=")[0] for note in notes}
    train.train_and_evaluate(ready, evaluating=False)
    rows = [line.split("\t") for line in (workdir / "init_from.txt").read_text().splitlines()]
    part = {
        name.removeprefix("params/").rpartition("/")[0] for what, name in rows if what == "part"
    }
    assert part == case.heads and "new" not in {what for what, _ in rows}
    before, after = (saved.load_weights(str(folder)) for folder in (model, workdir))
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
    weights, new = saved.Weights("model", *arrays), Parts("init_without", "")
    adoption = adopt(detector.adopt, params, state, weights, new)[2]
    heads = {name.removeprefix("params/").rpartition("/")[0] for name in adoption.part}
    assert heads == case.heads and not adoption.is_complete


@tuned
def test_a_model_must_be_named(case, recipe):
    config = recipe.get_config()
    assert config.init_env == ""
    with pytest.raises(ConfigError, match=r"config.init_from, which is no model: give [^\n]*$"):
        benchmarks.load(config.lock(), "").check_random_start(8)


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
    """Of each box the features are 4 codes, the logit of the background, and those of classes."""
    config = configured(CASES[0], "", **CASES[0].sizes, num_classes=2)
    detector: Any = benchmarks.load(config.lock(), "")
    counts = detector.settings.maps.layout.boxes_per_cell
    heads = [(f"head{i}", count) for i, count in enumerate(counts, 1)]
    own = {f"{head}/bias": -1 - numbered(7 * count) for head, count in heads}
    own |= {f"{head}/kernel": numbered(1, 7 * count) for head, count in heads}
    other = {f"{head}/bias": numbered(8 * count) for head, count in heads}
    other["head2/bias"] = numbered(8 * counts[1] + 1)  # of other boxes
    del other["head3/bias"]
    mixed = ssd_heads.renewed(detector, own, other)
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
    mixed = mask_heads.renewed(None, own, other)
    biases = {path: values.tolist() for path, values in mixed.items() if path.endswith("bias")}
    assert biases == {
        "box_head/class/bias": [0, -1, -2],
        "box_head/code/bias": [0, 1, 2, 3, 8, 9, 10, 11, 8, 9, 10, 11],
        "mask_head/mask/bias": [0, 2, 2],
    }
    for path in set(own) - set(other):
        assert mixed[path] is own[path]
