"""Own interactions are read like by csv and dicts, from each form; mistakes in them are refused."""

import csv
import datetime
import gzip
import io
import json
import random
import re

import pyarrow
import pytest
from pyarrow import parquet

from benchmarks.ncf import ratings
from benchmarks.ncf.preparation import interactions, recognise
from common.preparation.folders import Folder
from scripts import prepare
from tests.helpers.preparation import leaves, place

HEADER = ("user_id", "item_id", "rating", "timestamp")
TWO_HOURS_EAST = datetime.timezone(datetime.timedelta(hours=2))
FILES = ("ratings.csv", "users.csv", "items.csv", "manifest.json")


def make_rows(users=40, items=60, is_text=True):
    """Rows (user, item, rating, seconds); names have quotes, commas and letters with accents."""
    draw = random.Random(0)
    things = [f'"Film" {i}, à' if is_text else str(7 + i) for i in range(items)]
    return [
        (f"user {u}" if is_text else str(3 * u), thing, draw.randint(1, 5), draw.randrange(2**32))
        for u in draw.sample(range(users), users)
        for thing in draw.sample(things, draw.randint(1, 25))
    ]


def table(rows, header=HEADER, delimiter=","):
    text = io.StringIO()
    rows = [header, *rows] if header else rows
    if len(delimiter) == 1:
        csv.writer(text, delimiter=delimiter, lineterminator="\n").writerows(rows)
        return text.getvalue()
    return "".join(f"{delimiter.join(map(str, row))}\n" for row in rows)


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def make(files, out, *flags):
    """Prepares files; returns the last line."""
    files = [files] if isinstance(files, str) else files
    return prepare.make("interactions", [*files, f"--out={out}", *flags])


def read_back(out):
    """Rows (user, item, seconds) with names: an independent reader's."""
    texts = {name: (out / name).read_bytes().decode() for name in FILES[:3]}
    rows = {name: list(csv.reader(io.StringIO(texts[name], newline=""))) for name in texts}
    heads = [rows[name].pop(0) for name in FILES[:3]]
    assert heads[:2] == [["user_id", "item_id", "timestamp"], ["user_id", "name"]]
    assert heads[2] in (["item_id", "title"], ["item_id", "title", "name"])  # if there are titles
    users, items = dict(rows["users.csv"]), {row[0]: row[1] for row in rows["items.csv"]}
    assert len(users) == len(rows["users.csv"]) and len(items) == len(rows["items.csv"])
    return [(users[u], items[i], int(time)) for u, i, time in rows["ratings.csv"]]


def jsonl(rows, names=HEADER):
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


def parquet_bytes(rows):
    sink = io.BytesIO()
    columns = dict(zip(HEADER, map(list, zip(*rows, strict=True)), strict=True))
    parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("log.csv", table),
        ("log.csv", lambda rows: "\ufeff" + table(rows).replace("\n", "\r\n")),
        ("log.csv.gz", lambda rows: gzip.compress(table(rows).encode())),
        ("log.tsv", lambda rows: table(rows, delimiter="\t")),
        ("log.csv", lambda rows: table(rows, ("User-ID", "ISBN", "stars", "DateTime"), ";")),
        ("log.txt", lambda rows: table(rows, ("uid", "sku", "x", "ts"), "|")),
        ("log.dat", lambda rows: table(rows, ("CUSTOMER", "track", "x", "created_at"), "::")),
        ("log.inter", lambda rows: table(rows, [f"{n}:token" for n in HEADER], "\t")),
        ("log.jsonl", jsonl),
        ("log.json", lambda rows: jsonl(rows, ("reviewerID", "asin", "x", "unixReviewTime"))),
        ("log.parquet", parquet_bytes),
    ],
)
def test_each_form_gives_the_rows(name, form, tmp_path):
    rows = make_rows()
    path = write(tmp_path, name, form(rows))
    line = make(path, tmp_path / "out")
    assert read_back(tmp_path / "out") == [(user, item, time) for user, item, _, time in rows]
    assert "--config.train_batch_size=32 " in line and "--config.min_ratings=3 " in line
    assert "--config.eval_negatives=all " in line
    (dataset,) = recognise.dataset_formats(Folder.open(path))
    assert dataset.arguments == [path] and dataset.name == "interactions"
    made = {n: (tmp_path / "out" / n).read_bytes() for n in FILES}
    assert prepare.is_prepared(Folder.open(str(tmp_path / "out")), str(tmp_path / "out"))
    make(path, tmp_path / "out")  # the same command gives the same
    assert made == {n: (tmp_path / "out" / n).read_bytes() for n in FILES}


