"""What each benchmark promises the commands: every member of its kind of use, on a tiny input."""

import functools
import io
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from benchmarks.uses import Boxes, Classes, Items, Sentences, Uses
from tests.benchmarks.test_benchmarks import (
    TINY,
    job,  # noqa: F401 (a fixture)
)
from tests.helpers.uses import stub

KIND = {
    **{"gnmt": Sentences, "transformer": Sentences, "languages": Sentences},
    **{"mask_rcnn": Boxes, "ssd": Boxes, "ncf": Items, "resnet": Classes},
}
KINDS = (Boxes, Classes, Items, Sentences)


def shape(x: Any) -> Any:
    return tuple(x.shape), np.dtype(x.dtype)


def check_classes(uses: Classes, benchmark: Any, params: Any, state: Any) -> None:
    count, size = uses.num_classes, uses.input_spec.size
    images = jax.ShapeDtypeStruct((2, size, size, 3), np.uint8)
    outputs = jax.eval_shape(uses.classify, params, state, images)
    assert shape(outputs["logits"]) == ((2, count), np.float32)
    assert outputs["features"].shape[0] == 2 and outputs["features"].dtype == np.float32
    assert len(benchmark.metadata["class_names"]) == count
    labels = jax.ShapeDtypeStruct((2,), np.int32)
    maps: Any = jax.eval_shape(uses.heat_maps, params, state, images, labels)
    assert shape(maps) == ((2, size, size), np.float32)


def check_boxes(uses: Boxes, benchmark: Any, params: Any, state: Any) -> None:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), (9, 99, 199)).save(file, "JPEG")
    leaves, spec = uses.inputs(file.getvalue(), 30, 40), benchmark.batch_spec("eval", 1)[0]
    assert {*leaves} == {*spec} - {"id", "mask"}
    assert all(shape(x) == (spec[name].shape[1:], spec[name].dtype) for name, x in leaves.items())
    batch = {name: x[None] for name, x in leaves.items()}
    outputs = jax.eval_shape(benchmark.predict, params, state, batch)
    row: Any = {name: np.ones(x.shape[1:], x.dtype) for name, x in outputs.items()}
    row["score"][:] = 0
    row["score"][:4] = 0.25, np.nan, 0.75, 0.5
    row["boxes"][:] = 1, 2, 21, 32
    found = uses.detections(row, 30, 40)
    assert [each.score for each in found] == [0.75, 0.5, 0.25]
    assert {(each.number, each.box) for each in found} == {(1, (1, 2, 21, 32))}
    for each in found:
        assert bool(each.outline) == bool(each.inside) == ("masks" in row)
        inside = each.inside() if each.inside else np.zeros((30, 40), bool)
        assert shape(inside) == ((30, 40), bool)
    parts = uses.parts(file.getvalue(), 30, 40, 32)
    assert uses.tile_side >= 1 and len(parts) == 3  # the photo and two tiles
    assert {name: shape(x) for name, x in parts[2]().items()} == {
        name: shape(x) for name, x in leaves.items()
    }
    rows = [{**row, "score": row["score"] * (i == 2)} for i in range(3)]
    (best, *_) = uses.detections(uses.join(rows, 30, 40, 32), 30, 40)
    assert (best.score, best.box) == (0.75, (1, 10, 21, 40))  # the tile begins in column 8
    file, listed = uses.listed(["a.jpg", "12.jpg"])
    assert file and all(len(row) == 3 for row in listed.values())
    categories = benchmark.metadata["categories"]
    assert all(isinstance(i, int) and isinstance(name, str) for i, name in categories)


def check_sentences(uses: Sentences, benchmark: Any, params: Any, state: Any) -> None:
    ids = uses.encode("ein Satz")
    assert uses.encode("") == [] != ids and all(isinstance(i, int) and i > 0 for i in ids)
    assert [*uses.lengths] == sorted({*uses.lengths}) and uses.beams >= 2
    inputs = jax.ShapeDtypeStruct((3, uses.lengths[0]), np.int32)
    for top in (1, uses.beams):
        tokens, scores = jax.eval_shape(functools.partial(uses.n_best, top=top), params, inputs)
        assert shape(scores) == ((3, top), np.float32)
        assert tokens.shape[:2] == (3, top) and tokens.ndim == 3 and tokens.dtype == np.int32
    text = uses.text(np.asarray(ids, np.int32))
    assert isinstance(text, str) and "\n" not in text
    assert uses.is_cut(np.array([1, 0], np.int32)) is False
    assert 0 <= uses.unknown_words([ids]) <= len(ids)


def check_items(uses: Items, benchmark: Any, params: Any, state: Any) -> None:
    params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), params)
    users, items = uses.finder("user"), uses.finder("item")
    for finder in (users, items):
        assert finder.ids.dtype == np.uint32 and (np.diff(finder.ids.astype(int)) > 0).all()
        assert isinstance(finder.name(0), str)
        (found, (word, reason)) = finder.find(f"{finder.ids[1]},?")
        assert found == (str(finder.ids[1]), 1) and word == "?" and isinstance(reason, str)
    rated, vector = uses.rated(0), uses.vector(params, 0)
    assert rated.dtype.kind == "i" and rated.max() < len(items.ids)
    newcomer = uses.newcomer(params, rated.tolist())
    assert newcomer is not None and vector is not None
    assert shape(newcomer) == shape(vector) and vector.ndim == 1
    table, matrix = uses.search_vectors(params)
    assert table.dtype == matrix.dtype == np.float32
    assert len(table) == len(items.ids) and matrix.shape == (len(vector) + 1, table.shape[1])
    assert shape(uses.is_trained()) == ((len(items.ids),), np.bool_)
    vectors = jax.ShapeDtypeStruct((2, len(vector)), np.float32)
    scores = jax.eval_shape(uses.scores, params, vectors)
    assert shape(scores) == ((2, len(items.ids)), np.float32)


CHECKS = {
    Boxes: check_boxes,
    Classes: check_classes,
    Items: check_items,
    Sentences: check_sentences,
}


def test_every_benchmark_keeps_what_its_kind_of_use_promises(job):  # noqa: F811
    config, benchmark = job.config(), job.make()
    uses, kind = benchmark.uses, KIND[config.benchmark]
    assert [each for each in KINDS if isinstance(uses, each)] == [kind]
    assert uses.at_once >= 1 and uses.hint and all(map(str.strip, uses.commands.values()))
    assert all("{workdir}" in command for command in uses.commands.values())
    meaning, metadata = uses.data_meaning(), benchmark.metadata
    assert all(metadata[name] == [*values] for name, values in meaning.items())
    uses.check_files({**metadata}, "runs/x")
    CHECKS[kind](uses, benchmark, *jax.eval_shape(benchmark.init, jax.random.key(0)))


def test_every_benchmark_declares_a_kind():
    assert sorted(KIND) == sorted(TINY)


@pytest.mark.parametrize(
    ("kind", "member"),
    [(kind, name) for kind in KINDS for name in sorted(kind.__abstractmethods__)],
)
def test_a_use_without_a_member_that_it_owes_cannot_be_made(kind, member):
    """Members with a default cannot be missing."""
    made: Any = type("Own", (kind,), dict.fromkeys({*kind.__abstractmethods__} - {member}))
    with pytest.raises(TypeError, match=f"abstract class Own .*{member}"):
        made()
    assert isinstance(stub(kind), kind) and isinstance(Uses(), Uses)
