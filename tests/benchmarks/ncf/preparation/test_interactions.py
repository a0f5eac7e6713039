"""Own interactions are read like by csv and dicts, from each form; mistakes in them are refused."""

import csv
import datetime
import gzip
import io
import json
import random
import shlex

import pyarrow
import pytest
from pyarrow import parquet

from benchmarks.ncf import ratings
from benchmarks.ncf.preparation import interactions
from common.preparation.folders import Folder
from scripts import prepare
from tests.helpers.preparation import leaves

HEADER = ("user_id", "item_id", "rating", "timestamp")
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
    assert heads == [["user_id", "item_id", "timestamp"], ["user_id", "name"], ["item_id", "title"]]
    users, items = dict(rows["users.csv"]), dict(rows["items.csv"])
    assert len(users) == len(rows["users.csv"]) and len(items) == len(rows["items.csv"])
    return [(users[u], items[i], int(time)) for u, i, time in rows["ratings.csv"]]


def without_rating(rows):
    return [(user, item, time) for user, item, _, time in rows]


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
    assert read_back(tmp_path / "out") == without_rating(rows)
    assert shlex.split(line.partition("train on them: ")[2])[2].startswith("--config=configs/")
    (reading,) = interactions.readings(Folder.open(path))
    assert reading.arguments == [path] and reading.form == "interactions"
    made = {n: (tmp_path / "out" / n).read_bytes() for n in FILES}
    make(path, tmp_path / "out")  # the same command gives the same
    assert made == {n: (tmp_path / "out" / n).read_bytes() for n in FILES}