def minimum(rows, time=lambda k: 10**9 + k):
    """A log that can be learnt from, with `rows` after its own; its ids are no whole numbers."""
    own = [(f"u{u}", f"i{i}", 1, time(i + 1)) for u in range(4) for i in range(6) if u != i]
    return table([*own, *rows])


def test_many_rows_train_the_recipe_of_ml_20m(tmp_path, monkeypatch):
    monkeypatch.setattr(interactions, "_LARGE", 1)
    line = make(write(tmp_path, "log.csv", minimum([])), tmp_path / "out")
    assert "python main.py --config=configs/ncf.py --config.data_dir=" in line


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("1600000000", "2020-09-13T12:26:40"),
        ("1600000000.9", "2020-09-13T12:26:40"),
        ("1600000000123", "2020-09-13T12:26:40"),
        ("1600000000123456", "2020-09-13T12:26:40"),
        ("2024-02-29", "2024-02-29T00:00:00"),
        ("2024/2/29 09:05", "2024-02-29T09:05:00"),
        ("2024-02-29T23:59:59.999Z", "2024-02-29T23:59:59"),
        ("2024-02-29 23:30:00+05:30", "2024-02-29T18:00:00"),
        ("20240229", "2024-02-29T00:00:00"),
        ("29.02.2024 9:05:07", "2024-02-29T09:05:07"),
        ("29/02/2024", "2024-02-29T00:00:00"),
        ("12/31/2010 12:26 AM", "2010-12-31T00:26:00"),
        ("Tue Apr 03 18:00:09 -0700 2012", "2012-04-04T01:00:09"),
    ],
)
def test_times_have_many_forms(written, expected, tmp_path):
    rows = [(f"u{u}", f"i{i}", 1, written) for u in range(4) for i in range(6) if u != i]
    make(write(tmp_path, "log.csv", table(rows)), tmp_path / "out")
    seconds = datetime.datetime.fromisoformat(f"{expected}+00:00").timestamp()
    assert {time for *_, time in read_back(tmp_path / "out")} == {int(seconds)}


@pytest.mark.parametrize(
    "written",
    [datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 2, tzinfo=TWO_HOURS_EAST)],
)
def test_parquet_has_times_of_its_own(written, tmp_path):
    rows = [(u, i, 1, written) for u in range(4) for i in range(6) if u != i]
    make(write(tmp_path, "log.parquet", parquet_bytes(rows)), tmp_path / "out")
    assert {time for *_, time in read_back(tmp_path / "out")} == {1_709_164_800}


def test_days_and_months_that_look_alike_are_refused(tmp_path, capsys):
    path, out = write(tmp_path, "log.csv", minimum([], "03/{}/2024".format)), tmp_path / "out"
    code, line = leaves("interactions", [path, f"--out={out}"], capsys)
    assert code == 2 and "'03/2/2024'" in line and "%m/%d/%Y" in line and not out.exists()
    make(
        write(tmp_path, "log.csv", minimum([("u1", "i9", 1, "03/31/2024")], "03/{}/2024".format)),
        out,
    )
    assert read_back(out)[-2][2] == datetime.datetime(2024, 3, 6, tzinfo=datetime.UTC).timestamp()


