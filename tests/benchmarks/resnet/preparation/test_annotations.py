"""`prepare imagenet --labels=FILE`: own photos whose classes stand in a table."""

import collections
import json

import pytest

from common.data import records
from common.errors import UserError
from scripts import prepare
from tests.benchmarks.resnet.preparation.test_imagenet import pictures, rows
from tests.benchmarks.resnet.preparation.test_photos import parse_own
from tests.helpers.preparation import place

NAMES = [f"{folder}/{i}.JPG" for folder in ("one", "two") for i in range(10)]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    place(folder, pictures(NAMES))
    return folder


def make(images, folder, text, *more):
    """(the names and classes of the training and of the validation images) of a table's text."""
    (folder / "list.csv").write_text(text)
    flags = ["--layout=folder", f"--train={images}", f"--labels={folder}/list.csv", *more]
    prepare.make("imagenet", [*flags, f"--out={folder}/out"])
    return [
        {
            name.decode(): row["image/class/text"].decode()
            for name, row in rows(folder / "out", split, parse_own).items()
        }
        for split in records.SPLITS
    ]


def own_class(name):
    """Another class than the folder's."""
    return str(int(name[4]) % 3)


# Files as tables call them; only folder 'one', whose photos have other names in `parse_own`.
ONE = [name for name in NAMES if name.startswith("one")]
FORMS = {
    "paths": lambda name: name,
    "Windows, another machine": lambda name: "C:\\Users\\me\\" + name.replace("/", "\\"),
    "Linux, another machine, without endings": lambda name: f"/home/me/{name[:-4].lower()}",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("header", ["Image_ID;Label\n", "exported today\nid;x\n", ""])
def test_the_class_is_in_the_table(form, header, images, tmp_path, capsys):
    text = header + "".join(f"{FORMS[form](name)};{own_class(name)}\n" for name in ONE)
    train, rest = make(images, tmp_path, text, "--validation_fraction=0.3")
    assert {**train, **rest} == {name[4:]: own_class(name) for name in ONE}
    assert collections.Counter(rest.values()) == {"0": 1, "1": 1, "2": 1}
    (line,) = [row for row in capsys.readouterr().out.splitlines() if "left out" in row]
    assert line.startswith("warning: ") and "(10): two/0.JPG" in line


SPLITS = {
    "train val test": (8, 1),
    "train test": (8, 2),
    "unknown": (9, 1),  # then it is no split
}


@pytest.mark.parametrize("kind", SPLITS)
def test_a_column_of_splits_counts(kind, images, tmp_path):
    first, *others = kind.split()
    splits = [first] * 8 + [*others * 2, first, first][:2]
    lines = [f"{name},{own_class(name)},{split}" for name, split in zip(ONE, splits, strict=True)]
    text = "\n".join(["file,class,split", *lines])
    train, rest = make(images / "one", tmp_path, text)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["left_out"] == []
    if kind == "unknown":
        assert len(train) + len(rest) == 10 and len(rest) == 3
    else:
        assert (len(train), len(rest)) == SPLITS[kind] and "8.JPG" in rest
    with pytest.raises(UserError, match="changed: .*label_column"):
        make(images / "one", tmp_path, text, "--validation_fraction=0.1")


COLUMNS = {  # of ten photos: the column's name, its cells, and the photos for validation
    "is_valid": (["True"] * 3 + ["False"] * 7, range(3)),
    "is_train": ("0111111111", range(1)),
    "Is Test": ("0000000011", range(8, 10)),
    "set": (["Training"] * 6 + ["Testing"] * 4, range(6, 10)),
    "subset": (["trainset"] * 9 + ["eval"], range(9, 10)),
    "Usage": (["Training"] * 7 + ["PublicTest"] + ["PrivateTest"] * 2, range(7, 10)),
    "fold": ("0123401234", (0, 5)),
    "kfold": ("1212121212", range(0, 10, 2)),
    "partition": ("0000000012", None),
    "data_split": ("1111111122", None),
    "split": (["train", "", "val", "train", "train"] * 2, None),
    "is_valid,is_test": (["1,0", "0,1", "0,0", "0,0", "0,0"] * 2, None),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_that_say_splits(name, images, tmp_path):
    """Numbers other than those of folds are a question, whose two answers work."""
    cells, held = COLUMNS[name]
    lines = [f"{file},{own_class(file)},{x}" for file, x in zip(ONE, cells, strict=True)]
    text = "\n".join([f"file,class,{name}", *lines])
    if held is not None:
        _, rest = make(images / "one", tmp_path, text)
        assert sorted(rest) == [f"{i}.JPG" for i in held]
        return
    with pytest.raises(UserError, match="column.*: write .*validation_fraction=0.1"):
        make(images / "one", tmp_path, text)
    train, rest = make(images / "one", tmp_path, text, "--validation_fraction=0.1")
    assert len(train) + len(rest) == 10


def test_names_that_differ_in_case_only_are_told(images, tmp_path, capsys):
    lines = [f"{file},{'cat' if i % 2 else 'Cat'}" for i, file in enumerate(ONE)]
    train, rest = make(images / "one", tmp_path, "\n".join(["file,class", *lines]))
    assert {*train.values(), *rest.values()} == {"Cat", "cat"}
    assert "warning: 'Cat' and 'cat' become different classes" in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "cp1251"])
