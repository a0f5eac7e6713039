"""predict.py with NCF: ids of users in, ids and titles of items out."""

import csv
import io
import itertools
import json
import pathlib
import unicodedata
import zipfile
from typing import Any

import jax
import ml_collections
import numpy as np
import pytest

import benchmarks
from benchmarks.ncf import names, ranking, use
from commands.predict.items import table as as_table
from commands.predict.outputs import Row
from common.errors import DataError
from configs import ncf
from engine.checkpoint import model_source
from scripts.demo import make_answer
from tests.commands.predict.test_predict import refusal

USERS, ITEMS = [7 * i + 1 for i in range(23)], [10 * i + 5 for i in range(12)]  # ids in the file


def ncf_of(opens, folder, holdout, negatives: Any = 10):
    """(benchmark, parameters) of an NCF, which predict.py opens."""
    config = ncf.get_config()
    config.update({"data_dir": str(folder), "min_ratings": 2, "eval_negatives": negatives})
    config.eval_holdout = holdout
    config.update({"gmf_dim": 3, "mlp_layers": (4, 6, 2), "compilation_cache": ""})
    values = config.to_dict()
    benchmark: Any = benchmarks.load(ml_collections.ConfigDict(values).lock(), "")
    return benchmark, opens(benchmark, values, 1).params


@pytest.fixture
def model(tiny_ratings, opens, request):
    """The NCF of `tiny_ratings`."""
    return ncf_of(opens, tiny_ratings, getattr(request, "param", "latest"))


@pytest.fixture
def late(tiny_ratings, opens, tmp_path):
    """The NCF of them and of users 2 and 9, all of whose items are held out."""
    text = pathlib.Path(tiny_ratings, "ratings.csv").read_text()
    rows = [(1, 105), (2, 5), (2, 25), (9, 125), (9, 135)]
    folder = tmp_path / "late"
    folder.mkdir()
    text += "".join(f"{user},{item},3.5,5000\n" for user, item in rows)
    (folder / "ratings.csv").write_text(text)
    return ncf_of(opens, folder, "1970-01-01T01:00", "all")


def rated(user: int) -> set[int]:
    """The ids of the items that a user has rated in the file of `tiny_ratings`."""
    i = USERS.index(user)
    return {ITEMS[i % 12], ITEMS[(5 * i + 3) % 12]}


@pytest.mark.long
@pytest.mark.parametrize("model", ["latest", "random"], indirect=True)
def test_the_scores_are_those_of_evaluation(call, model):
    """And so are the hits; all items but the user's own are listed, the best first."""
    benchmark, params = model
    code, out, err = call(f"--user={','.join(map(str, USERS))}", "--top=99", "--format=json")
    rows = json.loads(out)
    assert code == 0 and [row["user"] for row in rows] == USERS and "12 items" in err
    listed = {row["user"]: {each["item"]: each["score"] for each in row["items"]} for row in rows}
    for user, scores in listed.items():
        assert set(scores) == set(ITEMS) - rated(user)
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
    (batch,) = benchmark.eval_batches(23, 0, 1)
    logits = benchmark.logits(params, batch["user"], batch["items"])
    known = jax.nn.sigmoid(logits[:, 1:])  # the first is held out: the user has rated it
    for user, items, scores in zip(batch["user"], batch["items"][:, 1:], known, strict=True):
        own = [listed[USERS[user]][ITEMS[i]] for i in items]
        np.testing.assert_allclose(own, scores, rtol=1e-5)
    ranks = ranking.ranks(logits, batch["items"])
    best = jax.nn.sigmoid(logits[:, 0])
    for user, rank, score, items in zip(batch["user"], ranks, best, batch["items"], strict=True):
        before = [i for i in set(items[1:].tolist()) if listed[USERS[user]][ITEMS[i]] > score]
        assert rank == len(before)


def test_every_format_says_the_same_whatever_the_batch(call, model, tmp_path):
    (tmp_path / "users.txt").write_text("\ufeff8\r\n\n1, 15\r\n")
    _, out, _ = call(tmp_path / "users.txt", "--top=3", "--format=jsonl", "--batch_size=1")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["user"] for row in rows] == [8, 1, 15]
    assert json.loads(call("-", "--top=3", "--format=json", stdin=b"8 1 15")[1]) == rows
    table = list(csv.DictReader(io.StringIO(call("--user=8,1,15", "--top=3")[1])))
    flat = [(row["user"], each["item"], each["score"]) for row in rows for each in row["items"]]
    found = [(int(row["user"]), int(row["item"]), float(row["score"])) for row in table]
    assert found == flat and [int(row["rank"]) for row in table] == [1, 2, 3] * 3


