"""Popularity and item-kNN against plain loops, and where a run says that they are better."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

import benchmarks
import train
from benchmarks.ncf import baselines
from commands.report import page, record
from configs import ncf
from engine import evaluate
from engine.plan import read_settings
from tests.benchmarks.ncf.test_ncf import brute_rank
from tests.benchmarks.ncf.test_ranking import brute_force, write_log
from tests.conftest import opened


def plain_neighbours(known, others, count, shrinkage):
    """float64[m, n] of dense matrices, pair by pair; of equal ones the first stay."""
    near = np.zeros((others.shape[1], known.shape[1]))
    for a in range(others.shape[1]):
        for b in range(known.shape[1]):
            if known is others and a == b:
                continue
            shared = sum(x and y for x, y in zip(others[:, a], known[:, b], strict=True))
            sizes = others[:, a].sum() ** 0.5 * known[:, b].sum() ** 0.5
            near[a, b] = shared / (sizes + shrinkage) if shared else 0
        kept = sorted(range(known.shape[1]), key=lambda b: (-near[a, b].round(6), b))[:count]
        near[a, [b for b in range(known.shape[1]) if b not in kept]] = 0
    return near


@pytest.mark.parametrize(("count", "shrinkage"), [(1, 0), (4, 10), (100, 2.5)])
@pytest.mark.parametrize("block", [1, 40, 10_000])  # similarities at a time
def test_neighbours_are_those_of_plain_loops(count, shrinkage, block, monkeypatch):
    monkeypatch.setattr(baselines, "_BLOCK", block)
    draw = np.random.default_rng(0)
    known = (draw.random((12, 17)) < 0.3).astype(np.float32)
    known[:, 3] = 0  # a column that nobody has
    others = (draw.random((12, 5)) < 0.4).astype(np.float32)
    of_known = sparse.csr_array(known)
    own = baselines.neighbours(of_known, of_known, count, shrinkage)
    np.testing.assert_allclose(
        own.toarray(), plain_neighbours(known, known, count, shrinkage), rtol=1e-6
    )
    foreign = baselines.neighbours(of_known, sparse.csr_array(others), count, shrinkage)
    np.testing.assert_allclose(
        foreign.toarray(), plain_neighbours(known, others, count, shrinkage), rtol=1e-6
    )
    assert foreign.dtype == np.float32 and np.diff(own.indptr).max() <= count


def test_rows_are_compared_when_both_are_transposed():
    """The nearest users of two new ones: of {0, 1} and {4}, among {0, 1}, {1, 2} and {3}."""
    known = sparse.csr_array(np.array([[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0]], "f4"))
    new = sparse.csr_array(np.array([[1, 1, 0, 0, 0], [0, 0, 0, 0, 1]], "f4"))
    near = baselines.neighbours(known.T, new.T, count=2, shrinkage=0)
    np.testing.assert_allclose(near.toarray(), [[1, 0.5, 0], [0, 0, 0]], rtol=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ratings of 23 users, each of 3 to 19 of 40 items."""
    folder = tmp_path_factory.mktemp("ratings")
    write_log(folder, least=3)
    return str(folder)


def configuration(folder, **overrides: Any):
    config = ncf.get_config()
    config.update({"data_dir": folder, "min_ratings": 2, "eval_negatives": 15, "gmf_dim": 4})
    config.update({"mlp_layers": (8, 8), "train_batch_size": 16, "eval_batch_size": 8})
    config.update({"train_steps": "4", "steps_per_eval": "2", "compilation_cache": ""})
    config.update(overrides)
    return config.lock()


