"""MovieLens' files: what is read and indexed, against a loop over lines; and what is refused."""

import json
import os
import random
import zipfile
from collections import defaultdict

import numpy as np
import pytest

from benchmarks.ncf import interactions, ratings
from ops.shards import DataError

HEADER = "userId,movieId,rating,timestamp"


def made(seed=0, users=30, items=50):
    """Rows (user, item, stars, time) in the order of ml-20m; times often fall together."""
    draw = random.Random(seed)
    user_ids = sorted(draw.sample(range(1, 900), users))
    item_ids = sorted(draw.sample(range(1, 4_000_000_000), items))
    rows = []
    for user in user_ids:
        for item in sorted(draw.sample(item_ids, draw.randint(2, 25))):
            rows.append((user, item, draw.randint(1, 10) / 2, draw.randint(1_000_000, 1_000_006)))
    return rows


def csv(rows, header=HEADER, end="\n"):
    return end.join([header, *(",".join(map(str, row)) for row in rows), ""])


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def load(folder, min_ratings=2, cache=""):
    return interactions.load(str(folder), min_ratings, cache)


def reference(rows, min_ratings):
    """(user ids, item ids, {user: {items to train on}}, {user: held-out item}), a row at a time."""
    times = defaultdict(dict)
    for user, item, _, time in rows:
        times[user][item] = max(time, times[user].get(item, 0))
    kept = {user: of for user, of in times.items() if len(of) >= min_ratings}
    held = {user: max(of, key=lambda item: (of[item], item)) for user, of in kept.items()}
    train = {user: set(of) - {held[user]} for user, of in kept.items()}
    items = sorted({item for of in kept.values() for item in of})
    return sorted(kept), items, train, held


def assert_is(found, rows, min_ratings=2):
    users, items, train, held = reference(rows, min_ratings)
    assert found.user_ids.tolist() == users
    assert found.item_ids.tolist() == items
    assert found.num_positives == sum(map(len, train.values()))
    for u, user in enumerate(users):
        own = found.items[found.starts[u] : found.starts[u + 1]]
        assert (np.diff(own) > 0).all()
        assert set(found.item_ids[own].tolist()) == train[user]
        assert found.item_ids[found.held[u]] == held[user]


def test_blank_lines_at_the_end_say_nothing(tmp_path):
    rows = made()
    write(tmp_path, "ratings.csv", csv(rows) + "\r\n\n\n")
    assert_is(load(tmp_path), rows)


PLACES = ["ratings.csv", "ml-20m/ratings.csv", "ratings.dat", "ml-1m/ratings.dat"]


@pytest.mark.parametrize("place", [*PLACES, "ml-20m.zip", "ml-1m.zip"])
def test_every_form_says_the_same(place, tmp_path):
    rows = made()
    text = csv(rows)
    if place.endswith(".dat") or "1m" in place:
        text = text.replace(",", "::").split("\n", 1)[1]
    if place.endswith(".zip"):
        inner = "ml-20m/ratings.csv" if "20m" in place else "ml-1m/ratings.dat"
        with zipfile.ZipFile(tmp_path / place, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("ml/README.html", "<html>")
            archive.writestr(inner, text)
    else:
        write(tmp_path, place, text)
    assert ratings.locate(str(tmp_path)) == str(tmp_path / place)
    assert_is(load(tmp_path), rows)
    assert_is(load(tmp_path / place), rows)  # the file itself


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.removesuffix("\n"),
        lambda text: "\ufeff" + text,
        lambda text: text.replace(HEADER, "user_id,item_id,rating,timestamp"),
        lambda text: text.replace(HEADER, '"UserID", "MovieID","rating","timestamp"'),
    ],
    ids=["CRLF", "no last newline", "byte order mark", "converted", "quoted"],
)
def test_other_ways_to_write_it(change, tmp_path):
    rows = made()
    write(tmp_path, "ratings.csv", change(csv(rows)))
    assert_is(load(tmp_path), rows)


def test_columns_are_found_by_name(tmp_path):
    rows = made()
    text = csv([(t, 7, i, s, u) for u, i, s, t in rows], "timestamp,more,movieId,rating,userId")
    write(tmp_path, "ratings.csv", text)
    assert_is(load(tmp_path), rows)


@pytest.mark.parametrize("block", [64, 1000])
def test_blocks_may_end_anywhere(block, tmp_path, monkeypatch):
    rows = made()
    write(tmp_path, "ratings.csv", csv(rows))
    monkeypatch.setattr(ratings, "_BLOCK", block)
    assert_is(load(tmp_path), rows)


