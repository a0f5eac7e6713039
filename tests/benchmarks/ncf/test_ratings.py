"""MovieLens' files are read and indexed like by a loop over lines; mistakes in them are refused."""

import os
import random
import re
import zipfile
from collections import defaultdict

import numpy as np
import pytest

from benchmarks.ncf import ratings
from benchmarks.ncf.ratings import Holdout
from common.errors import ConfigError, DataError
from common.tensorflow import tensorflow

HEADER = "userId,movieId,rating,timestamp"


def make_rows(seed=0, users=30, items=50):
    """Rows (user, item, stars, time) in the order of ml-20m; times often fall together."""
    draw = random.Random(seed)
    user_ids = sorted(draw.sample(range(1, 900), users))
    item_ids = sorted(draw.sample(range(1, 4_000_000_000), items))
    rows = []
    for user in user_ids:
        for item in sorted(draw.sample(item_ids, draw.randint(2, 25))):
            rows.append((user, item, draw.randint(1, 10) / 2, draw.randint(1_000_000, 1_000_006)))
    return rows


def csv(rows, header=HEADER):
    return "\n".join([header, *(",".join(map(str, row)) for row in rows), ""])


def dat(rows):
    """The form of ml-1m."""
    return csv(rows).replace(",", "::").split("\n", 1)[1]


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def load(folder, min_ratings=2, cache="", seed=None):
    holdout = Holdout() if seed is None else Holdout("random", seed)
    return ratings.load_interactions(str(folder), min_ratings, cache, holdout)


def reference(rows, min_ratings):
    """(user ids, item ids, {user: {items to train on}}, {user: held-out item}), a row at a time."""
    times = defaultdict(dict)
    for user, item, _, time in rows:
        times[user][item] = max(time, times[user].get(item, 0))
    kept = {user: of for user, of in times.items() if len(of) >= min_ratings}
    held_out = {user: max(of, key=lambda item: (of[item], item)) for user, of in kept.items()}
    train = {user: set(of) - {held_out[user]} for user, of in kept.items()}
    items = sorted({item for of in kept.values() for item in of})
    return sorted(kept), items, train, held_out


def assert_index(data, rows, min_ratings=2):
    users, items, train, held_out = reference(rows, min_ratings)
    assert data.user_ids.tolist() == users
    assert data.item_ids.tolist() == items
    assert data.num_positives == sum(map(len, train.values()))
    for u, user in enumerate(users):
        own = data.items[data.starts[u] : data.starts[u + 1]]
        assert (np.diff(own) > 0).all()
        assert set(data.item_ids[own].tolist()) == train[user]
        assert data.item_ids[data.held_out[u]] == held_out[user]


@pytest.mark.parametrize("name", [n for n in ratings.FILES if n != "train-ratings.csv"])
def test_all_file_formats_give_the_same_index(name, tmp_path):
    rows = make_rows()
    text = dat(rows) if name.endswith(".dat") or "1m" in name else csv(rows)
    if name.endswith("u.data"):
        text = dat(rows).replace("::", "\t")
    if name.endswith(".zip"):
        inner = "ml-20m/ratings.csv" if "20m" in name else "ml-1m/ratings.dat"
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("ml/README.html", "<html>")
            archive.writestr(inner, text)
    else:
        write(tmp_path, name, text)
    assert ratings.locate(str(tmp_path)) == str(tmp_path / name)
    assert_index(load(tmp_path), rows)
    assert_index(load(tmp_path / name), rows)  # the file itself


def write_converted(folder, rows):
    """What convert.py of MLPerf's reference (v0.5, recommendation/pytorch) leaves of ratings."""
    latest = {}
    for row in sorted(rows, key=lambda row: row[3]):
        latest[row[0]] = row[1]
    pairs = {(row[0], row[1]) for row in rows}
    test = set(latest.items())
    for name, some in (("train", pairs - test), ("test", test)):
        write(folder, f"{name}-ratings.csv", "".join(f"{u}\t{i}\t1\n" for u, i in some))
    return [(u, i, 1, int((u, i) in test)) for u, i in pairs]