def test_whole_numbers_stay_as_ids_and_titles_come_from_the_list_beside(tmp_path):
    rows = make_rows(is_text=False)
    path = write(tmp_path, "u.data", table(rows, None, "\t"))
    items = sorted({row[1] for row in rows}, key=int)
    listed = "".join(f"{item}|Amélie {item}|1995||http://x|0\n" for item in items[1:])
    write(tmp_path, "u.item", listed.encode("latin-1"))
    make(path, tmp_path / "out")
    raw = ratings.read(str(tmp_path / "out" / "ratings.csv"))
    kept = [(int(user), int(item), time) for user, item, _, time in rows]
    assert [*zip(*(column.tolist() for column in vars(raw).values()), strict=True)] == kept
    head, *listed = csv.reader((tmp_path / "out" / "items.csv").read_text().splitlines())
    assert head == ["item_id", "title", "name"] and all(row[0] == row[2] for row in listed)
    titles = {row[0]: row[1] for row in listed}
    assert titles == {i: f"Amélie {i}" if i != items[0] else i for i in items}


def test_files_without_times_count_their_rows_and_ids_may_be_text_in_one(tmp_path, capsys):
    first = [(u, i) for u in range(3) for i in range(4) if u != i]
    second = [("anna", 2), (1, "x"), ("NULL", 2), (1, "")]
    paths = [
        write(tmp_path, f"{k}.csv", table(r, HEADER[:2])) for k, r in enumerate((first, second))
    ]
    make(paths, tmp_path / "out")
    expected = [(str(user), str(item), k) for k, (user, item) in enumerate(first + second[:2])]
    assert read_back(tmp_path / "out") == expected
    output = capsys.readouterr().out
    assert "warning: rows without user, left out: 1" in output and "without item, left" in output
    content = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert content["kind"] == "recommendation" and content["left_out"]["user"] == 1
    assert content["counts"] == {"ratings": 11, "users": 4, "items": 5}


@pytest.mark.parametrize(
    ("counts", "least"),
    [([20] * 10, 20), ([25] * 8 + [5, 3], 5), ([30] * 20 + [9] * 2 + [1] * 90, 20), ([2] * 9, 2)],
)
def test_min_ratings_keeps_most_users(counts, least, tmp_path, capsys):
    rows = [(f"u{u}", f"i{(u + i) % 40}") for u, n in enumerate(counts) for i in range(n)]
    line = make(write(tmp_path, "log.csv", table(rows, HEADER[:2])), tmp_path / "out")
    assert f"--config.min_ratings={least} " in line
    single = f"users with one item, left out: {counts.count(1)}"
    assert (single in capsys.readouterr().out) == (1 in counts)
    data = ratings.load_interactions(str(tmp_path / "out"), least, "")
    assert data.num_users == sum(count >= least for count in counts)


def test_large_tables_are_ranked_among_drawn_items(tmp_path, monkeypatch):
    rows = make_rows()
    users, items = ({*column} for column in [*zip(*rows, strict=True)][:2])
    path = write(tmp_path, "log.csv", table(rows))
    for limit, is_all in ((len(users) * len(items), True), (len(users) * len(items) - 1, False)):
        monkeypatch.setattr(interactions, "_RANKED", limit)
        line = make(path, tmp_path / f"out{limit}")
        assert ("--config.eval_negatives=all" in line) is is_all


def test_who_has_every_item_is_left_out(tmp_path, capsys):
    path = write(tmp_path, "log.csv", minimum([("all", f"i{i}", 1, i) for i in range(6)] * 2))
    make(path, tmp_path / "out")
    output = capsys.readouterr().out
    assert "every item" in output and "each pair counts once: 6" in output
    assert ratings.load_interactions(str(tmp_path / "out"), 2, "").num_users == 4


