"""Logs as people have them: what is doubtful is read right, or told, or refused with the remedy."""

import collections
import datetime
import gzip
import io
import json
import random
import re
import shlex
import subprocess
import unicodedata

import pyarrow
import pytest
from pyarrow import parquet

from benchmarks.ncf.preparation import recognise
from common.errors import UserError
from common.preparation.folders import Folder
from scripts import prepare
from tests.benchmarks.ncf.preparation.test_interactions import make, read_back, write
from tests.helpers.preparation import leaves, place

DRAW = random.Random(0)
EVENTS = [(DRAW.randrange(9), DRAW.randrange(20), 1_700_000_000 + 61 * k) for k in range(120)]
DAY = 86_400


def stamp(seconds, form):
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime(form)


def log(header, row, events=EVENTS):
    """The text of a table; `row` makes a line of (user, item, seconds)."""
    return "".join(f"{line}\n" for line in [*filter(None, [header]), *(row(*e) for e in events)])


def taken(out):
    """The log that was written, in the ids of EVENTS: the digits of the names."""
    rows = read_back(out)
    return [(*(int(re.sub(r"\D", "", name)) for name in row[:2]), row[2]) for row in rows]


def parquet_log(names, row):
    sink = io.BytesIO()
    columns = dict(zip(names, map(list, zip(*(row(*e) for e in EVENTS), strict=True)), strict=True))
    parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue()


