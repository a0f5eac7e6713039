"""A model continues on a table that has grown: rows by name, against plain loops."""

import csv
import json
import random
import shutil
from typing import Any

import numpy as np
import pytest

import benchmarks.ncf
import train
from benchmarks.ncf import growth
from benchmarks.ncf.ratings import load_interactions
from commands import doctor
from common.errors import CheckpointError, DataError
from common.trees import Parts
from configs import ncf
from engine.checkpoint import model_source, saver
from engine.plan import read_settings
from scripts import prepare
from tests.conftest import opened
from tests.test_train import assert_same_state, state_on_disk

TINY: dict[str, Any] = {
    **{"min_ratings": 2, "eval_negatives": 10, "train_batch_size": 16, "eval_batch_size": 8},
    **{"train_steps": "4", "steps_per_eval": "2", "log_step_count_steps": "4", "gmf_dim": 3},
    **{"steps_per_checkpoint": "2", "mlp_layers": (6, 4), "compilation_cache": ""},
    **{"moving_average_decay": 0.5, "stop_at_target": False},
}
TITLES = {f"film {i}": f"Film {i // 2}" for i in range(0, 26, 2)}  # every second has one


def log(seed=0):
    """Three days of rows (user, item): each has new users and items, of names with commas."""
    draw, days, known = random.Random(seed), [], set()
    for day in range(3):
        users = [f'user {u}, "x"' for u in range(14 + 3 * day)]
        items = [f"film {i}" for i in range(20 + 3 * day)]
        old = users[: -3 if day else None]  # new users choose old items, and the last one new ones
        rows = {(u, i) for u in old for i in draw.sample(items, 5)}
        rows |= {(u, i) for u in users[-3:-1] for i in draw.sample(items[:20], 5)}
        rows |= {(users[-1], i) for i in items[-3:]}
        days.append(sorted(rows - known))
        known |= rows
    return days


def prepared(folder, rows):
    """Prepares rows in an order by chance, so that the ids differ from day to day; the folder."""
    rows = [(user, item, 10**9 + time) for time, (user, item) in enumerate(rows)]
    random.Random(len(rows)).shuffle(rows)
    folder.mkdir(parents=True)
    tables = {"log": [("user", "item", "time"), *rows]}
    tables |= {"movies": [("item", "title"), *TITLES.items()]}
    for name, lines in tables.items():
        with open(folder / f"{name}.csv", "w", newline="") as file:
            csv.writer(file).writerows(lines)
    prepare.make("interactions", [str(folder / "log.csv"), f"--out={folder / 'data'}"])
    return str(folder / "data")


def movielens(folder, rows):
    """The folder of ratings whose ids are its own."""
    folder.mkdir()
    lines = [f"{user},{item},3,{10**9 + time}\n" for time, (user, item) in enumerate(rows)]
    (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + "".join(lines))
    return str(folder)


def settings(workdir, **overrides):
    config = ncf.get_config()
    config.update({**TINY, **overrides})
    return read_settings(config.lock(), str(workdir))


def names_of(data_dir):
    """{"users": {id: name}, ...} of a prepared folder, by the csv module."""
    names: dict[str, dict[int, str]] = {}
    for side in ("users", "items"):
        with open(f"{data_dir}/{side}.csv", newline="") as file:
            _, *rows = csv.reader(file)
        names[side] = {int(row[0]): row[-1] for row in rows}
    return names


def begin(data_dir, source, **keys):
    """(the benchmark, its initial parameters, those with the model of `source`, that model's)."""
    benchmark: Any = opened(settings("", data_dir=data_dir, **keys).load_benchmark(""))
    initial, state = benchmark.init(np.array([0, 1], np.uint32))
    initial = {side: {k: np.array(x) for k, x in initial[side].items()} for side in initial}
    weights = model_source.initial_weights(str(source), lambda file: None)
    params, _, _ = saver.adopt(benchmark.adopt, initial, state, weights, Parts("init_without", ""))
    return benchmark, initial, params, weights.params


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    """The folders of three days, each with the rows of those before, and a run on the first."""
    folder, rows = tmp_path_factory.mktemp("days"), log()
    grown = [sum(rows[: day + 1], []) for day in range(3)]
    grown[1] = [row for row in grown[1] if row[1] != "film 3"]  # it vanishes
    data = [prepared(folder / f"day{day}", rows) for day, rows in enumerate(grown)]
    train.train_and_evaluate(settings(folder / "run", data_dir=data[0]))
    return folder, data


