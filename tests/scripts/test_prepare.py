"""`python -m scripts.prepare`: its list of preparations, and what it does with a path."""

import io
import json
import re
import shlex
import shutil
import types

import pytest
from PIL import Image

from benchmarks.ncf.preparation import interactions, recognise
from common.data import storage
from common.preparation import folders
from scripts import prepare, public_sets
from tests.helpers.preparation import place
from tests.test_main import ROOT


@pytest.mark.parametrize("name", prepare.PREPARATIONS)
def test_each_preparation_has_its_help(name, capsys):
    with pytest.raises(SystemExit) as leaving:
        prepare.parse(name, ["--help"])
    printed = capsys.readouterr().out
    assert leaving.value.code == 0 and "--out OUT" in printed
    assert printed.startswith(f"usage: python -m scripts.prepare {name} [-h] ")


@pytest.mark.parametrize(("argv", "code"), [([], 2), (["--help"], 0), (["-h"], 0)])
def test_the_list_of_preparations(argv, code, capsys):
    with pytest.raises(SystemExit) as leaving:
        prepare.main(argv)
    lines = capsys.readouterr().out.splitlines()
    assert leaving.value.code == code and lines[0].startswith("usage: python -m scripts.prepare ")
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [*prepare.PREPARATIONS]


@pytest.mark.parametrize(
    ("argv", "names"),
    [(["movies", "--out=x"], prepare.PREPARATIONS), (["download", "wmt"], public_sets.SETS)],
)
def test_an_unknown_name_takes_one_line(argv, names, capsys):
    with pytest.raises(SystemExit) as leaving:
        prepare.main(argv)
    (line,) = capsys.readouterr().err.splitlines()
    assert leaving.value.code == 2 and all(name in line for name in names)


def test_an_interruption_has_its_exit_code(monkeypatch, capsys):
    def stop(name, argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "make", stop)
    with pytest.raises(SystemExit) as leaving:
        prepare.main(["digits"])
    assert leaving.value.code == 130
    assert capsys.readouterr().err == "prepare digits: stopped; the same command continues\n"


def test_a_public_set_is_prepared_as_a_path(monkeypatch, tmp_path, capsys):
    """With the flags of the set, then those that were typed."""
    for language, text in (("de", "Ein Hund.\n" * 20), ("en", "A dog.\n" * 20)):
        (tmp_path / f"train.{language}").write_text(text)
    monkeypatch.setattr(public_sets, "get", lambda name: str(tmp_path))
    prepare.main(["download", "multi30k", "--dry_run", f"--out={tmp_path}/../out", "--seed=7"])
    (line,) = re.findall("^with: (.*)", capsys.readouterr().out, re.MULTILINE)
    assert "--source_language=de --seed=7 " in line and f"--train_source={tmp_path}/train." in line


def test_the_pages_name_commands_of_today():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    names = set(re.findall(r"scripts\.prepare (\w+)\b(?![/.])", text))
    assert names - {"NAME", "PATH", "DIR", "download"} <= prepare.PREPARATIONS.keys()


# --- A path. The two preparations here read files by their endings only.


class Stub(types.SimpleNamespace):
    """A preparation of the files with a suffix, which writes its arguments as its records."""

    def dataset_formats(self, folder):
        names = folder.named(self.suffix)
        flags = [f"--train={folder.path}"]
        row = self.name, self.form, f"files of {self.suffix}", "records", flags, len(names)
        return [folders.DatasetFormat(*row)] if names else []

    def class_folders(self, folder):
        return ""

    def parse(self, parser, argv):
        for flag in ("--train", "--seed", "--out"):
            parser.add_argument(flag)
        return parser.parse_args(argv)

    def prepare(self, args):
        storage.write(f"{args.out}/train-00000-of-00001", [json.dumps(vars(args)).encode()])
        manifest = {"splits": {"train": {"examples": 19_999}}}
        storage.write(f"{args.out}/manifest.json", [json.dumps(manifest).encode()])
        return (
            f"1 image is in {args.out}; train on them: python main.py --config.data_dir={args.out}"
        )


@pytest.fixture
def data(tmp_path, monkeypatch):
    """The current folder, with the input "my photos"; imagenet takes .png, coco .json."""
    stubs = {
        "imagenet": Stub(name="imagenet", form="photos", suffix=".png"),
        "coco": Stub(name="coco", form="yolo", suffix=".json"),
        "interactions": interactions,
    }
    none = Stub(name="text", form="text", suffix=".none")
    recognisers = [*stubs.values()][:2] + [none, recognise]
    families = dict(zip(prepare._FAMILIES, recognisers, strict=True))
    monkeypatch.setattr(
        prepare,
        "_module",
        lambda package, name: families[package] if name == "recognise" else stubs[name],
    )
    monkeypatch.chdir(tmp_path)
    for i in range(30):
        storage.write(f"my photos/set/{i % 2}/{i}.png", [b"x"])
    storage.write("my photos/README", [b"x"])
    return tmp_path


