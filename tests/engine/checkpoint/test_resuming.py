"""A run compares itself with its checkpoint: data, settings, metrics."""

import contextlib
import json
import os
import shutil
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import train
from benchmarks.resnet import ImageClassifier
from common.data import files, records
from common.errors import CheckpointError, ConfigError, DataError
from engine import evaluate
from engine.cadence import Every
from engine.checkpoint import manifest as manifests
from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.saver import restore_metrics
from engine.plan import Programs, read_settings
from tests.conftest import make_tiny_config, plan_of


def renamed(source, target, mapping):
    """A copy of the tiny records in which the classes have other names."""
    from common.tensorflow import tensorflow

    tf = tensorflow()
    target.mkdir()
    for path in sorted(Path(source).iterdir()):
        rows = []
        for data in records.read_shard(str(path)):
            example = tf.train.Example.FromString(data)
            feature = example.features.feature["image/class/synset"].bytes_list
            feature.value[0] = mapping(feature.value[0].decode()).encode()
            rows.append(example.SerializeToString())
        records.write_shard(str(target / path.name), rows)
    return str(target)


@pytest.fixture
def workdir(calm_run, tmp_path):
    """A copy of a finished run, without what it knows of its files of data."""
    copy = Path(shutil.copytree(calm_run[0], tmp_path / "run"))
    shutil.rmtree(copy / "data_index", ignore_errors=True)
    return copy


def manifest(workdir, step):
    return json.loads((workdir / f"checkpoints/{step}/manifest/metadata").read_bytes())


def settings(workdir, data_dir, **overrides):
    return read_settings(make_tiny_config(data_dir, **overrides), str(workdir))


@pytest.fixture
def notes(caplog):
    """Returns the logged lines with a word since the last call."""

    def read(word="NOTE"):
        texts = [text for text in caplog.messages if word in text]
        caplog.clear()
        return texts

    with caplog.at_level("INFO", logger="tpu_suite"):
        yield read


@pytest.mark.long
def test_a_checkpoint_describes_its_data(workdir, tiny_records):
    facts = manifest(workdir, 12)
    assert facts["class_names"] == ["n0", "n1", "n2", "n3"]
    assert facts["data"].keys() == {"train records", "eval records", "manifest.json"}
    assert facts["data"]["train records"].startswith("4 files with 90 examples, SHA-256 ")
    assert facts["accepted_data"] == []
    keys = manifests.Manifest.__annotations__.keys()
    assert facts.keys() == keys - {"categories", "imported"}  # of detectors; of other libraries


def test_moved_data_are_the_same(workdir, tiny_records, tmp_path, notes):
    moved = str(shutil.copytree(tiny_records, tmp_path / "moved"))
    evaluate.evaluate(settings(workdir, moved), "latest", 0.0)
    assert notes() == []


@pytest.mark.long
def test_other_classes_are_refused(workdir, tiny_records, tmp_path, notes):
    swapped = {"n1": "n2", "n2": "n1"}
    other = renamed(tiny_records, tmp_path / "other", lambda name: swapped.get(name, name))
    asked = settings(workdir, other, train_steps="15")
    expected = (
        rf"{workdir}/checkpoints/12 was trained on other data: "
        r"entry 1 of class_names \(2 differ\): "
        "'n1' in the checkpoint, 'n2' in the data. .* --config.accept_other_data=True"
    )
    with pytest.raises(DataError, match=expected):
        evaluate.evaluate(asked, "latest", 0.0)
    with pytest.raises(DataError, match=expected):
        train.train_and_evaluate(asked)
    notes()
    accepted = settings(workdir, other, train_steps="15", accept_other_data=True)
    train.train_and_evaluate(accepted)
    accepted_notes = notes("was trained on other data: entry 1")
    assert len(accepted_notes) == 1
    facts = manifest(workdir, 15)
    assert facts["class_names"] == ["n0", "n2", "n1", "n3"]
    assert facts["accepted_data"] == [accepted_notes[0].partition("was trained on other data: ")[2]]