def test_what_the_converter_of_mlperf_writes(tmp_path):
    """The held-out items are those of test-ratings.csv, and a change there is noticed."""
    cache = str(tmp_path / "cache")
    for seed in (0, 1):
        rows = write_converted(tmp_path, make_rows(seed))
        assert_index(load(tmp_path, cache=cache), rows)
    test = tmp_path / "test-ratings.csv"
    user, item, _ = test.read_text().splitlines()[0].split("\t")
    test.write_text(test.read_text().replace(f"{user}\t{item}\t", f"{user}\t3\t"))
    assert 3 in load(tmp_path, cache=cache).item_ids
    test.unlink()
    assert_refused(tmp_path, "test-ratings.csv")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace(",", "\t"),
        lambda text: text.removesuffix("\n"),
        lambda text: "\ufeff" + text,
        lambda text: text.replace(HEADER, "user_id,item_id,rating,timestamp"),
        lambda text: text.replace(HEADER, '"UserID", "MovieID","rating","timestamp"'),
        lambda text: HEADER + re.sub(r"(\d+),(\d+),", r'"\1","\2",', text.removeprefix(HEADER)),
        lambda text: text.replace("\n", "\n\n", 9) + "\r\n\n\n",
    ],
    ids=[
        *("CRLF", "tabs", "no last newline", "byte order mark", "converted", "quoted header"),
        *("quoted values", "blank lines"),
    ],
)
def test_variants_of_the_csv_format(change, tmp_path):
    rows = make_rows()
    write(tmp_path, "ratings.csv", change(csv(rows)))
    assert_index(load(tmp_path), rows)


def test_columns_are_found_by_name(tmp_path):
    rows = make_rows()
    text = csv([(t, 7, i, s, u) for u, i, s, t in rows], "timestamp,more,movieId,rating,userId")
    write(tmp_path, "ratings.csv", text)
    assert_index(load(tmp_path), rows)


@pytest.mark.parametrize("block", [64, 1000])
@pytest.mark.parametrize("form", [csv, dat])
def test_blocks_may_end_anywhere(block, form, tmp_path, monkeypatch):
    rows = make_rows()
    write(tmp_path, f"ratings.{form.__name__}", form(rows))
    monkeypatch.setattr(ratings, "_BLOCK", block)
    assert_index(load(tmp_path), rows)


def test_rows_in_any_order_and_repeated_ratings(tmp_path, caplog):
    """Of repeated ratings the latest counts."""
    rows = make_rows()
    again = [(u, i, s, 1_000_000 + 7 * k) for k, (u, i, s, _) in enumerate(rows[::9])]
    shuffled = rows + again
    random.Random(1).shuffle(shuffled)
    write(tmp_path, "ratings.csv", csv(shuffled))
    with caplog.at_level("INFO", "tpu_suite"):
        assert_index(load(tmp_path), shuffled)
    (message,) = caplog.messages
    assert "ratings.csv was not in the order" in message
    assert f"{len(again)} ratings repeat an item" in message


def test_users_with_few_ratings_are_left_out_and_read_calls(tmp_path, caplog):
    rows = make_rows()
    write(tmp_path, "ratings.csv", csv(rows))
    users = {row[0] for row in rows}
    few = {u for u in users if sum(row[0] == u for row in rows) < 20}
    assert 0 < len(few) < len(users)
    with caplog.at_level("INFO", "tpu_suite"):
        assert_index(load(tmp_path, 20), rows, 20)
    (message,) = caplog.messages
    assert message.startswith(f"{len(few)} of {len(users)} users") and "fewer than 20" in message


# --- A random item is held out.