def typed(capsys, *argv):
    """(exit code, lines on stdout, lines on stderr) of a command."""
    try:
        prepare.main(argv)
        code = 0
    except SystemExit as leaving:
        code = leaving.code
    printed = capsys.readouterr()
    return code, printed.out.splitlines(), printed.err.splitlines()


def test_a_path_is_prepared_and_its_command_printed(data, capsys):
    code, lines, _ = typed(capsys, "my photos/", "--seed=3", "--untimed")
    assert code == 0 and lines[1] == "found: files of .png"
    command = "python main.py --config.data_dir=data/my-photos"
    assert lines[-4] == (
        "what it costs on a slice: add --mode=preflight --tpu=v5e-8 to the last line"
    )
    assert "--mode=scaling" in lines[-3] and lines[-2:] == ["train on them:", command]
    records = data / "data" / "my-photos" / "train-00000-of-00001"
    arguments = {"train": "my photos/set", "seed": "3", "out": "data/my-photos"}
    assert json.loads(records.read_text()) == arguments
    (line,) = (line for line in lines if line.startswith("with: "))
    assert shlex.split(line)[4:] == ["imagenet"] + [f"--{k}={v}" for k, v in arguments.items()]
    code, lines, _ = typed(capsys, "data/my-photos")
    assert code == 0 and lines[-1].endswith(f"are ready; train on them: {command}")
    (records.parent / "manifest.json").unlink()  # made-up ratings have none
    assert typed(capsys, "data/my-photos")[0:2] == (0, lines)
    storage.write(f"{records.parent}/prepare_state/plan.json", [b"{}"])
    code, _, (line,) = typed(capsys, "data/my-photos")
    assert code == 1 and "unfinished records" in line


@pytest.mark.parametrize("archived", [False, True])
def test_a_dry_run_writes_nothing(archived, data, capsys):
    if archived:
        shutil.make_archive("photos", "zip", "my photos")
    before = sorted(data.rglob("*"))
    path = "photos.zip" if archived else "my photos"
    code, lines, _ = typed(capsys, path, "--dry_run", "--out=elsewhere")
    folder = "data/raw/photos/set" if archived else "my photos/set"
    command = shlex.join(["imagenet", f"--train={folder}", "--out=elsewhere"])
    assert (code, lines[-1]) == (0, f"with: python -m scripts.prepare {command}")
    assert sorted(data.rglob("*")) == before


def test_a_dry_run_cannot_tell_from_names_alone(data, capsys):
    shutil.make_archive("notes", "zip", "my photos", "README")
    code, lines, _ = typed(capsys, "notes.zip", "--dry_run")
    assert code == 0 and "1 nameless" in lines[-1] and not (data / "data").exists()


def test_an_archive_is_unpacked(data, capsys):
    shutil.make_archive("photos.v1", "gztar", "my photos")
    code, _, _ = typed(capsys, "photos.v1.tar.gz", "--untimed")
    records = data / "data" / "photos.v1" / "train-00000-of-00001"
    assert (code, json.loads(records.read_text())["train"]) == (0, "data/raw/photos.v1/set")


def test_a_path_on_gs(data, gcs, capsys):
    root = gcs.bucket()
    for name in ("photos/a/1.png", "photos/b/1.png", "set.zip"):
        storage.write(f"{root}/{name}", [b"x"])
    code, lines, _ = typed(capsys, f"{root}/photos/", f"--out={root}/out", "--untimed")
    assert (code, lines[-1]) == (0, f"python main.py --config.data_dir={root}/out")
    assert (
        json.loads(storage.read(f"{root}/out/train-00000-of-00001") or "")["train"]
        == f"{root}/photos"
    )
    code, _, (line,) = typed(capsys, f"{root}/set.zip")
    assert code == 2 and "set.zip is an archive that must be unpacked: copy it here" in line
    code, _, (line,) = typed(capsys, f"{root}/photos", f"--out={root}/photos/a")
    assert code == 2 and "is inside of" in line


@pytest.mark.parametrize(
    ("labels", "form", "name"),
    [(1, "", "imagenet"), (9, "yolo", "coco"), (9, "photos", "imagenet"), (9, "", None)],
)
def test_two_formats(labels, form, name, data, capsys):
    for i in range(labels):
        storage.write(f"my photos/set/{i}.json", [b"{}"])
    flags = [f"--as={form}"] if form else []
    code, lines, errors = typed(capsys, "my photos", "--dry_run", *flags)
    if name:
        assert code == 0 and f"scripts.prepare {name} " in lines[-1]
    else:
        assert code == 2 and errors[-1].index("--as=photos") < errors[-1].index("--as=yolo")