LATER = [("u1", "i9", 1, "yesterday")]
FAULTS = {
    "unknown names": (
        table([("u", "i")], ("klant", "artikel")),
        [],
        "--user=COLUMN .* the columns are 1, 2 without",
    ),
    "no such column": (minimum([]), ["--time=when"], "--time=when: the columns of .* timestamp"),
    "header below": ("my export\n\n" + minimum([]), [], "line 1 has 1 columns, and others 4"),
    "header again": (minimum([HEADER]), [], "line 22: unknown time 'timestamp'"),
    "no time": (minimum(LATER), [], "line 22: unknown time 'yesterday'"),
    "before 1970": (minimum([("u", "i", 1, "-5")]), [], "line 22: the time is not from 1970"),
    "short row": (minimum([]) + "u1,i1\n", [], "Row #22: Expected 4 columns, got 2"),
    "no pairs": (
        table([("u1", "i1"), ("u2", "i2")], HEADER[:2]),
        [],
        "every user has one item or all items",
    ),
    "only a header": (table([], HEADER), [], "no rows"),
    "a zip": (b"PK\3\4", [], "save it as CSV"),
    "UTF-16": (minimum([]).encode("utf-16"), [], "save it as UTF-8"),
    "a JSON list": ('[{"user": 1}]', [], "write one object in each line"),
    "damaged JSON": (jsonl(make_rows()) + '{"user_id": }\n', [], "in line 4[0-9]+"),
    "damaged gzip": (gzip.compress(minimum([]).encode())[:-20], [], "cannot read .*log.csv"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_mistake_takes_one_line_and_leaves_nothing(name, tmp_path, capsys):
    content, flags, message = FAULTS[name]
    path, out = write(tmp_path, "log.csv", content), tmp_path / "out"
    code, line = leaves("interactions", [path, f"--out={out}", *flags], capsys)
    assert code == 2 and re.search(message, line) and "log.csv" in line or name == "no pairs"
    assert not out.exists()


def test_one_file_without_times_is_refused_beside_one_with_times(tmp_path, capsys):
    paths = [write(tmp_path, "a.csv", minimum([])), write(tmp_path, "b.csv", "user,item\nu9,i1\n")]
    code, line = leaves("interactions", [*paths, f"--out={tmp_path / 'out'}"], capsys)
    assert code == 2 and "b.csv has no times" in line and "--time=none" in line
    make(paths, tmp_path / "out", "--time=none")
    assert [time for *_, time in read_back(tmp_path / "out")] == [*range(21)]


def test_other_data_in_the_folder_are_kept(tmp_path, capsys):
    path, out = write(tmp_path, "log.csv", minimum([])), tmp_path / "out"
    make(path, out)
    before = (out / "ratings.csv").read_bytes()
    other = write(tmp_path, "other.csv", minimum([("new", "i1", 1, 5), ("new", "i2", 1, 6)]))
    code, line = leaves("interactions", [other, f"--out={out}"], capsys)
    assert code == 1 and "--overwrite" in line and (out / "ratings.csv").read_bytes() == before
    own = write(tmp_path, "ratings.csv", minimum([]))
    code, line = leaves("interactions", [own, f"--out={tmp_path}", "--overwrite"], capsys)
    assert code == 2 and "is the folder of" in line
    make(other, out, "--overwrite")
    assert (out / "ratings.csv").read_bytes() != before


LOGS = {
    "MovieLens": (
        {"ratings.csv": minimum([]), "tags.csv": "userId,movieId,tag,timestamp\n1,2,good,5\n"},
        ["ratings.csv"],
    ),
    "RecBole": (
        {
            f"x.{split}.inter": table(make_rows(), [f"{n}:token" for n in HEADER], "\t")
            for split in ("test", "train", "valid")
        }
        | {"x.item": "item_id:token\ttitle:token\n"},
        ["x.train.inter", "x.valid.inter", "x.test.inter"],
    ),
    "MLPerf": (
        {f"{split}-ratings.csv": "0\t1\t1\n0\t2\t1\n" for split in ("test", "train")},
        ["train-ratings.csv", "test-ratings.csv"],
    ),
    "YOLO": ({"labels/a.txt": "0 0.5 0.5 0.1 0.1\n1 0.5 0.5 0.2 0.2\n"}, []),
    "COCO": ({"train.json": '{"images": [' + '{"id": 1, "file_name": "a.jpg"},' * 9999}, []),
}


@pytest.mark.parametrize("name", LOGS)
def test_a_folder_is_read_if_a_table_has_users_and_items(name, tmp_path):
    contents, expected = LOGS[name]
    found = recognise.dataset_formats(place(tmp_path, contents))
    assert [dataset.arguments for dataset in found] == (
        [[str(tmp_path / path) for path in expected]] if expected else []
    )