def test_any_order_of_rows_is_the_same_index_and_is_said(tmp_path, caplog):
    rows = made()
    random.Random(1).shuffle(rows)
    write(tmp_path, "ratings.csv", csv(rows))
    with caplog.at_level("INFO", "tpu_suite"):
        assert_is(load(tmp_path), rows)
    (said,) = caplog.messages
    assert "not in the order" in said and "ratings.csv" in said


def test_of_ratings_given_again_the_latest_counts(tmp_path, caplog):
    rows = made()
    again = [(u, i, s, 1_000_000 + 7 * k) for k, (u, i, s, _) in enumerate(rows[::9])]
    write(tmp_path, "ratings.csv", csv(rows + again))
    with caplog.at_level("INFO", "tpu_suite"):
        assert_is(load(tmp_path), rows + again)
    assert f"again {len(again)} times" in caplog.messages[-1]


def test_users_with_few_ratings_are_left_out_and_counted(tmp_path, caplog):
    rows = made()
    write(tmp_path, "ratings.csv", csv(rows))
    users = {row[0] for row in rows}
    few = {u for u in users if sum(row[0] == u for row in rows) < 20}
    assert 0 < len(few) < len(users)
    with caplog.at_level("INFO", "tpu_suite"):
        assert_is(load(tmp_path, 20), rows, 20)
    (said,) = caplog.messages
    assert said.startswith(f"{len(few)} of {len(users)} users") and "fewer than 20" in said