def test_encodings(encoding, images, tmp_path):
    text = "file,class\n" + "".join(f"{file},{'кот' if '1' in file else 'пёс'}\n" for file in ONE)
    (tmp_path / "t.csv").write_bytes(text.encode(encoding))
    flags = ["--layout=folder", f"--train={images}/one", f"--labels={tmp_path}/t.csv"]
    if encoding == "cp1251":
        with pytest.raises(UserError, match="t.csv, line 2 is not UTF-8"):
            prepare.make("imagenet", [*flags, f"--out={tmp_path}/out"])
        return
    prepare.make("imagenet", [*flags, f"--out={tmp_path}/out"])
    names = json.loads((tmp_path / "out" / "manifest.json").read_text())["classes"]
    assert [row["name"] for row in names] == ["кот", "пёс"]


def test_what_is_missing_is_counted_and_chosen_columns_count(images, tmp_path, capsys):
    lines = [f"{name},{own_class(name)},{name[4:6]},z" for name in ONE[:8]]
    text = "\n".join(["a,b,c,d", *lines, "gone.jpg,1,1,1", "one/8.JPG,,,", "one/9.JPG"])
    train, rest = make(images, tmp_path, text, "--file_column=a", "--label_column=b")
    assert len(train) + len(rest) == 8
    output = capsys.readouterr().out
    assert "that are not photos in" in output and "(1): gone.jpg" in output
    assert "left out (12): one/8.JPG, one/9.JPG" in output
    assert "warning: 3 classes have fewer than 20 training photos: 0 (2), 1 (2), 2 (1)\n" in output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x,label\none/1.JPG,a\nONE\\1.jpg,b\n", "line 3: .*'b', but in .*, line 2 'a'"),
        ("x,label\n1,a\n", "line 2: 1 is one/1.JPG or two/1.JPG"),
        ("x,label\ngone,a\n", "give --file_column and --label_column, of x, label"),
        ("x,a,b\none/1.JPG,1,1\none/2.JPG,2,2\n", "is not clear"),
        ("a single column\n", "is not a table"),
        ("", "is not a table"),
        ('x,label\n"one/1.JPG,' + 200_000 * "a", "line [123] is not a row"),
    ],
)
def test_a_mistake_takes_one_line(text, words, images, tmp_path):
    with pytest.raises(UserError, match=f"list.csv.*{words}"):
        make(images, tmp_path, text)
    with pytest.raises(UserError, match="no column 'z'; give one of x"):
        make(images, tmp_path, "x,label\none/1.JPG,a\n", "--label_column=z")
    assert not list(tmp_path.glob("out/*-of-*"))


def test_a_table_belongs_to_own_photos(capsys):
    for flags in (["--validation=v", "--layout=folder"], ["--validation=v"]):
        with pytest.raises(SystemExit):
            prepare.parse("imagenet", ["--train=t", "--out=o", "--labels=l", *flags])
        assert "--labels is for --layout=folder" in capsys.readouterr().err
