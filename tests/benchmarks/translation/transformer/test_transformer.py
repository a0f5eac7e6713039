"""The Transformer's glue: batches, scores, files about the predictions, mistakes in a config."""

import importlib
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import pytest

import benchmarks
from benchmarks.translation import transformer
from benchmarks.translation.vocabulary import EOS
from errors import UserError

TINY: dict[str, Any] = {
    **{"row_length": 12, "eval_lengths": (4, 9), "extra_length": 2, "beam_size": 2},
    **{"num_layers": 1, "width": 16, "mlp_width": 16, "num_heads": 2, "precision": "float32"},
    **{"shuffle_buffer_size": 48, "input_streams": 4},
}


def make(data_dir: str, **overrides: Any) -> Any:
    config = importlib.import_module("configs.transformer").get_config()
    config.update({"data_dir": data_dir, **TINY, **overrides})
    return benchmarks.load(config.lock(), f"{data_dir}/index")


@pytest.fixture
def folder(tiny_sentences, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(tiny_sentences, tmp_path / "data")


def lines(folder: str) -> list[str]:
    return pathlib.Path(folder, "references.txt").read_text().splitlines()


def perfect(benchmark: Any, wrong: int = 0) -> list[dict[str, np.ndarray]]:
    """What `predict` would return of a perfect model, in an order of its own; some are empty."""
    source, rows = benchmark.source("eval"), []
    wanted = lines(source.shards.paths[0].rpartition("/")[0])
    for i, line in enumerate(wanted[: source.shards.total]):
        tokens = [] if i < wrong else [*benchmark.vocabulary.encode(line), EOS]
        rows.append({"id": np.array([i]), "tokens": np.array([tokens + [0] * (12 - len(tokens))])})
    return [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]


def test_a_perfect_translation(tiny_sentences):
    benchmark = make(tiny_sentences)
    scores = benchmark.score(iter(perfect(benchmark)))
    assert scores["BLEU"] == pytest.approx(1) and scores["exact"] == 1
    assert 0.3 < benchmark.score(iter(perfect(benchmark, wrong=5)))["BLEU"] < 0.95
    (shown,) = benchmark.uses.exhibits(iter(perfect(benchmark, wrong=1)))
    files = shown.files
    assert len(shown.rows) == 12 and shown.rows[1][2] == "the same"
    assert files["translations.txt"].decode().splitlines() == ["", *lines(tiny_sentences)[1:]]
    assert "22 of 23 translations equal" in files["sentences.txt"].decode()
    (source, _, reference, exact) = files["translations.tsv"].decode().splitlines()[1].split("\t")
    assert source.split() == reference.split()[::-1] and exact == "0"


def test_references_are_decoded_where_there_is_no_file(folder):
    wanted = lines(folder)
    (pathlib.Path(folder) / "references.txt").unlink()
    benchmark = make(str(folder))
    assert benchmark.references == wanted


def test_sentences_are_sorted_into_few_shapes(tiny_sentences):
    benchmark = make(tiny_sentences)
    batches = list(benchmark.eval_batches(8, 0, 1))
    shapes = [batch["inputs"].shape for batch in batches]
    assert shapes == sorted(shapes) and {shape[1] for shape in shapes} == {4, 9}
    lengths = np.concatenate([(batch["inputs"] > 0).sum(1)[batch["mask"] > 0] for batch in batches])
    assert (np.diff(lengths) >= 0).all()


def test_the_memory_that_a_host_needs(tiny_sentences):
    benchmark = make(tiny_sentences)
    batches = 8 * 24 * 12 * 6 * 4 // 3  # eight of 24 rows with six int32 leaves, over three hosts
    key = ("train_batch_size", "row_length")
    held = benchmark.held_bytes(3)
    assert benchmark.host_bytes("train", 24, 3) == {key: batches, ("shuffle_buffer_size",): held}
    assert benchmark.host_bytes("eval", 24, 3) == {(): 2 * 23 * 9 * 4}


def test_sizes_that_are_not_declared_are_those_of_wmt(tiny_sentences):
    both = [make("", num_train_rows=n, num_eval_sentences=n // 9) for n in (0, 90)]
    sizes = [[one.nominal_examples(split) for split in ("train", "eval")] for one in both]
    assert sizes == [[566_340, 3_003], [90, 10]]


@pytest.mark.parametrize("sizes", [(3, 1), (9, 9)])
def test_a_translation_is_as_long_as_its_source_allows(sizes, tiny_sentences, monkeypatch):
    """At most extra_length words more than the source has; none for padding."""
    benchmark, limits = make(tiny_sentences, extra_length=3), []

    def search(step, cache, limit, rules):
        limits.append((limit.tolist(), rules.beams, rules.length))
        shape = len(limit), rules.beams, rules.length
        return np.arange(np.prod(shape), dtype=np.int32).reshape(shape), None

    monkeypatch.setattr(transformer.search, "beam_search", search)
    monkeypatch.setattr(type(benchmark._model), "apply", lambda *_, **__: None)
    monkeypatch.setattr(type(benchmark._model), "start", lambda *_: None)
    inputs = np.zeros((3, 9), np.int32)
    for row, size in enumerate(sizes):
        inputs[row, :size] = 5
    found = benchmark.predict({}, {}, {"id": np.arange(3), "inputs": inputs})
    assert limits == [([sizes[0] + 3, sizes[1] + 3, 0], 2, 12)]
    assert found["tokens"].tolist() == [list(range(k, k + 12)) for k in (0, 24, 48)]  # first beams


def test_dropout_does_not_depend_on_the_cut_into_devices(tiny_sentences):
    benchmark = make(tiny_sentences, dropout=0.5)
    batch = next(benchmark.train_batches(8, 0, 1, 0))
    batch.pop("host_seconds")
    params, _ = jax.jit(benchmark.init)(jax.random.key(0))

    @jax.jit
    def loss(batch, key):
        return benchmark.loss(params, {}, batch, jax.random.key(key))[0]["cross_entropy"]

    halves = [{k: v[part] for k, v in batch.items()} for part in (slice(0, 4), slice(4, 8))]
    whole, parts = loss(batch, 0), [loss(half, 7) for half in halves]
    np.testing.assert_allclose(np.sum(parts, axis=0), whole, rtol=1e-6)
    other = loss(batch | {"dropout": batch["dropout"] + 1}, 0)
    assert abs(float(other[0]) / float(whole[0]) - 1) > 1e-3


def test_the_loss_counts_target_tokens(tiny_sentences):
    benchmark = make(tiny_sentences)
    batch = next(benchmark.train_batches(8, 0, 1, 0))
    batch.pop("host_seconds")
    params, _ = jax.jit(benchmark.init)(jax.random.key(0))

    @jax.jit
    def count(params, batch):  # the rest of the program is left out
        return benchmark.loss(params, {}, batch, jax.random.key(0))[0]["cross_entropy"][1]

    weight = count(params, batch)
    assert int(weight) == np.count_nonzero(batch["targets"]) < batch["targets"].size


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_references_are_lines_of_bytes(folder, end):
    """A carriage return or U+2028 inside of a line ends no line; white space around it goes."""
    wanted = ["a\rb", "c\u2028d", *lines(folder)[2:]]
    data = "\n".join(f" {line}\t" for line in wanted) + end
    pathlib.Path(folder, "newstest2014.de").write_bytes(b"not this one\n")
    pathlib.Path(folder, "references.txt").write_bytes(data.encode())
    assert make(str(folder)).references == wanted


def spoil(folder: pathlib.Path, what: str) -> None:
    vocabulary = folder / "vocab.toy.subwords"
    if what == "no vocabulary":
        vocabulary.unlink()
    elif what == "two vocabularies":
        other = vocabulary.read_text().replace("'a_'", "'z_'")
        (folder / "vocab.other.subwords").write_text(other)
    elif what == "a line too many":
        with open(folder / "references.txt", "a") as file:
            file.write("one more\n")
    elif what == "Latin-1":
        (folder / "references.txt").write_bytes(b"a\n\xfc\n")


@pytest.mark.parametrize(
    ("what", "overrides", "words"),
    [
        ("no vocabulary", {}, "no vocabulary in .*vocab"),
        ("two vocabularies", {}, "config.vocabulary_file='vocab.*' matches 2 files that differ"),
        (
            "a line too many",
            {},
            "references.txt has 24 lines, and there are 23 sentences",
        ),
        ("Latin-1", {}, "references.txt, line 2: not UTF-8"),
        ("", {"eval_references": "typo.txt"}, "config.eval_references='typo.txt': there is no"),
        ("", {"vocabulary_size": 99}, "config.vocabulary_size=99, but .* has 27 entries"),
        ("", {"num_train_rows": 91}, "config.num_train_rows=91, but the train split has 90"),
        ("", {"num_eval_sentences": 5}, "config.num_eval_sentences=5, but the eval split has 23"),
        ("", {"row_length": 16}, "packed for 12 positions, not 16: set --config.row_length=12"),
        ("", {"eval_lengths": (4, 6)}, r"room for 6: .*config.eval_lengths"),
        ("", {"eval_lengths": (9, 4)}, r"config.eval_lengths=\(9, 4\): must rise"),
        ("", {"eval_lengths": (4, 4)}, r"config.eval_lengths=\(4, 4\): must rise"),
        ("", {"eval_lengths": ()}, r"config.eval_lengths=\(\): must rise"),
        ("", {"num_heads": 3}, "config.num_heads=3: config.width=16"),
        ("", {"num_heads": 16}, "config.num_heads=16: config.width=16 must be a multiple of twice"),
    ],
)
def test_mistakes(folder, what, overrides, words):
    spoil(pathlib.Path(folder), what)
    with pytest.raises(UserError, match=words) as caught:
        benchmark = make(str(folder), **overrides)
        benchmark.num_examples("train")
        benchmark.num_examples("eval")
    assert "\n" not in str(caught.value)