def test_photos_in_a_folder_of_data(data, capsys):
    shutil.move("my photos", "data/photos")
    _, lines, _ = typed(capsys, "data/photos", "--dry_run")
    assert lines[-1].endswith("--out=data/photos_records")


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["absent.tsv"], "there is no 'absent.tsv'"),
        (["empty"], "empty holds no files"),
        (["my photos", "--out=my photos/set/x"], "--out=my photos/set/x is inside of my photos"),
        (["."], "--out=data/"),
        (["notes"], "notes holds 2 .doc, 1 nameless, but none of"),
        (["flat"], "flat holds 2 .jpg, but neither labels nor class folders"),
        (["notes/a.DOC"], "notes/a.DOC holds 1 .doc, but none of"),
        (["my photos", "--as=voc"], "--as=voc: there is nothing of this form"),
        (["my photos", "notes"], "notes is a second one"),
        (["my photos", "--nonsense=1"], "prepare imagenet: unrecognized arguments: --nonsense=1"),
        (
            ["nested"],
            "another archive, which is not opened: type python -m scripts.prepare nested/a/b.zip",
        ),
        (["nested/a/b.zip"], "b.zip is damaged"),
        (["title.csv"], "title.csv, line 1 has 1 columns, and others 2: remove"),
        (
            ["plain.csv"],
            "interactions ./plain.csv --user=COLUMN --item=COLUMN --out=DIR; if sentences",
        ),
        (["langs.csv"], "text --train=./langs.csv --columns=3,4 --out=DIR"),
    ],
)
def test_refusals(argv, part, data, capsys):
    (data / "empty").mkdir()
    for name in ("notes/a.DOC", "notes/b.doc", "notes/c"):
        storage.write(name, [b"x"])
    for name in ("nested/a/b.zip", "flat/a.jpg", "flat/b.JPG"):
        storage.write(name, [b"x"])
    storage.write("title.csv", [b"our shop\nuser,item\n" + b"1,2\n" * 9])
    storage.write("plain.csv", [b"a,b\n" + b"x,y\n" * 9])
    storage.write("langs.csv", [b"id,of,left,right\n" + b"1,en,a long text,another text\n" * 9])
    before = sorted(data.rglob("*"))
    code, _, (line,) = typed(capsys, *argv)
    assert code == 2 and line.startswith("prepare") and part in line
    assert sorted(data.rglob("*")) == before


# --- Real files of each kind.


def jpeg(shade):
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (shade, 0, 0)).save(file, "JPEG")
    return file.getvalue()


KINDS = {  # files, and how many of what they have to train on
    "photos": ({f"{'ab'[i % 2]}/{i}.jpg": jpeg(9 * i) for i in range(20)}, "examples"),
    "boxes": (
        {f"images/{'val' if i < 4 else 'train'}/{i}.jpg": jpeg(9 * i) for i in range(20)}
        | {f"labels/{'val' if i < 4 else 'train'}/{i}.txt": "0 .5 .5 .2 .4\n" for i in range(20)}
        | {"data.yaml": "names: ['cat']\n"},
        "examples",
    ),
    "pairs": (
        {
            f"{split}.{language}": "".join(f"{word} {i} {split}\n" for i in range(count))
            for split, count in (("train", 40), ("val", 10))
            for language, word in (("de", "Hunde"), ("en", "dogs"))
        },
        "pairs",
    ),
    "ratings": (
        {
            "log.csv": "user,item,time\n"
            + "".join(f"{u},{(u + i) % 12},{i}\n" for u in range(12) for i in range(6))
        },
        "ratings",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_set_is_told_how_to_ask_for_more(kind, tmp_path, monkeypatch, capsys):
    """The limit is set to as many as the result's line says, then to one more."""
    files, unit = KINDS[kind]
    place(tmp_path / "data", files)
    out = tmp_path / "out"
    printed = [typed(capsys, f"{tmp_path}/data", f"--out={out}", "--untimed")]
    (number,) = (line.split()[0] for line in printed[0][1] if f" in {out} (" in line)
    for limit in (int(number), int(number) + 1):
        monkeypatch.setitem(prepare._LARGE, unit, limit)
        printed.append(typed(capsys, f"{tmp_path}/data", f"--out={out}", "--untimed"))
    asks = [["--mode=scaling" in line for line in lines[-4:]] for _, lines, _ in printed]
    assert [code for code, _, _ in printed] == [0, 0, 0]
    assert asks == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]]
    assert all(lines[-1].startswith("python main.py ") for _, lines, _ in printed)