@pytest.mark.long
def test_another_best_is_told_and_kept(tiny_records, tmp_path, notes, monkeypatch):
    """By the first measure step 4 is the best, by the second step 2, whose checkpoint is gone."""
    accuracies = [0.1, 0.4, 0.2, 0.3, 0.1, 0.1, 0.1, 0.1]
    scores = iter(zip(accuracies, [0.9, 0.1, 0.5, 0.3, 0.2, 0.1, 0.95, 0.1], strict=True))

    def score(self, rows):
        accuracy, macro_f1 = next(scores)
        others = {"top_5_accuracy": 1.0, "loss": 1.0}
        return {"top_1_accuracy": accuracy, "macro_f1": macro_f1, **others}

    monkeypatch.setattr(ImageClassifier, "score", score)
    every = {"steps_per_checkpoint": "2", "steps_per_eval": "2", "keep_checkpoints": 1}
    before = settings(tmp_path, tiny_records, train_steps="8", **every)
    train.train_and_evaluate(before)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["4", "8"]
    notes()
    every |= {"train_steps": "12", "best_by": "macro_f1", "patience": 5}
    train.train_and_evaluate(settings(tmp_path, tiny_records, **every))
    (note,) = [text for text in notes() if "the best checkpoint" in text]
    for text in ("was by top_1_accuracy", "now by macro_f1: step 8 (step 2 was ", "; step 4, "):
        assert text in note
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["12", "8"]
    facts = manifest(tmp_path, 12)
    assert facts["target_metric"] == "macro_f1"
    assert facts["target_metrics"] == ["macro_f1", "top_1_accuracy"]
    with contextlib.closing(
        Checkpointer(str(tmp_path / "checkpoints"), keep=1, best=None)
    ) as checkpoints:
        notes()
        assert checkpoints.choose("best") == 8
        assert "by macro_f1 step 2 is better than 8" in str(notes())
        assert checkpoints.choose("best", "top_1_accuracy") == 8 and len(notes()) == 1
    # Five evaluations have brought no better macro F1: the run is over.
    every["train_steps"] = "20"
    assert train.train_and_evaluate(settings(tmp_path, tiny_records, **every))
    assert "brought no better macro f1" in str(notes("already finished: step 12 of 20"))
    # What runs again counts, though it has no checkpoint at the start.
    shutil.rmtree(tmp_path / "checkpoints/12")
    every["train_steps"] = "12"
    train.train_and_evaluate(settings(tmp_path, tiny_records, **every))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["10", "12"]


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_score_that_does_not_exist_is_refused(evaluates, workdir, tiny_records):
    asked = settings(workdir, tiny_records, train_steps="15", best_by="macro_F1")
    with pytest.raises(ConfigError, match=r"config.best_by='macro_F1'.* macro_f1, .* recall/n0, "):
        if evaluates:
            evaluate.evaluate(asked, "best", 0.0)
        else:
            train.train_and_evaluate(asked)


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        (["a", "b"], ["a", "b", ""], []),
        (["a", "b"], ["", ""], []),
        ([], ["a"], []),
        ("x1", "x1", []),
        ("x1", "x2", ["names: 'x1' in ", "'x2' in "]),
        ({"digest": "0123456789abcdef" * 4}, {"digest": "f" * 64}, ["'0123456789ab...'", "'ffff"]),
        (["a", "b", "c"], ["a", "c"], ["entry 1 of names (2 differ; 3 then, 2 now): 'b' ", "'c' "]),
        ([[3]], [[3], [4, "b"]], ["entry 1 of names (1 differ; 1 then, 2 now): nothing ", "'b'"]),
    ],
)
def test_what_differs_is_said_with_both_versions(then, now, words):
    lines = manifests.other_meaning({"names": then}, {"names": now})
    assert len(lines) == bool(words) and all(word in line for line in lines for word in words)
    assert manifests.other_meaning({}, {"names": now}) == []


def test_more_classes_are_refused_by_their_names_before_the_shapes_of_arrays(workdir, tiny_records):
    path = workdir / "checkpoints/12/manifest/metadata"
    facts = manifest(workdir, 12)
    facts["tree"]["model"]["params/head/bias"] = "float32[3]"
    path.write_text(json.dumps({**facts, "class_names": ["n0", "n1", "n3"]}))
    expected = r"entry 2 of class_names \(2 differ; 3 then, 4 now\): 'n3' in .*, 'n2' in the data"
    with pytest.raises(DataError, match=expected):
        train.train_and_evaluate(settings(workdir, tiny_records))
    accepted = settings(workdir, tiny_records, accept_other_data=True)
    with pytest.raises(CheckpointError, match=r"bias: the checkpoint has float32\[3\]"):
        train.train_and_evaluate(accepted)


def test_an_imported_model_has_names_of_its_own(workdir, tiny_records, notes):
    path = workdir / "checkpoints/12/manifest/metadata"
    facts = {**manifest(workdir, 12), "class_names": ["tench", "n1", "n2", "n3"], "imported": {}}
    path.write_text(json.dumps(facts))
    evaluate.evaluate(settings(workdir, tiny_records), "latest", 0.0)
    (note,) = notes()
    assert (
        "was trained on other data: entry 0 of class_names (1 differ): 'tench' in the checkpoint"
        in note
    )


@pytest.mark.long
def test_weights_with_a_head_for_other_classes_are_refused(workdir, tiny_records, tmp_path, notes):
    other = renamed(tiny_records, tmp_path / "other", lambda name: f"x{name}")

    def start(**overrides):
        target = tmp_path / "target"
        asked = settings(target, other, train_steps="1", init_from=str(workdir), **overrides)
        train.train_and_evaluate(asked, evaluating=False)
        shutil.rmtree(target)

    with pytest.raises(DataError, match=r"entry 0 of class_names \(4 differ\): 'n0' in the check"):
        start()
    notes()
    start(init_without="head")
    assert notes("was trained on other data") == []
    start(accept_other_data=True)
    assert len(notes("was trained on other data: entry 0")) == 1