LINES = ["1,5,3.5,100", "1,6,3.5,101", "2,5,1.0,100", "2,7,1.0,90"]
REFUSED = {
    "no column": ("userId,rating,timestamp\n1,5,7\n", ["line 1", "movieid", "'userId,rating,time"]),
    "no header": ("\n".join(LINES), ["line 1", "no column userid", "'1,5,3.5,100'"]),
    "empty": ("", ["is empty"]),
    "only a header": (HEADER + "\n", ["no ratings, only a header"]),
    "not a number": (csv([["1", "x7", "3.5", "9"]]), ["line 2", "item is 'x7'"]),
    "negative": ("\n".join([HEADER, *LINES, "-2,7,1.0,90"]), ["line 6", "user is '-2'"]),
    "time with a point": ("\n".join([HEADER, *LINES, "2,7,1.0,9.5"]), ["line 6", "time is '9.5'"]),
    "no item": ("\n".join([HEADER, *LINES, "2,,1.0,9"]), ["line 6", "item is ''"]),
    "too large": ("\n".join([HEADER, "2,4294967296,1.0,9"]), ["line 2", "'4294967296'"]),
    "far too large": ("\n".join([HEADER, "2,12345678901,1.0,9"]), ["line 2", "item"]),
    "cut off": ("\n".join([HEADER, *LINES, "2,9"]), ["line 6", "'2,9' has 2 values, not 4"]),
    "a value more": ("\n".join([HEADER, *LINES, "1,2,3,4,5"]), ["line 6", "5 values, not 4"]),
    "values shifted": ("\n".join([HEADER, "1,2,3", "1,2,3,4,5"]), ["line 2", "3 values"]),
    "a blank line": ("\n".join([HEADER, *LINES, "", LINES[0]]), ["line 6", "1 values"]),
    "no text": (b"\0\1\2\3" * 50_000, ["is no text of ratings"]),
    "nobody has enough": (csv([[1, 5, 3.5, 100]]), ["1 of 1 users", "fewer than 2", "min_ratings"]),
    "everything rated": ("\n".join([HEADER, *LINES, "1,7,1,1"]), ["user 1", "all 3 items"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_ratings_is_refused_in_one_line(case, tmp_path):
    text, words = REFUSED[case]
    path = write(tmp_path, "ratings.csv", text)
    refused(tmp_path, str(path), *words)


def refused(folder, *words):
    with pytest.raises(DataError) as caught:
        load(folder)
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    for word in words:
        assert word in said


def test_the_line_is_named_in_later_blocks_too(tmp_path, monkeypatch):
    monkeypatch.setattr(ratings, "_BLOCK", 100)
    lines = csv(made()).splitlines()
    lines[300] = "oops"
    write(tmp_path, "ratings.csv", "\n".join(lines))
    refused(tmp_path, "line 301:", "'oops'")


def test_a_folder_without_ratings(tmp_path):
    refused(tmp_path, str(tmp_path), "none of ratings.csv", "ml-20m.zip")
    refused(tmp_path / "nowhere", "nowhere", "none of ratings.csv")
    refused(tmp_path / "x.csv", "no such file")


def test_an_unknown_format(tmp_path):
    write(tmp_path, "ratings.dat", csv(made()))
    refused(tmp_path, "line 1", "UserID::MovieID::Rating::Timestamp")
    os.remove(tmp_path / "ratings.dat")
    write(tmp_path, "ratings.parquet", "PAR1")
    refused(tmp_path, "none of ratings.csv")


def test_a_zip_that_is_none_or_has_none(tmp_path):
    path = write(tmp_path, "ml-20m.zip", "not a zip")
    refused(tmp_path, "ml-20m.zip is no zip file")
    path.write_bytes(b"PK\3\4" + bytes(1000))
    refused(tmp_path, "ml-20m.zip is damaged")
    with zipfile.ZipFile(tmp_path / "ml-20m.zip", "w") as archive:
        archive.writestr("ml-20m/movies.csv", "x")
    refused(tmp_path, "has no ratings.csv")


def test_a_zip_that_is_damaged_inside(tmp_path):
    path = tmp_path / "ml-20m.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("ml-20m/ratings.csv", csv(made()))
    content = bytearray(path.read_bytes())
    at = content.index(b".5,")
    content[at : at + 2] = b".0"
    path.write_bytes(content)
    refused(tmp_path, "ml-20m.zip is damaged", "CRC")


# --- The cache.


@pytest.fixture
def counted(monkeypatch):
    """How often a file of ratings was read."""
    calls, read = [], ratings.read
    monkeypatch.setattr(ratings, "read", lambda path: calls.append(path) or read(path))
    return calls


def test_an_index_is_made_once(tmp_path, counted):
    rows, cache = made(), str(tmp_path / "cache" / "interactions")
    write(tmp_path, "ratings.csv", csv(rows))
    for _ in range(3):
        assert_is(load(tmp_path, 2, cache), rows)
    assert len(counted) == 1
    assert os.listdir(tmp_path / "cache") == ["interactions"]


def test_another_file_or_rule_makes_it_anew(tmp_path, counted):
    rows, cache = made(), str(tmp_path / "cache")
    path = write(tmp_path, "ratings.csv", csv(rows))
    load(tmp_path, 2, cache)
    assert_is(load(tmp_path, 20, cache), rows, 20)
    other = [(u, i, s, 2_000_006 - t) for u, i, s, t in rows]  # of the same length
    assert len(csv(other)) == len(csv(rows))
    stat = os.stat(path)
    path.write_text(csv(other))
    os.utime(path, (stat.st_atime, stat.st_mtime + 2))  # TensorFlow sees whole seconds
    assert_is(load(tmp_path, 20, cache), other, 20)
    assert len(counted) == 3


@pytest.mark.parametrize("damage", ["cut", "longer", "no json", "empty", "other json"])
def test_a_damaged_cache_is_made_anew(damage, tmp_path, counted):
    rows, cache = made(), tmp_path / "cache"
    write(tmp_path, "ratings.csv", csv(rows))
    load(tmp_path, 2, str(cache))
    whole = cache.read_bytes()
    head, _, body = whole.partition(b"\n")
    lengths = json.loads(head) | {"lengths": {"starts": "x"}}
    cache.write_bytes(
        {
            "cut": whole[:-1],
            "longer": whole + b"\0",
            "no json": b"{" + whole,
            "empty": b"",
            "other json": json.dumps(lengths).encode() + b"\n" + body,
        }[damage]
    )
    assert_is(load(tmp_path, 2, str(cache)), rows)
    assert len(counted) == 2
    assert cache.read_bytes() == whole


def test_messages_name_the_line_of_a_dat(tmp_path):
    write(tmp_path, "ratings.dat", "1::5::3::100\n1::six::3::100\n")
    refused(tmp_path, "ratings.dat, line 2: the item is 'six'")


# --- In a bucket.


@pytest.mark.parametrize("form", ["ml-20m/ratings.csv", "ml-20m.zip"])
def test_ratings_and_cache_may_be_in_buckets(form, gcs, counted, tmp_path):
    rows, content = made(), csv(made()).encode()
    if form.endswith(".zip"):
        with zipfile.ZipFile(tmp_path / "z", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("ml-20m/ratings.csv", content)
        content = (tmp_path / "z").read_bytes()
    data, cache = gcs.bucket("read"), f"{gcs.bucket()}/run/data_index/interactions"
    gcs.write(f"{data}/some/{form}", content)
    for _ in range(2):
        assert_is(load(f"{data}/some", 2, cache), rows)
    assert len(counted) == 1


def test_a_bucket_that_may_not_be_read_is_one_line(gcs):
    data = gcs.bucket("none")
    gcs.write(f"{data}/ratings.csv", csv(made()).encode())
    refused(data, data)