def expected_means(known, new, vectors):
    """The mean vector of the 10 most similar sets of `known`, by cosine; None if none is."""
    near = []
    for row, (name, own) in enumerate(known.items()):
        cosine = np.float32(len(own & new)) / np.sqrt(np.float32(len(own)) * np.float32(len(new)))
        near.append((-cosine, row, name))
    near = [(-cosine, vectors[name]) for cosine, _, name in sorted(near)[:10] if cosine]
    total = sum(cosine for cosine, _ in near)
    return sum(cosine * vector for cosine, vector in near) / total if near else None


@pytest.mark.parametrize("keys", [{}, {"eval_holdout": "none"}, {"train_fraction": 0.7}])
def test_rows_are_matched_by_name_and_new_ones_begin_as_means(keys, days, caplog, monkeypatch):
    folder, data = days

    def unchanged(logits, params, users, data):
        return params["users"]["embedding"]

    monkeypatch.setattr(benchmarks.ncf, "fit_vectors", unchanged)
    with caplog.at_level("INFO", logger="tpu_suite"):
        benchmark, initial, params, theirs = begin(data[1], folder / "run", **keys)
    then, now = (names_of(path) for path in data[:2])
    assert then["users"] != now["users"]  # the ids have shifted
    trained = benchmark.data
    choices = {(int(u), int(i)) for u, i in zip(trained.users, trained.items, strict=True)}
    for k, side in enumerate(("users", "items")):
        order = {name: row for row, (_, name) in enumerate(sorted(then[side].items()))}
        names = [name for _, name in sorted(now[side].items())]
        sets = {n: {p[1 - k] for p in choices if p[k] == row} for row, n in enumerate(names)}
        known = {name: of for name, of in sets.items() if name in order}
        vectors = {name: theirs[side]["embedding"][order[name]] for name in known}
        table = params[side]["embedding"]
        means = 0
        for row, name in enumerate(names):
            if name in order:
                assert table[row].tobytes() == vectors[name].tobytes()
                continue
            mean = expected_means(known, sets[name], vectors)
            means += mean is not None
            start = initial[side]["embedding"][row] if mean is None else mean
            np.testing.assert_allclose(table[row], start, rtol=1e-5, atol=1e-7)
        new, gone = len(names) - len(known), len(order) - len(known)
        text = f"{len(known)} {side} matched by name, {new} new ({means} begin as the mean of "
        assert new and text in caplog.text and f", {gone} vanished" in caplog.text
    assert "1 vanished (film 3)" in caplog.text
    assert params["mlp_0"]["kernel"] is not initial["mlp_0"]["kernel"]


def test_new_users_learn_from_their_items_alone(days):
    """Their loss over all items is lower than that of their means; nothing else changes."""
    folder, data = days
    benchmark, initial, params, theirs = begin(data[1], folder / "run")
    match = next(iter(benchmark._matches.values()))["users"]
    start = match.grow(initial["users"]["embedding"], theirs["users"]["embedding"])
    rows, trained = match.means, benchmark.data
    others = np.setdiff1d(np.flatnonzero(match.rows >= 0), rows)
    after = params["users"]["embedding"]
    assert len(rows) and after[others].tobytes() == start[others].tobytes()

    def losses(table):
        items = np.broadcast_to(np.arange(trained.num_items), (len(rows), trained.num_items))
        logits = benchmark.logits({**params, "users": {"embedding": table}}, rows, items)
        labels = np.zeros_like(items, np.bool_)
        for k, row in enumerate(rows):
            labels[k, trained.items[trained.starts[row] : trained.starts[row + 1]]] = True
        return np.logaddexp(0, np.where(labels, -logits, logits)).mean(axis=1)

    assert (losses(after) < losses(start)).all()