@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        *itertools.product(names.TITLES, ["utf-8", "utf-8-sig"]),
        ("u.item", "latin-1"),
        ("movies.dat", "latin-1"),
    ],
)
@pytest.mark.parametrize("is_zipped", [False, True])
def test_titles_are_those_beside_the_ratings(
    tiny_ratings, tmp_path, name, is_zipped, encoding, caplog
):
    """Å in UTF-8 has the byte 0x85, which is Latin-1's NEL: str.splitlines ends a line there."""
    expected = {1: "Åsa-Nisse (1949)", 2: "Heat (1995)", 3: "Élysée, The", 15: "Plain"}
    if name.endswith(".csv"):
        lines = ["id,title,genres", *(f'{i},"{title}",Drama' for i, title in expected.items())]
    else:
        between = "|" if name == "u.item" else "::"
        lines = [between.join([str(i), title, "Drama"]) for i, title in expected.items()]
    files = {"ratings.csv": pathlib.Path(tiny_ratings, "ratings.csv").read_bytes()}
    files[name] = "".join(f"{line}\r\n" for line in lines).encode(encoding)
    with zipfile.ZipFile(tmp_path / "ml-20m.zip", "w") as archive:
        for member, data in files.items():
            archive.writestr(f"ml-20m/{member}", data)
            (tmp_path / member).write_bytes(data)
    for absent in files if is_zipped else ["ml-20m.zip"]:
        (tmp_path / absent).unlink()
    with caplog.at_level("INFO", "tpu_suite"):
        assert names.read_names(str(tmp_path), names.TITLES) == expected
    said = [name in line and "Latin-1" in line for line in caplog.messages]
    assert said == [True] * (encoding == "latin-1")
    assert names.read_names(tiny_ratings, names.TITLES) == {}


@pytest.mark.parametrize(
    ("name", "title", "encoding"),
    [
        ("u.item", "Брат (1997)", "cp1251"),
        ("movies.dat", "花樣年華 (2000)", "gbk"),
        ("u.item", "七人の侍 (1954)", "shift-jis"),
        ("movies.dat", "Heat… (1995)", "cp1252"),
        ("movies.csv", "Élysée (1992)", "latin-1"),
    ],
)
def test_titles_in_other_encodings_are_refused(tiny_ratings, tmp_path, name, title, encoding):
    (tmp_path / "ratings.csv").write_bytes(pathlib.Path(tiny_ratings, "ratings.csv").read_bytes())
    between = {"u.item": "|", "movies.dat": "::", "movies.csv": ","}[name]
    text = f"1{between}Plain{between}Drama\n2{between}{title}{between}Drama\n"
    (tmp_path / name).write_bytes(text.encode(encoding))
    with pytest.raises(DataError, match=f"{name}, line 2 is not UTF-8.*iconv .*{name}"):
        names.read_names(str(tmp_path), names.TITLES)


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_names_that_look_the_same_are_found_and_capitals_tell_them_apart(form):
    known = {1: unicodedata.normalize(form, "José  Núñez"), 2: "aB3", 3: "Ab3", 4: "Anna"}
    finder = names.Finder("user", np.array([1, 2, 3, 4], np.uint32), known)
    texts = "Jose\u0301 Nu\u0301n\u0303ez,jos\u00e9\u00a0n\u00fa\u00f1ez,aB3,Ab3,anna,AB3"
    *found, (_, ambiguous) = finder.find(texts)
    assert [row for _, row in found] == [0, 0, 1, 2, 3] and "the users 2, 3 have" in str(ambiguous)


def test_titles_are_shown_and_may_be_damaged(call, model, tiny_ratings, tmp_path):
    (tmp_path / "ratings.csv").write_bytes(pathlib.Path(tiny_ratings, "ratings.csv").read_bytes())
    (tmp_path / "movies.csv").write_text("movieId,title,genres\n15,Plain,\n")
    flags = f"--data_dir={tmp_path}", "--user=22", "--top=99", "--format=json"
    items = json.loads(call(*flags)[1])[0]["items"]
    assert {each["item"]: each.get("title") for each in items}[15] == "Plain"
    (tmp_path / "movies.csv").write_bytes(b"movieId,title\n\xff,x\n")
    code, out, err = call(*flags)
    assert code == 0 and "NOTE the items have no names" in err and "title" not in out
    (tmp_path / "movies.csv").write_bytes(b"movieId,title\nx\n")
    with pytest.raises(DataError, match="not a list of names"):
        names.read_names(str(tmp_path), names.TITLES)