def draw(*words):
    """The chain of splitmix64 in Python's integers."""
    mixed, mask = 0, 2**64 - 1
    for word in words:
        z = ((mixed ^ word) + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        mixed = z ^ (z >> 31)
    return mixed


def with_draws(rows, seed):
    """`rows` with a time that makes the item with the user's largest draw the latest one."""
    return [(u, i, s, draw(seed, ratings._HOLD_OUT, u, i)) for u, i, s, _ in rows]


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_a_random_item_is_held_out(seed, tmp_path, read_calls):
    """It depends on the seed, the user and the user's items, not on times, order or other users."""
    rows, cache = make_rows(), str(tmp_path / "cache")
    write(tmp_path, "ratings.csv", csv(rows))
    assert_index(load(tmp_path, cache=cache), rows)
    for _ in range(2):
        assert_index(load(tmp_path, cache=cache, seed=seed), with_draws(rows, seed))
    assert len(read_calls) == 2  # the cache of the latest items does not count
    assert_index(load(tmp_path, 20, seed=seed), with_draws(rows, seed), 20)
    fewer = [(u, i, s, 9) for u, i, s, _ in rows[::-1] if u != rows[0][0]]
    write(tmp_path, "ratings.csv", csv(fewer))
    assert_index(load(tmp_path, seed=seed), with_draws(fewer, seed))


def test_each_item_is_equally_likely_to_be_held_out():
    users, items = (x.ravel().astype(np.uint32) for x in np.indices((40, 8)))
    items += users % 3  # so that nobody has rated all
    raw = ratings.Ratings(users, items, items)
    rules = [Holdout("random", seed) for seed in range(250)]
    drawn = [ratings.index_ratings(raw, 2, "", rule).held_out for rule in rules]
    counts = np.bincount((drawn - np.arange(40) % 3).ravel(), minlength=8)
    assert ((counts - 1250) ** 2 / 1250).sum() < 7 + 5 * 14**0.5  # chi-squared of 7 degrees
    repeats = np.mean([a == b for a, b in zip(drawn, drawn[1:], strict=False)])
    assert repeats == pytest.approx(1 / 8, abs=0.02)


def by_date(rows, first):
    """{user: (items before, items since)} by the first time of each pair, a row at a time."""
    times = defaultdict(dict)
    for user, item, _, time in rows:
        times[user][item] = min(time, times[user].get(item, time))
    return {
        user: [{i for i, t in of.items() if (t >= first) == since} for since in (False, True)]
        for user, of in times.items()
    }


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("1970-01-12T13:46:44", 1_000_004),  # of times from 1,000,000 to 1,000,006
        ("1970-01-12T14:46:44+01:00", 1_000_004),
        ("30%", None),
        ("date", None),
    ],
)
def test_the_rows_since_a_date_are_held_out(text, first, tmp_path):
    rows = make_rows()
    rows += [(user, item, 1, 1_000_006) for user, item, _, _ in rows[:40]]  # an item once more
    if first is None:
        unique = {(user, item): time for user, item, _, time in reversed(rows)}
        newest = sorted(unique.values(), reverse=True)
        first = newest[round(len(newest) * (0.3 if text == "30%" else 0.1)) - 1]
    write(tmp_path, "ratings.csv", csv(rows))
    rule = Holdout.parse(text, 0)
    data = ratings.load_interactions(str(tmp_path), 2, "", rule)
    expected = by_date(rows, first)
    assert data.user_ids.tolist() == sorted(expected) and data.held_from == first
    ranked = []
    for u, user in enumerate(data.user_ids.tolist()):
        before = data.items[data.starts[u] : data.starts[u + 1]]
        since = data.held_out[data.held_starts[u] : data.held_starts[u + 1]]
        assert (np.diff(before) > 0).all() and (np.diff(since) > 0).all()
        parts = [{*data.item_ids[part].tolist()} for part in (before, since)]
        assert parts == expected[user]
        ranked += [u] * all(parts)
    assert data.evaluated.tolist() == ranked and data.num_ratings == sum(
        len(part) for parts in expected.values() for part in parts
    )


def test_nothing_is_held_out(tmp_path):
    rows = make_rows()
    write(tmp_path, "ratings.csv", csv(rows))
    data = ratings.load_interactions(str(tmp_path), 2, "", Holdout.parse("none", 0))
    assert data.num_positives == data.num_ratings == len(rows)
    assert not len(data.held_out) and not len(data.evaluated)