COLUMNS = {
    "Google Analytics": (
        "event_date,event_timestamp,event_name,user_pseudo_id,item_id",
        lambda u, i, t: f"{stamp(t, '%Y%m%d')},{t}000000,view_item,{u},sku{i}",
    ),
    "Snowplow": (
        "collector_tstamp\tderived_tstamp\tuser_id\tdomain_userid\titem_id",
        lambda u, i, t: f"{stamp(t, '%Y-%m-%d')}\t{stamp(t, '%Y-%m-%d %H:%M:%S.000')}\t\tv{u}\t{i}",
    ),
    "created_at beside a day": (
        "user,item,date,created_at",
        lambda u, i, t: f"{u},{i},{stamp(t, '%Y-%m-%d')},{stamp(t, '%Y-%m-%dT%H:%M:%SZ')}",
    ),
    "a day and times that begin at midnight": (
        "user,item,date,created_at",
        lambda u, i, t: (
            f"{u},{i},{stamp(t, '%Y-%m-%d')},"
            f"{stamp(t if t > EVENTS[25][2] else t // DAY * DAY, '%Y-%m-%d %H:%M:%S')}"
        ),
    ),
    "an empty user beside the visitor": (
        "timestamp,user_pseudo_id,user_id,item_id",
        lambda u, i, t: f"{t},{u},,i{i}",
    ),
    "an empty time beside another": (
        "user,item,timestamp,created_at",
        lambda u, i, t: f"{u},{i},NULL,{stamp(t, '%Y-%m-%d %H:%M:%S')}",
    ),
    "days of a spreadsheet": ("user,item,time", lambda u, i, t: f"{u},{i},{t / DAY + 25569:.6f}"),
    "decimal commas": (
        "user;item;rating;time",
        lambda u, i, t: f"{u};{i};4,5;{t / DAY + 25569:.6f}".replace(".", ","),
    ),
    "blanks behind commas": ("user, item, text, ts", lambda u, i, t: f"{u}, {i}, the film, {t}"),
    "words between tabs": ("user\titem\tts", lambda u, i, t: f"{u}\tThe red one, part {i}\t{t}"),
    "words between tabs, no header": ("", lambda u, i, t: f"{u}\t{i}\t4\t{t}"),
    "dates, no header": ("", lambda u, i, t: f"{u},{i},{stamp(t, '%Y-%m-%d %H:%M:%S')}"),
    "dates behind ratings, no header": (
        "",
        lambda u, i, t: f"{u};{i};4,5;{stamp(t, '%d.%m.%Y %H:%M:%S')}",
    ),
    "milliseconds, no header": ("", lambda u, i, t: f"{u},{i},{t}000"),
    "Amazon, no header": ("", lambda u, i, t: f"B{i:09},A{u:013},5.0,{t}"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_of_several_columns_the_right_ones_are_taken(name, tmp_path, capsys):
    header, row = COLUMNS[name]
    make(write(tmp_path, "log.csv", log(header, row)), tmp_path / "out")
    turn = "no header says so: --user=" + ("1 --item=2" if "Amazon" in name else "2 --item=1")
    assert (turn in capsys.readouterr().out) == (not header)
    is_late = "midnight" in name and "begin" in name
    assert taken(tmp_path / "out")[26 * is_late :] == EVENTS[26 * is_late :]


def test_ids_of_ten_digits_are_no_times(tmp_path):
    """Amazon's ratings have no header, and books their ISBN."""
    text = log("", lambda u, i, t: f"A{u},15011732{i:02},5.0,{t}")
    make(write(tmp_path, "ratings_Books.csv", text), tmp_path / "out")
    expected = [(u, 1_501_173_200 + i, t) for u, i, t in EVENTS]
    assert taken(tmp_path / "out") == expected


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_tables_of_other_forms_have_their_columns_looked_at_too(suffix, tmp_path, capsys):
    names = ("user_id", "visitor_id", "item", "date", "created_at")

    def row(u, i, t):
        return None, f"v{u}", f"i{i}", stamp(t, "%Y-%m-%d"), stamp(t, "%Y-%m-%d %H:%M:%S")

    lines = (json.dumps(dict(zip(names, row(*e), strict=True))) for e in EVENTS)
    content = parquet_log(names, row) if suffix == "parquet" else "\n".join(lines)
    make(write(tmp_path, f"log.{suffix}", content), tmp_path / "out")
    assert taken(tmp_path / "out") == EVENTS
    assert "not taken: user_id, date\n" in capsys.readouterr().out


def test_a_user_whose_first_rows_are_empty_is_taken(tmp_path):
    def row(u, i, t):
        return f"{u if t > EVENTS[30][2] else ''},v{u},{i},{t}"

    make(
        write(tmp_path, "log.csv", log("user_id,visitor_id,item,timestamp", row)), tmp_path / "out"
    )
    assert taken(tmp_path / "out") == EVENTS[31:]


@pytest.mark.parametrize("column", ["user", "item", "time"])
def test_a_column_without_any_value_is_named(column, tmp_path, capsys):
    text = log("user,item,time", lambda u, i, t: f"u{u},i{i},{t}")
    lines = [line.split(",") for line in text.splitlines()]
    for line in lines[1:]:
        line[lines[0].index(column)] = ""
    path = write(tmp_path, "log.csv", "\n".join(map(",".join, lines)))
    code, line = leaves("interactions", [path, f"--out={tmp_path / 'out'}"], capsys)
    assert code == 2 and f"without {column} 120" in line and "without" in line


def test_names_that_look_the_same_are_one_and_those_of_other_case_are_told(tmp_path, capsys):
    draw = random.Random(1)

    def seen(name):
        name = draw.choice(["{} ", "\u200b{}", "{}\u2060", "{}\u00ad"]).format(name)
        return unicodedata.normalize(draw.choice(["NFC", "NFD"]), name.replace(" ", "  ", 1))

    text = log("user,item,ts", lambda u, i, t: f"{seen(f'José {u}')},{seen(f'Café {i}')},{t}")
    text += "aB3,x,1700000000\nAb3,x,1700000000\n"
    line = make(write(tmp_path, "log.csv", text), tmp_path / "out")
    assert "11 users, 21 items" in line
    spelt = {
        kind: len({row.split(",")[column] for row in text.splitlines()[1:]})
        for column, kind in enumerate(("user", "item"))
    }
    output = capsys.readouterr().out
    for kind, number in (("user", 11), ("item", 21)):
        assert re.search(rf"{kind}s .*joined with it: {spelt[kind] - number} ", output)
    assert re.search("users .*look alike, such as aB3 and Ab3, stay apart: 2", output)


def test_numbers_that_a_spreadsheet_has_cut_are_told(tmp_path, capsys):
    text = log("steamid,appid,time", lambda u, i, t: f"7.{u}6561E+16,{i}E+05,{t / 1e9:.1f}E+09")
    make(write(tmp_path, "log.csv", text), tmp_path / "out")
    output = capsys.readouterr().out
    assert re.search(r"users that are numbers without .*, such as 7\..6561E\+16.*: 9\.", output)
    assert "items that are numbers" not in output  # 1E+05 may be a name
    assert "times: seconds since 1970, without their last digits" in output


@pytest.mark.parametrize("period", [1, 600, DAY])
def test_equal_times_are_counted(period, tmp_path, capsys):
    rows = [(u, i, t // period * period) for u, i, t in EVENTS]
    make(write(tmp_path, "log.csv", log("user,item,ts", "{},{},{}".format, rows)), tmp_path / "out")
    latest = collections.defaultdict(set)
    last = {u: max(t for user, _, t in rows if user == u) for u, _, _ in rows}
    for user, item, seconds in rows:
        if seconds == last[user]:
            latest[user].add(item)
    tied = sum(len(items) > 1 for items in latest.values())
    found = re.findall(r"latest time, .*: (\d+)", capsys.readouterr().out)
    assert found == ([str(tied)] if tied else [])
    assert (tied > 0) == (period > 1)


FOLDS = {
    "MovieLens": ("\t", "", [f"u{k}.{part}" for k in range(1, 6) for part in ("base", "test")]),
    "the same rows": (",", "user,item,x,ts", [f"fold{k}.csv" for k in range(5)]),
    "without times": (",", "user,item", [f"fold{k}.csv" for k in range(5)]),
}


@pytest.mark.parametrize("name", FOLDS)
def test_folds_are_one_log(name, tmp_path, capsys):
    delimiter, header, files = FOLDS[name]
    width = len(header.split(",")) if header else 4
    rows = [delimiter.join(map(str, (u, i, 4, t)[:width])) for u, i, t in EVENTS]
    for k, file in enumerate(files):
        part = {"base": [r for n, r in enumerate(rows) if n % 5 != k // 2]}
        part["test"] = [r for n, r in enumerate(rows) if n % 5 == k // 2]
        lines = part.get(file.partition(".")[2], rows)
        write(tmp_path, file, "\n".join([*filter(None, [header]), *lines]) + "\n")
    (dataset,) = recognise.dataset_formats(Folder.open(str(tmp_path)))
    assert dataset.num_files == len(files)
    make(dataset.arguments, tmp_path / "out")
    found = taken(tmp_path / "out")
    if width == 4:
        assert sorted(found) == sorted(EVENTS)
    else:  # in the order of each pair's last row
        pairs = [pair[:2] for pair in EVENTS]
        assert [row[:2] for row in found] == sorted(
            {*pairs}, key=lambda pair: len(pairs) - pairs[::-1].index(pair)
        )
    total = sum(len((tmp_path / file).read_text().splitlines()) - bool(header) for file in files)
    assert f"as folds do, left out: {total - len(found)}\n" in capsys.readouterr().out


def test_without_times_what_users_choose_again_has_its_last_place(tmp_path):
    halves = EVENTS[:60], EVENTS[60:]
    paths = [
        write(tmp_path, f"{k}.csv", log("user,item", lambda u, i, t: f"{u},{i}", half))
        for k, half in enumerate(halves)
    ]
    make(paths, tmp_path / "out")
    places = {(u, i): k for k, (u, i, _) in enumerate(EVENTS)}
    assert {row[:2]: row[2] for row in taken(tmp_path / "out")} == places


def history(form, i):
    items = [f"i{(i + k) % 20}" for k in range(1 + i % 5)]
    return form(items)


LISTS = {
    "blanks": ("h.csv", "user,item", lambda u, i, t: f"{u},{history(' '.join, i)}"),
    "an unknown name": (
        "h.csv",
        "user_id,history",
        lambda u, i, t: f'u{u},"{history(",".join, i)}"',
    ),
    "brackets": ("h.csv", "user,item", lambda u, i, t: f'{u},"{history(str, i)}"'),
    "JSON": (
        "h.json",
        "",
        lambda u, i, t: json.dumps({"user": u, "item": history(list, i), "time": t}),
    ),
    "MIND": (
        "behaviors.tsv",
        "",
        lambda u, i, t: (
            f"{t - 1_600_000_000}\tU{u}\t{stamp(t, '%m/%d/%Y %I:%M:%S %p')}\t"
            f"{history(' '.join, i)}\t{i}-1 {i + 1}-0"
        ),
    ),
    "lines": ("train.txt", "", lambda u, i, t: f"{u} {' '.join(map(str, range(1 + i)))}"),
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("is_folder", [False, True])
def test_lists_of_items_are_no_items(name, is_folder, tmp_path):
    file, header, row = LISTS[name]
    path = write(tmp_path, file, log(header, row))
    folder = Folder.open(str(tmp_path) if is_folder else path)
    with pytest.raises(UserError, match=f"{file}.*write a (row|line) for each"):
        recognise.dataset_formats(folder)


def test_titles_are_items_and_lists_beside_items_are_none(tmp_path):
    text = log("user,item", lambda u, i, t: f"{u},The {i * 'very '}big one {i}")
    make(write(tmp_path, "titles.csv", text), tmp_path / "titles")

    def row(u, i, t):
        return f"{u}\t{' '.join(map(str, range(1 + i % 4)))}\t{i}"

    header = "session_id:token\titem_id_list:token_seq\titem_id:token"
    make(write(tmp_path, "x.inter", log(header, row)), tmp_path / "out")
    assert [row[:2] for row in taken(tmp_path / "out")] == [row[:2] for row in EVENTS]


@pytest.mark.parametrize(
    ("name", "encoding"),
    [("José", "cp1252"), ("Анна", "cp1251"), ("王芳", "gbk"), ("花子", "shift-jis")],
)
@pytest.mark.parametrize("form", ["users", "header", "late", "JSON", "gzip"])
def test_other_encodings_are_refused_with_a_command_that_works(
    form, name, encoding, tmp_path, capsys
):
    def row(u, i, t):
        is_here = form != "late" or t == EVENTS[-1][2]
        if form == "JSON":
            return json.dumps({"user": f"{name} {u}", "item": i, "ts": t}, ensure_ascii=False)
        return f"{name if is_here else 'x'} {u},{i},{t}"

    header = (
        "" if form == "JSON" else f"user,item,ts,{name}" if form == "header" else "user,item,ts"
    )
    text = log(header, (lambda *e: f"{row(*e)},1") if form == "header" else row)
    text = text.replace(f"{name} ", "x ") if form == "header" else text
    line = {"users": 2, "header": 1, "late": 121, "JSON": 1, "gzip": 2}[form]
    data = text.encode(encoding)
    file = {"JSON": "log.jsonl", "gzip": "log.csv.gz"}.get(form, "log.csv")
    path = write(tmp_path, file, gzip.compress(data) if form == "gzip" else data)
    code, error = leaves("interactions", [path, f"--out={tmp_path / 'out'}"], capsys)
    assert code == 2 and f"{path}, line {line} is not UTF-8" in error
    command = error.partition("for CP1252: ")[2].replace("CP1252", encoding.upper())
    command = command.replace("NEW", f"{tmp_path}/new-{file.removesuffix('.gz')}")
    subprocess.run(command, shell=True, check=True)
    make(f"{tmp_path}/new-{file.removesuffix('.gz')}", tmp_path / "out")
    assert taken(tmp_path / "out") == EVENTS
    names = (tmp_path / "out" / "users.csv").read_text(encoding="utf-8")
    assert "\ufffd" not in names and (form == "header" or name in names)


def test_what_is_not_taken_may_have_any_encoding_and_movielens_lists_are_latin_1(tmp_path, capsys):
    text = log("", lambda u, i, t: f"{u}\t{i}\tgrößer\t{t}").encode("latin-1")
    path = write(tmp_path, "u.data", text)
    write(tmp_path, "u.item", "".join(f"{i}|Élysée {i}|x\n" for i in range(20)).encode("latin-1"))
    make(path, tmp_path / "out", "--user=1", "--item=2", "--time=4")
    assert taken(tmp_path / "out") == EVENTS
    assert "u.item is not UTF-8: read as Latin-1" in capsys.readouterr().out
    write(tmp_path, "u.item", "".join(f"{i}|Брат {i}|x\n" for i in range(20)).encode("cp1251"))
    code, line = leaves("interactions", [path, f"--out={tmp_path / 'o'}", "--item=2"], capsys)
    assert code == 2


FOLDERS = {
    "tags": ({"tags.csv": "userId,movieId,tag\n1,2,good\n"}, "not taken: tags.csv"),
    "damaged": ({"b.csv": ""}, r"not taken: \S*/b.csv is empty"),
    "days": ({f"{k:02}.csv": "user,item,ts\n1,2,5\n" for k in range(30)}, r"and 27 more: "),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_other_tables_in_a_folder_are_taken_or_named(name, tmp_path):
    others, words = FOLDERS[name]
    log_file = {"z.csv": log("user,item,ts", "{},{},{}".format)}
    (dataset,) = recognise.dataset_formats(place(tmp_path, others | log_file))
    assert re.search(words, dataset.evidence)


@pytest.mark.parametrize(
    ("files", "order"),
    [
        (["holdout.csv", "train.csv"], [1, 0]),
        (["Testing/a.csv", "Training/a.csv"], [1, 0]),
        (["latest.csv", "validated.csv"], [0, 1]),  # no words
        (["asyncio-dev.csv", "b.csv"], [0, 1]),  # one kind alone says nothing
    ],
)
def test_rows_for_evaluation_come_last(files, order, tmp_path):
    folder = place(tmp_path, dict.fromkeys(files, "user,item\n1,2\n"))
    (dataset,) = recognise.dataset_formats(folder)
    assert dataset.arguments == [str(tmp_path / files[i]) for i in order]


UNKNOWN = {
    "names": ("a.csv", "klant,artikel,prijs", lambda u, i, t: f"k{u},a{i},4.5", ["klant", 2]),
    "Gowalla": (
        "a.txt",
        "",
        lambda u, i, t: f"{u}\t{stamp(t, '%Y-%m-%dT%H:%M:%SZ')}\t30.23\t-97.79\t{i}",
        [1, 5, "--time=2"],
    ),
    "Yoochoose": (
        "clicks.dat",
        "",
        lambda u, i, t: f"{u},{stamp(t, '%Y-%m-%dT%H:%M:%S.000Z')},{i},0",
        [1, 3, "--time=2"],
    ),
    "Taobao": (
        "UserBehavior.csv",
        "",
        lambda u, i, t: f"{u},{i},2520377,pv,{t}",
        [1, 2, "--time=5"],
    ),
    "a time as item": ("a.csv", "", lambda u, i, t: f"{u},{t},{i}", [1, 3, "--time=2"]),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_the_advice_for_unknown_columns_works_and_is_given_for_a_folder_too(name, tmp_path):
    file, header, row, (user, item, *flags) = UNKNOWN[name]
    path = write(tmp_path, file, log(header, row))
    errors = []
    for given in (path, str(tmp_path)):
        with pytest.raises(UserError) as caught:
            recognise.dataset_formats(Folder.open(given))
        errors.append(str(caught.value))
    assert errors[0] == errors[1] and file in errors[0]
    command = errors[0].partition("python -m scripts.prepare ")[2].partition(";")[0]
    for word, value in (
        ("=COLUMN", f"={user}"),
        ("=COLUMN", f"={item}"),
        ("DIR", tmp_path / "out"),
    ):
        command = command.replace(word, str(value), 1)
    preparation, *argv = shlex.split(command)
    prepare.make(preparation, [*argv, *flags])
    assert taken(tmp_path / "out") == [
        (u, i, t if flags else k) for k, (u, i, t) in enumerate(EVENTS)
    ]


def test_photos_and_notes_are_no_tables(tmp_path):
    files = {f"{k}.jpg": b"\xff\xd8" for k in range(3)}
    files |= {
        "labels.csv": "photo,breed\na.jpg,cat\n",
        "readme.txt": "Some words\nand more, of them\n",
    }
    files |= {"classes.txt": "\ufeffcat\r\ndog\r\nbird\r\n"}
    assert recognise.dataset_formats(place(tmp_path, files)) == []