PEOPLE = {1: "anna", 8: "Smith, Bob", 15: "22", 29: "", 22: "anna"}  # others have no name
FILMS = {5: "Heat (1995)", 15: "Godfather, The (1972)", 25: "Heat (1995)", 35: ""}


@pytest.fixture
def named(tiny_ratings, tmp_path):
    """--data_dir of the ratings with lists of names, as the preparation of interactions writes."""
    (tmp_path / "ratings.csv").write_bytes(pathlib.Path(tiny_ratings, "ratings.csv").read_bytes())
    for name, header, rows in [
        ("users.csv", ("user_id", "name"), PEOPLE),
        ("items.csv", ("item_id", "title"), FILMS),
    ]:
        with open(tmp_path / name, "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([header, *rows.items()])
    return f"--data_dir={tmp_path}"


def test_users_have_names(call, model, named, tmp_path):
    """A name counts before an id; commas in a name, quotes and capitals do no harm."""
    (tmp_path / "users.txt").write_text('"Smith, Bob"\n22\n')
    argv = named, "--user=1,smith, bob,anna,annna", "--format=json", tmp_path / "users.txt"
    code, out, _ = call(*argv)
    rows = {row["user"]: row for row in json.loads(out)}
    assert code == 1 and [*rows] == [1, "smith, bob", "anna", "annna", '"Smith, Bob"', 22]
    assert rows[1]["name"] == "anna" and "users 1, 22 " in rows["anna"]["error"]
    assert "anna" in rows["annna"]["error"]  # the closest
    same = json.loads(call(named, "--user=8 15", "--format=json")[1])
    assert rows["smith, bob"]["items"] == rows['"Smith, Bob"']["items"] == same[0]["items"]
    assert rows[22]["items"] == same[1]["items"]
    assert next(as_table([Row({"user": 1}, content=rows[1])], 80)) == "user 1: anna\n"


def neighbours_mean(benchmark, params, history) -> Any:
    """A new user's vector by loops over all users, who have two items each in `rated`."""
    data, table = benchmark.data, np.asarray(params["users"]["embedding"], np.float64)
    sets = [set(data.items[a:b].tolist()) for a, b in itertools.pairwise(data.starts)]
    cosine = [len(own & history) / (len(own) * len(history)) ** 0.5 for own in sets]
    best = sorted(range(len(sets)), key=lambda user: -cosine[user])[:10]
    return sum(cosine[u] * table[u] for u in best) / sum(cosine[u] for u in best)


def test_a_new_user_begins_as_the_mean_of_similar_users(call, model, named, tmp_path, monkeypatch):
    monkeypatch.setattr(use, "_STEPS", 0)
    benchmark, params = model
    (tmp_path / "new.txt").write_text("5,Godfather, The (1972)\n5 15\n\nHeat\n")
    flags = named, "--top=99", "--format=jsonl"
    code, out, _ = call(f"--items={tmp_path / 'new.txt'}", *flags)
    first, second, ambiguous = map(json.loads, out.splitlines())
    assert code == 1 and first["items"] == second["items"]
    assert [first["user"], second["user"]] == ["5,Godfather, The (1972)", "5 15"]
    assert "Heat (1995)" in ambiguous["error"]
    columns = {ITEMS.index(5), ITEMS.index(15)}
    vector = neighbours_mean(benchmark, params, columns)
    params = {**params, "users": {"embedding": np.float32(vector[None])}}
    logits: Any = benchmark.logits(params, np.zeros(1, int), np.arange(12)[None])[0]
    scores = {ITEMS[i]: x for i, x in enumerate(jax.nn.sigmoid(logits)) if i not in columns}
    found = {each["item"]: each["score"] for each in first["items"]}
    assert found.keys() == scores.keys()
    np.testing.assert_allclose([found[i] for i in scores], [*scores.values()], rtol=1e-5)


def test_a_new_users_vector_is_trained_as_by_numpys_adam():
    draw = np.random.default_rng(0)
    table, vector = draw.normal(size=(9, 4)), draw.normal(size=4)
    items, labels = draw.integers(0, 9, (5, 6)), draw.random((5, 6)) < 0.4

    def logits(params, users, items):
        vectors, every = params["users"]["embedding"], jax.numpy.array(table)
        return jax.numpy.einsum("bw,bnw->bn", vectors[users], every[items])

    arrays = map(jax.numpy.array, (np.float32(vector), items, labels))
    found = use.fit_vector(logits, {}, *arrays)
    mean, square = np.zeros(4), np.zeros(4)
    for step, (rows, wanted) in enumerate(zip(table[items], labels, strict=True), 1):
        slope = (1 / (1 + np.exp(-rows @ vector)) - wanted) @ rows / len(rows)
        mean, square = 0.9 * mean + 0.1 * slope, 0.999 * square + 0.001 * slope**2
        size = np.sqrt(square / (1 - 0.999**step)) + 1e-8
        vector = vector - 0.01 * mean / (1 - 0.9**step) / size
    np.testing.assert_allclose(found, vector, rtol=1e-5)


@pytest.mark.parametrize(
    ("history", "words"),
    [
        ("Heat (1995)", ["items 5, 25 ", "give the id"]),
        ("5,Gofather, The (1972)", ["Gofather", "no item of this name"]),
        ("The Godfather (1972)", ["Godfather, The (1972)"]),
        ("5,99", ["99", "does not have this item"]),
    ],
)
def test_histories_that_cannot_be_used(call, model, named, history, words):
    code, out, _ = call(f"--items={history}", named, "--format=json")
    (row,) = json.loads(out)
    assert code == 1 and row["user"] == history and all(word in row["error"] for word in words)


def similar(table: np.ndarray, row: int) -> list[tuple[int, float]]:
    """The rows of all others with their cosines in float64, the largest first."""
    rows = table.astype(np.float64)
    norms = [sum(x * x for x in vector) ** 0.5 for vector in rows]
    cosine = [float(rows[row] @ x) / norms[row] / n for x, n in zip(rows, norms, strict=True)]
    return sorted(((i, x) for i, x in enumerate(cosine) if i != row), key=lambda each: -each[1])


@pytest.mark.parametrize("model", ["none"], indirect=True)  # all items are trained
def test_similar_items_are_those_of_the_vectors_for_search_engines(call, model, named, tmp_path):
    (tmp_path / "likes.txt").write_text("35\nGodfather, The (1972)\n\nGodfather\n")
    code, out, err = call(
        f"--similar={tmp_path / 'likes.txt'}", named, "--top=99", "--format=jsonl"
    )
    *rows, unknown = map(json.loads, out.splitlines())
    assert code == 1 and "Godfather, The (1972)" in unknown["error"] and "1 of 3 items" in err
    assert [row["similar_to"] for row in rows] == [35, "Godfather, The (1972)"]
    assert call(f"--vectors={tmp_path / 'new' / 'vectors'}", named)[0] == 0
    table = np.load(tmp_path / "new" / "vectors" / "items.npy")
    for row, item in zip(rows, (35, 15), strict=True):
        expected = similar(table[:, :-1], ITEMS.index(item))
        assert [each["item"] for each in row["items"]] == [ITEMS[i] for i, _ in expected]
        found = [each["similarity"] for each in row["items"]]
        np.testing.assert_allclose(found, [x for _, x in expected], atol=1e-6)
    lines = csv.DictReader(io.StringIO(call("--similar=35,15", named, "--top=2")[1]))
    flat = [(int(x["similar_to"]), int(x["rank"]), int(x["item"]), x["title"]) for x in lines]
    assert flat == [
        (item, rank, each["item"], each.get("title", ""))
        for row, item in zip(rows, (35, 15), strict=True)
        for rank, each in enumerate(row["items"][:2], 1)
    ]
    shown = [*as_table([Row({"similar_to": 35}, content={**rows[0], "title": "Heat"})], 80)]
    assert shown[0] == "similar to 35: Heat\n" and len(shown) == 12


@pytest.mark.parametrize("model", ["none"], indirect=True)
def test_vectors_are_of_all_users_and_items_in_the_order_of_the_lists(call, model, named, tmp_path):
    benchmark, params = model
    folder = tmp_path / "vectors"
    code, out, err = call(f"--vectors={folder}", named)
    assert (code, out) == (0, "") and "NOTE" not in err
    users, items = (np.load(folder / f"{kind}.npy") for kind in ("users", "items"))
    assert users.dtype == items.dtype == np.float32 and users.shape[1] == items.shape[1]
    for kind, column, ids, known in (
        ("user", "name", USERS, PEOPLE),
        ("item", "title", ITEMS, FILMS),
    ):
        with open(folder / f"{kind}s.csv", encoding="utf-8", newline="") as file:
            rows = [(int(row[kind]), row[column]) for row in csv.DictReader(file)]
        assert rows == [(i, known.get(i, "")) for i in ids]
    logits = benchmark.logits(params, np.arange(23), np.arange(12)[None].repeat(23, 0))
    assert np.corrcoef((users @ items.T).ravel(), np.ravel(logits))[0, 1] > 0.8
    call(f"--vectors={folder}", named)  # its own files are written again


def test_users_who_were_not_trained_on_are_new_users(call, late, tmp_path):
    """Users 2 and 9 have held-out items alone; nobody whom the model knows has those of 9."""
    code, out, err = call("--user=2,9,1", "--top=99", "--format=json")
    late_user, unknown, known = json.loads(out)
    new = json.loads(call("--items=5,25", "--top=99", "--format=json")[1])[0]
    assert code == 1 and late_user["items"] == new["items"] and "NOTE" in err
    assert {each["item"] for each in late_user["items"]} == {*ITEMS, 125, 135} - {5, 25}
    assert "trained on nobody" in unknown["error"] and len(known["items"]) == 11
    code, out, _ = call("--similar=125,5", "--top=99", "--format=json")
    untrained, trained = json.loads(out)
    assert code == 1 and "trained on nobody" in untrained["error"]
    assert {each["item"] for each in trained["items"]} == {*ITEMS} - {5}
    code, _, err = call(f"--vectors={tmp_path / 'vectors'}")
    users = np.load(tmp_path / "vectors" / "users.npy")
    assert code == 0 and "NOTE" in err and users.shape[0] == 25 and np.isfinite(users).all()


def test_unknown_users_have_a_row(call, model):
    """500 has a single rating in the file, too few for a row of the model."""
    code, out, err = call("--user=500,x,8,99999999999", "--format=jsonl")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 1 and "3 of 4 users have no items" in err
    assert [bool(row.get("error")) for row in rows] == [True, True, False, True]
    assert rows[0] == {"user": 500, "error": "the model does not have this user"}
    assert len(rows[2]["items"]) == 10 and "no id of a user" in rows[1]["error"]


def test_mistakes(model, capsys, tmp_path):
    (tmp_path / "blank.txt").write_text("\n")
    (tmp_path / "items.csv").write_text("item_id,title\n")
    ratings = "userId,movieId,rating,timestamp\n" + "".join(
        f"{user},{item},1.0,{item}\n" for user in (1, 2) for item in (user, 3, 4)
    )
    (tmp_path / "ratings.csv").write_text(ratings)
    for argv, text in [
        ([], "--user="),
        (["gone.txt"], "gone.txt: there is no such file"),
        ([tmp_path / "blank.txt"], "no user is named"),
        (["--user=8", "--beams=2"], "it has --user, --items, --similar, --vectors, --top"),
        (["--user=8", "--similar=5"], "--similar=5"),
        (["--vectors=new", "--similar=5"], "--vectors=new"),
        ([f"--vectors={tmp_path}", "--out=x.csv"], "without --out"),
        ([f"--vectors={tmp_path}"], f"{tmp_path} has a file items.csv"),
        (["--user=8", "--data_dir=/gone"], "no ratings in '/gone'"),
        (["--user=8", f"--data_dir={tmp_path}"], "have other users or items than ncf"),
    ]:
        capsys.readouterr()  # what the data said when they were read
        assert text in refusal(capsys, *argv, "--workdir=any"), argv


def test_the_page_answers_as_predict_py(model, call):
    answer = make_answer(model_source.load("any"))
    _, out, _ = call("--user=8", "--top=10", "--format=json")
    expected = [(8, each["item"], f"{each['score']:.1%}") for each in json.loads(out)[0]["items"]]
    assert [(user, item, score) for user, _, item, _, score in answer("8")] == expected
    with pytest.raises(DataError, match="^user 2: the model does not have this user"):
        answer("8,2")
    assert answer(" ") == []