@pytest.mark.parametrize(
    ("text", "says"),
    [("1970-01-12", "all of them"), ("1970-01-13", "none of them"), ("99.9%", "all of them")],
)
def test_a_date_outside_the_rows(text, says, tmp_path):
    write(tmp_path, "ratings.csv", csv(make_rows()))
    with pytest.raises(DataError, match=rf"from 1970-01-12 to 1970-01-12, so {says}"):
        ratings.load_interactions(str(tmp_path), 2, "", Holdout.parse(text, 0))


def test_a_date_that_no_user_has_rows_on_both_sides_of(tmp_path):
    lines = [HEADER, "1,5,1,100", "1,6,1,100", "2,7,1,900", "2,8,1,900"]
    write(tmp_path, "ratings.csv", "\n".join(lines))
    with pytest.raises(DataError, match="before 1970-01-01 and since"):
        ratings.load_interactions(str(tmp_path), 2, "", Holdout("date", since=500))


@pytest.mark.parametrize("text", ["0%", "100%", "nan%", "-5%", "%", "2018", "2018-13-01", "All"])
def test_words_that_are_no_rule(text):
    with pytest.raises(ConfigError, match="config.eval_holdout"):
        Holdout.parse(text, 0)


# --- Mistakes.


LINES = ["1,5,3.5,100", "1,6,3.5,101", "2,5,1.0,100", "2,7,1.0,90"]
REFUSED = {
    "no column": ("userId,rating,timestamp\n1,5,7\n", ["line 1", "movieid", "'userId,rating,time"]),
    "no header": ("\n".join(LINES), ["line 1", "no column userid", "'1,5,3.5,100'"]),
    "empty": ("", ["is empty"]),
    "only a header": (HEADER + "\n", ["no ratings, only a header"]),
    "not a number": (csv([["1", "x7", "3.5", "9"]]), ["Row #2", "#1", "'x7'"]),
    "time with a point": ("\n".join([HEADER, *LINES, "2,7,1.0,9.5"]), ["Row #6", "#3", "'9.5'"]),
    "no item": ("\n".join([HEADER, *LINES, "2,,1.0,9"]), ["Row #6", "#1", "invalid value ''"]),
    "too large": ("\n".join([HEADER, "2,4294967296,1.0,9"]), ["Row #2", "'4294967296'"]),
    "cut off": ("\n".join([HEADER, *LINES, "2,9"]), ["Row #6", f"is not {HEADER};", "got 2: 2,9"]),
    "no text": (b"\0\1\2\3" * 50_000, ["line 1", "no column userid", r"'\x00\x01\x02\x03"]),
    "nobody has enough": (csv([[1, 5, 3.5, 100]]), ["1 of 1 users", "fewer than 2", "min_ratings"]),
    "everything rated": ("\n".join([HEADER, *LINES, "1,7,1,1"]), ["user 1", "all 3 items"]),
}
OTHER_FILES = [  # name, content, words of the message
    ("ratings.dat", csv([[1, 5, 3.5, 9]]), ["Row #1:", "UserID::MovieID::Rating::Timestamp"]),
    ("ratings.dat", "1::5::3::100\n1::six::3::100\n", ["ratings.dat", "Row #2:", "'six'"]),
    ("ratings.parquet", "PAR1", ["none of ratings.csv", "ml-20m.zip"]),
    ("ml-20m.zip", "<html>" * 99, ["ml-20m.zip is damaged"]),
]


def assert_refused(folder, *words):
    with pytest.raises(DataError) as caught:
        load(folder)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_in_the_file_are_refused_in_one_line(case, tmp_path):
    text, words = REFUSED[case]
    path = write(tmp_path, "ratings.csv", text)
    assert_refused(tmp_path, str(path), *words)