@pytest.mark.long
def test_other_records_are_a_note(workdir, tiny_records, tmp_path, notes):
    other = Path(shutil.copytree(tiny_records, tmp_path / "other"))
    first, second = other / "train-00000-of-00004", other / "train-00003-of-00004"
    rows = [*records.read_shard(str(first)), *records.read_shard(str(second))]
    records.write_shard(str(first), rows[1:24])  # as many records as before, in other files
    records.write_shard(str(second), [rows[0], *rows[24:]])
    evaluate.evaluate(settings(workdir, str(other)), "latest", 0.0)
    assert notes() == []  # the records to evaluate are the same
    train.train_and_evaluate(settings(workdir, str(other), train_steps="15"))
    (note,) = notes("the data have changed")
    before, now = manifest(workdir, 12)["data"], manifest(workdir, 15)["data"]
    assert f"train records before: {before['train records']}; now: {now['train records']}" in note
    assert before["eval records"] == now["eval records"]


def test_lines_identify_files_by_name_size_and_count_and_the_manifest(tmp_path):
    for name, size in (("b", 3), ("a", 2)):
        (tmp_path / name).write_bytes(bytes(size))
    a, b = str(tmp_path / "a"), str(tmp_path / "b")

    def line(paths, counts):
        return files.identity("records", str(tmp_path), paths, counts)

    first = line([a, b], [5, 7])
    assert first["manifest.json"] == "missing"
    assert first == line([b, a], [7, 5])
    assert first == line([a, b, a], [2, 7, 3])  # a path may come several times
    others = [line([a, b], [7, 5]), line([a], [12])]
    (tmp_path / "a").write_bytes(bytes(4))
    others.append(line([a, b], [5, 7]))
    assert len({one["records"] for one in (first, *others)}) == 4
    (tmp_path / "manifest.json").write_bytes(b"{}")
    last = line([a, b], [5, 7])
    assert last == {**others[-1], "manifest.json": "SHA-256 44136fa355b3678a"}


@pytest.mark.parametrize(
    ("logged", "newest", "lacks"), [([], 2, 0), ([], 3, 3), ([3, 6], 8, 0), ([3, 6], 9, 9)]
)
def test_what_the_metrics_lack_is_told(logged, newest, lacks):
    notes, rows = [], [{"split": "train", "step": step} for step in logged]
    history = types.SimpleNamespace(rows=[*rows, {"split": "eval", "step": 99}], damaged=0)
    history.restore = len
    reporter: Any = types.SimpleNamespace(say=notes.append, history=history)
    plan: Any = types.SimpleNamespace(
        log_every=Every.parse("3", batch_size=1, num_examples=9, name="x")
    )
    restore_metrics(reporter, plan, {"step": newest})
    text = f"NOTE metrics.jsonl lacks the training of steps {lacks} to {newest}"
    assert notes == [text] * bool(lacks)
    notes.clear()
    plan.log_every = Every()
    restore_metrics(reporter, plan, {"step": newest, "evaluations": [{}, {}]})
    assert notes == [f"NOTE 2 scores that it lacked are from checkpoint {newest}"]


def test_other_batches_of_batch_norm_are_told(tiny_records):
    """With bn_span=1 they follow from the number of devices."""
    config = make_tiny_config(tiny_records)
    programs = [
        Programs.make(read_settings(config), "", jax.devices()[:count]) for count in (8, 2, 1)
    ]
    assert [p.norm_examples for p in programs] == [2, 8, 16]
    state = programs[0].abstract_state(plan_of(config, 90)).model_state
    unchanged = [manifests.norm_change(programs[0], then, state) for then in (2, None)]
    assert unchanged == ["", ""]
    text = manifests.norm_change(programs[0], 8, state)
    assert "over 8 images before and averages over 2 now" in text and "=8/16 keeps 8" in text
    text = manifests.norm_change(programs[2], 2, state)
    assert "8 times as many micro-batches" in text and "config.bn_span=2/2" in text
    without = {"count": jax.ShapeDtypeStruct((), jnp.int32)}
    assert manifests.norm_change(programs[0], 8, without) == ""


@pytest.mark.parametrize(
    ("then", "now", "lines"),
    [
        ({"a": [1, [2, 3]], "b": {"c": []}}, {"a": (1, (2, 3)), "b": {"c": ()}}, []),
        ({"a": [1, 2]}, {"a": (1, 3)}, ["a was [1, 2], is now [1, 3]"]),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, ["a.b.c was 1, is now 2"]),
        ({"z": 1, "a": 0}, {"a": "0"}, ["a was 0, is now '0'", "z was 1, is now None"]),
        ({}, {"a": {"b": 0.5}}, ["a.b was None, is now 0.5"]),
        ({"a": {"b": 1}}, {"a": 1}, ["a was None, is now 1", "a.b was 1, is now None"]),
    ],
)
def test_changes_are_listed_by_key(then, now, lines):
    assert manifests.changes(then, now) == lines