@pytest.mark.long
def test_three_days_and_a_run_that_is_resumed_without_the_day_before(days, tmp_path, caplog):
    """The second day's run resumes bit for bit, also when the first one's workdir is gone."""
    folder, data = days
    monday, at_once, in_parts = (tmp_path / name for name in ("monday", "at_once", "in_parts"))
    shutil.copytree(folder / "run", monday)
    keys = {"data_dir": data[1], "init_from": str(monday)}
    train.train_and_evaluate(settings(at_once, **keys))
    train.train_and_evaluate(settings(in_parts, **keys, train_steps="3"))
    shutil.rmtree(monday)
    with caplog.at_level("INFO", logger="tpu_suite"):
        train.train_and_evaluate(settings(in_parts, **keys))
    assert "resuming at step 3" in caplog.text
    assert_same_state(state_on_disk(at_once, 4), state_on_disk(in_parts, 4))
    wednesday = tmp_path / "wednesday"
    with caplog.at_level("INFO", logger="tpu_suite"):
        train.train_and_evaluate(settings(wednesday, data_dir=data[2], init_from=str(in_parts)))
    assert f"init_from {in_parts}: 17 users matched by name, 3 new" in caplog.text
    listing = (wednesday / "init_from.txt").read_text()
    assert "part\tparams/users/embedding" in listing and "taken\tparams/mlp_0/kernel" in listing
    case = settings(tmp_path / "new", data_dir=data[2], init_from=str(at_once))
    assert doctor.run(case, as_json=True) == 0


def test_the_same_names_are_the_same_rows_whatever_their_ids(days, tmp_path):
    """Filtered users shift the ids of text, but not the rows; nothing is copied then."""
    folder, data = days
    rows = [("a newcomer", "film 0"), *log()[0]]
    params, theirs = begin(prepared(tmp_path / "day", rows), folder / "run")[2:]
    again, _ = begin(data[0], folder / "run")[2:]
    for side in ("users", "items"):
        assert again[side]["embedding"] is not params[side]["embedding"]
        assert sorted(params[side]["embedding"].tolist()) == sorted(
            theirs[side]["embedding"].tolist()
        )
    _, _, same, theirs = begin(data[0], folder / "run")
    assert same["users"]["embedding"] is theirs["users"]["embedding"]


def test_ids_are_the_names_where_nothing_was_prepared(tmp_path):
    rows = [(7 * u + 1, 10 * i + 5) for u in range(9) for i in range(12) if (u + i) % 5 < 3]
    monday = movielens(tmp_path / "monday", rows)
    train.train_and_evaluate(settings(tmp_path / "run", data_dir=monday))
    tuesday = movielens(tmp_path / "tuesday", [(3, 15), (3, 25), (3, 17), *rows])
    _, _, params, theirs = begin(tuesday, tmp_path / "run")
    kept = [0, *range(2, 10)]  # of the ids 1, 3, 8, 15, ...
    assert (params["users"]["embedding"][kept] == theirs["users"]["embedding"]).all()
    (tmp_path / "tuesday" / "items.csv").write_text("item_id,title\n5,A\n15,A\n")
    data = load_interactions(tuesday, 2, "")
    names = json.loads(growth.row_names(tuesday, data))
    assert names == {"users": [*map(str, data.user_ids)], "items": [*map(str, data.item_ids)]}