PROTOCOLS: list[dict[str, Any]] = [
    {},
    {"eval_negatives": "all"},
    {"eval_negatives": "all", "eval_holdout": "date", "train_fraction": 0.5},
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("block", [40 * 9, 1 << 22])  # scores at a time
def test_baselines_are_ranked_as_the_model_is(protocol, block, folder, monkeypatch):
    """A baseline of a part of the ratings knows that part, and ranks what the model ranks."""
    monkeypatch.setattr(baselines, "NEIGHBOURS", 3)
    monkeypatch.setattr(baselines, "_SCORES", block)
    benchmark: Any = opened(benchmarks.load(configuration(folder, **protocol), ""))
    data, complete = benchmark.data, benchmark.complete
    assert (data is complete) == ("train_fraction" not in protocol)
    matrix = np.zeros((data.num_users, data.num_items))
    for u in range(data.num_users):
        matrix[u, data.items[data.starts[u] : data.starts[u + 1]]] = 1
    near = plain_neighbours(matrix, matrix, 3, baselines.SHRINKAGE)
    of_users = {
        "popularity": np.tile(matrix.sum(0), (len(matrix), 1)),
        "item_knn": [[(near[item] * row).sum() for item in range(len(near))] for row in matrix],
    }
    for name, scores in of_users.items():
        results = []
        for u in complete.evaluated.tolist():
            row = np.asarray(scores[u]).round(6)
            chosen = {*complete.items[complete.starts[u] : complete.starts[u + 1]].tolist()}
            held = complete.held_out[complete.held_starts[u] : complete.held_starts[u + 1]]
            if protocol:
                results.append(brute_force(row.tolist(), chosen, {*held.tolist()}, 10))
            else:
                items = benchmark._samplers["eval"].candidates(np.array([u], np.int32))[0]
                rank = brute_rank(row[items], items)
                results.append({"hr": rank < 10, "ndcg": (rank < 10) / np.log2(rank + 2)})
        for kind in results[0]:
            mean = np.mean([result[kind] for result in results])
            actual = benchmark.baselines[name][f"{kind}_at_10"]
            assert actual == pytest.approx(mean, abs=1e-6), (name, kind)


def test_baselines_are_computed_once_for_a_protocol(folder, tmp_path, monkeypatch):
    def make(**overrides: Any) -> Any:
        return opened(benchmarks.load(configuration(folder, **overrides), str(tmp_path)))

    first = make().baselines
    full = make(eval_negatives="all").baselines
    assert full["item_knn"].keys() > first["item_knn"].keys()
    assert make().baselines == first  # replaces those of the other protocol
    monkeypatch.setattr(baselines, "predictions", None)
    assert make().baselines == first
    for other in ({"eval_negatives": 16}, {"seed": 1}, {"eval_holdout": "random"}):
        with pytest.raises(TypeError):
            _ = make(**other).baselines
    for without in ({"mlperf": {"format": "v0.5"}}, {"dataset": "fake"}):
        benchmark: Any = opened(benchmarks.load(configuration(folder, **without), str(tmp_path)))
        rows = [{"user": np.arange(2), "hr_at_10": np.ones(2), "ndcg_at_10": np.ones(2)}]
        assert benchmark.score(iter(rows)) == {"hr_at_10": 1, "ndcg_at_10": 1}


def test_a_model_that_is_worse_gets_a_line(folder):
    benchmark = benchmarks.load(configuration(folder), "")
    scores = {"hr_at_10": 0.5, "ndcg_at_10": 0.25, "popularity_hr_at_10": 0.4}
    scores |= {"popularity_ndcg_at_10": 0.2, "item_knn_hr_at_10": 0.5, "item_knn_ndcg_at_10": 0.2}
    (note,) = benchmark.score_notes(scores)  # equal is not better
    assert "item-kNN" in note and "hr at 10 0.5000" in note and "ndcg" not in note
    assert benchmark.score_notes({**scores, "item_knn_hr_at_10": 0.4}) == []
    assert benchmark.score_notes({"hr_at_10": 0.0, "ndcg_at_10": 0.0}) == []  # an older run's
    assert benchmark.score_notes({}) == []
    assert list(benchmark.headline(scores)) == ["hr_at_10", "ndcg_at_10", "item_knn_hr_at_10"]


def test_a_run_its_evaluation_and_its_report_say_it_once(folder, tmp_path, monkeypatch, caplog):
    settings = read_settings(configuration(folder, stop_at_target=False), str(tmp_path))
    loaded: Any = settings.load_benchmark("")
    note = {"hr_at_10": 0.0, "ndcg_at_10": 0.0, "popularity_hr_at_10": 0.5}
    (text,) = loaded.score_notes(note)
    start = f"NOTE {text.split(':')[0]}"
    monkeypatch.setattr(
        type(loaded), "score_notes", lambda self, scores: [text] if "hr_at_10" in scores else []
    )
    with caplog.at_level("INFO", logger="tpu_suite"):
        scores = train.train_and_evaluate(settings)
        assert sum(message.startswith(start) for message in caplog.messages) == 1
        assert sum("once per workdir" in message for message in caplog.messages) == 1
        caplog.clear()
        assert evaluate.evaluate(settings, "latest", 0) == pytest.approx(scores)
        assert sum(message.startswith(start) for message in caplog.messages) == 1
        assert not any("once per workdir" in message for message in caplog.messages)
    examined = record.examine(settings, "latest")
    assert page.render(record.Record.read(settings), examined).count("does not beat") == 1
    (table, *_) = csv.reader(Path(tmp_path, "eval", "baselines.csv").read_text().splitlines())
    assert table == ["score", "model", "popularity", "item_knn"]
    rows = {row[0]: row[1:] for row in examined.exhibits[0].rows}
    for metric in ("hr_at_10", "ndcg_at_10"):
        expected = (scores[f"{name}{metric}"] for name in ("", "popularity_", "item_knn_"))
        assert rows[metric.replace("_", " ")] == [f"{value:.4f}" for value in expected]
    lines = Path(tmp_path, "metrics.jsonl").read_text().splitlines()
    kept = [row for row in map(json.loads, lines) if row["split"] == "eval"]
    assert len(kept) == 2 and all(row["item_knn_hr_at_10"] >= 0 for row in kept)