@pytest.mark.parametrize(("name", "content", "words"), OTHER_FILES)
def test_files_of_another_form(name, content, words, tmp_path):
    write(tmp_path, name, content)
    assert_refused(tmp_path, str(tmp_path), *words)
    if name.endswith("parquet"):
        assert_refused(tmp_path / "x.csv", "no such file")


def test_the_row_is_named_in_later_blocks_too(tmp_path, monkeypatch):
    monkeypatch.setattr(ratings, "_BLOCK", 100)
    lines = csv(make_rows()).splitlines()
    lines[300] = "oops"
    write(tmp_path, "ratings.csv", "\n".join(lines))
    assert_refused(tmp_path, "Row #301:", "oops")


def test_zips_that_are_damaged_inside_or_without_ratings(tmp_path):
    path = tmp_path / "ml-20m.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("ml-20m/ratings.csv", csv(make_rows()))
    content = bytearray(path.read_bytes())
    at = content.index(b".5,")
    content[at : at + 2] = b".0"
    path.write_bytes(content)
    assert_refused(tmp_path, "ml-20m.zip is damaged", "CRC")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ml-20m/movies.csv", "x")
    assert_refused(tmp_path, "contains no ratings.csv")


def test_a_file_that_cannot_be_read_to_its_end(tmp_path, monkeypatch):
    """The error comes from a call of pyarrow's."""
    write(tmp_path, "ratings.csv", csv(make_rows()))
    monkeypatch.setattr(ratings, "_BLOCK", 100)
    tf = tensorflow()
    read, calls = tf.io.gfile.GFile.read, []

    def break_later(self, n=-1):
        calls.append(n)
        if len(calls) > 5:
            raise tf.errors.UnavailableError(None, None, "the network is gone")
        return read(self, n)

    monkeypatch.setattr(tf.io.gfile.GFile, "read", break_later)
    assert_refused(tmp_path, f"cannot read {tmp_path}/ratings.csv: the network is gone")


# --- The cache.


@pytest.fixture
def read_calls(monkeypatch):
    """The paths of the files of ratings that were read."""
    calls, read = [], ratings.read
    monkeypatch.setattr(ratings, "read", lambda path: calls.append(path) or read(path))
    return calls


def test_another_file_or_setting_replaces_the_cache(tmp_path, read_calls):
    rows, cache = make_rows(), str(tmp_path / "cache" / "interactions")
    path = write(tmp_path, "ratings.csv", csv(rows))
    for _ in range(3):
        assert_index(load(tmp_path, 2, cache), rows)
    assert len(read_calls) == 1
    assert_index(load(tmp_path, 20, cache), rows, 20)
    other = [(u, i, s, 2_000_006 - t) for u, i, s, t in rows]  # of the same length
    assert len(csv(other)) == len(csv(rows))
    stat = os.stat(path)
    path.write_text(csv(other))
    os.utime(path, (stat.st_atime, stat.st_mtime + 2))  # TensorFlow sees whole seconds
    assert_index(load(tmp_path, 20, cache), other, 20)
    assert len(read_calls) == 3


# --- In a bucket.


@pytest.mark.parametrize("form", ["ml-20m/ratings.csv", "ml-20m.zip"])
def test_ratings_and_cache_may_be_in_buckets(form, gcs, read_calls, tmp_path):
    rows, content = make_rows(), csv(make_rows()).encode()
    if form.endswith(".zip"):
        with zipfile.ZipFile(tmp_path / "z", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("ml-20m/ratings.csv", content)
        content = (tmp_path / "z").read_bytes()
    data, cache = gcs.bucket("read"), f"{gcs.bucket()}/run/data_index/interactions"
    gcs.write(f"{data}/some/{form}", content)
    for _ in range(2):
        assert_index(load(f"{data}/some", 2, cache), rows)
    assert len(read_calls) == 1


def test_a_bucket_that_may_not_be_read_is_one_line(gcs):
    data = gcs.bucket("none")
    gcs.write(f"{data}/ratings.csv", csv(make_rows()).encode())
    assert_refused(data, data)