def test_titles_do_not_hide_the_names_of_items(days, tmp_path):
    _, data = days
    with open(f"{data[0]}/items.csv", newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["item_id", "title", "name"]
    assert all(title == TITLES.get(name, name) for _, title, name in rows)
    assert {name for *_, name in rows} == {item for _, item in log()[0]}
    # An earlier version has kept the titles alone: those that come again have their ids.
    (tmp_path / "items.csv").write_text('item_id,title\n1,"A"\n2,"B, C"\n3,"A"\n')
    listed = growth._listed(str(tmp_path / "items.csv"), np.array([1, 2, 3], np.uint32))
    assert listed == ["A (1)", "B, C", "A (3)"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: next((run / "data_index").glob("rows-*")).unlink(), r"rows-\w+.json.*missing"),
        (lambda run: next((run / "data_index").glob("rows-*")).write_text("{}"), "damaged"),
        (lambda run: old_version(run), "earlier version"),
    ],
)
def test_a_run_without_its_names_is_refused_in_a_line(change, message, days, tmp_path):
    folder, data = days
    shutil.copytree(folder / "run", tmp_path / "run")
    change(tmp_path / "run")
    with pytest.raises(CheckpointError, match=f"^config.init_from={tmp_path}/run/.*{message}"):
        begin(data[1], tmp_path / "run")


def old_version(run):
    for path in run.glob("checkpoints/*/manifest/metadata"):
        manifest = json.loads(path.read_text())
        del manifest["names_digest"]
        path.write_text(json.dumps(manifest))


def test_other_logs_and_widths_are_refused(days, tmp_path, caplog):
    folder, data = days
    other = [(user.upper(), item) for user, item in log()[0]]
    with pytest.raises(CheckpointError, match="none of its 14 users is in this table"):
        begin(prepared(tmp_path / "other", other), folder / "run")
    with pytest.raises(CheckpointError, match="6 numbers, config.gmf_dim and half of.* make 7"):
        begin(data[1], folder / "run", gmf_dim=4)
    manifest = model_source.peek(str(folder / "run")) or {}
    config = ncf.get_config()
    values, _ = benchmarks.adopted_values(config, manifest, {"train_steps"}, False)
    assert values == {"gmf_dim": 3, "mlp_layers": (6, 4)}
    few = [(user if n < 25 else f"{user}!", item) for n, (user, item) in enumerate(log()[0])]
    with caplog.at_level("INFO", logger="tpu_suite"):
        begin(prepared(tmp_path / "few", few), folder / "run")
    assert "is it the same log, with names in the same form?" in caplog.text
    assert "ratings that it was trained on are in this table: is it the same log?" in caplog.text


def test_other_names_of_the_same_number_are_another_table(days, tmp_path):
    """Ids of text alone do not tell: they count from 1 in each table."""
    folder, data = days
    shutil.copytree(folder / "run", tmp_path / "run")
    renamed = [(user.replace("user 3", "user 99"), item) for user, item in log()[0]]
    path = prepared(tmp_path / "renamed", renamed)
    for key in ("num_users", "num_items"):
        assert getattr(load_interactions(path, 2, ""), key) == getattr(
            load_interactions(data[0], 2, ""), key
        )
    with pytest.raises(DataError, match="names_digest: .*config.init_from"):
        train.train_and_evaluate(settings(tmp_path / "run", data_dir=path, train_steps="6"))


@pytest.mark.parametrize(("keys", "is_told"), [({}, False), ({"eval_holdout": "random"}, True)])
def test_held_out_rows_that_the_model_has_seen_are_told(keys, is_told, days, caplog):
    """The count is that of a loop over both days' rows by name."""
    folder, data = days
    with caplog.at_level("INFO", logger="tpu_suite"):
        benchmark = begin(data[1], folder / "run", **keys)[0]
    sets = []
    for path, loaded in ((data[0], load_interactions(data[0], 2, "")), (data[1], benchmark.data)):
        users, items = (names_of(path)[side] for side in ("users", "items"))
        rows = {"items": (loaded.starts, loaded.items)}
        rows["held_out"] = loaded.held_starts, loaded.held_out
        sets.append(
            {
                what: {
                    (users[int(loaded.user_ids[u])], items[int(loaded.item_ids[i])])
                    for u in range(loaded.num_users)
                    for i in of[starts[u] : starts[u + 1]]
                }
                for what, (starts, of) in rows.items()
            }
        )
    seen = len(sets[0]["items"] & sets[1]["held_out"])
    text = f"trained on {seen} of the {benchmark.data.num_users} ratings that are held out now"
    assert (text in caplog.text) == is_told == bool(seen)
