"""Files of pairs in other forms than lines, cleaning, drawn evaluation, and what a folder holds."""

import gzip
import io
import itertools
import json
import zipfile

import pytest

from benchmarks.translation.preparation import pairs, recognise, text
from benchmarks.translation.preparation.text_formats import Corpus, Question
from common import cli, translator_files
from common.preparation.folders import Folder
from common.preparation.sources import SourceError
from scripts import archives, prepare
from tests.helpers.preparation import leaves

PAIRS = [("A dog runs.", "Ein Hund läuft."), ('He said "no".', "Er sagte „nein“."), ("Go.", "Geh.")]


def table(rows, tab="\t"):
    return "".join(tab.join(row) + "\n" for row in rows)


def tmx(pairs, languages=("en-US", "de-DE")):
    units = "".join(
        "<tu>"
        + "".join(
            f'<tuv xml:lang="{code}"><seg>{side}</seg></tuv>'
            for code, side in zip(languages, pair, strict=False)
        )
        + "</tu>"
        for pair in pairs
    )
    return f'<?xml version="1.0"?><tmx version="1.4"><header/><body>{units}</body></tmx>'


def xliff(pairs, version=1):
    """With units that are not translated at the end, which are left out."""
    new, states = (
        '<source>New</source><target state="{}">Neu</target>',
        ("needs-translation", "new"),
    )
    units = [f"<source>{a}</source><target>{b}</target>" for a, b in pairs]
    units += [new.format(state) for state in states] if version == 1 else []
    if version == 1:
        units = "".join(f"<group><trans-unit>{unit}</trans-unit></group>" for unit in units)
        file = f'<file source-language="en-US" target-language="de"><body>{units}</body></file>'
        return f'<xliff version="1.2" xmlns="urn:x">{file}</xliff>'
    units = "".join(f'<unit><segment state="final">{unit}</segment></unit>' for unit in units)
    return f'<xliff version="2.0" srcLang="en" trgLang="de"><file>{units}</file></xliff>'


QUOTED = [[f'"{side.replace(chr(34), chr(34) * 2)}"' for side in pair] for pair in PAIRS]
PO = r"""
# A comment
msgid ""
msgstr ""
"Language: de\n"
"Content-Type: text/plain; charset=UTF-8\n"

#: a.c:1
msgctxt "of an animal"
msgid "A dog "
"runs."
msgstr "Ein Hund läuft."
msgid "He said \"no\"."
msgstr "Er sagte „nein“."

#, fuzzy, c-format
#| msgid "old"
msgid "%d guess"
msgstr "%d Schätzung"

msgid "Go."
msgid_plural "Go all."
msgstr[0] "Geh."
msgstr[1] "Geht."

#~ msgid "gone"
#~ msgstr "weg"
"""
FORMS = {
    "header.tsv": table([("id", "de", "en"), *((str(i), b, a) for i, (a, b) in enumerate(PAIRS))]),
    "deu.txt": table((*pair, "CC-BY 2.0 (France) Attribution: tatoeba.org #1") for pair in PAIRS),
    "codes.tsv": table(("eng", "deu", *pair) for pair in PAIRS),
    "tatoeba.tsv": "\ufeff" + table((f"{i}", a, f"9{i}", b) for i, (a, b) in enumerate(PAIRS)),
    "roles.csv": table([("source", "target"), *QUOTED], ","),
    "german.csv": table([("Text (German)", "Text (English)"), *(q[::-1] for q in QUOTED)], ";"),
    "flat.jsonl": "".join(json.dumps({"id": 1, "de": b, "en": a}) + "\n" for a, b in PAIRS),
    "flores.jsonl": "".join(
        json.dumps({"id": 1, "sentence_eng_Latn": a, "sentence_deu_Latn": b}) + "\n"
        for a, b in PAIRS
    ),
    "nested.json": "".join(
        json.dumps({"translation": {"de": b, "en": a}}) + "\n" for a, b in PAIRS
    ),
    "langs.csv": table(
        [
            ("id", "source_lang", "target_lang", "source", "target"),
            *(("1", "en", "de", *pair) for pair in QUOTED),
        ],
        ",",
    ),
    "a.tmx": tmx([*PAIRS[:2], ("Go<ph>{1}</ph><hi>.</hi>", "Geh.")]),
    "a.xlf": xliff([("A <g><x/>dog</g> runs.", PAIRS[0][1]), *PAIRS[1:]]),
    "b.xliff": xliff(PAIRS, 2),
    "de.po": PO,
    "old/de.po": PO.replace("=UTF-8", "=ISO-8859-1"),
    "cp1252/de.po": PO.replace("=UTF-8", "=CP1252").encode("cp1252"),
}


MANY = [(f"The dog number {i} runs.", f"Der Hund Nummer {i} läuft.") for i in range(60)]
LINES = ["\n".join(side) + "\n" for side in zip(*MANY, strict=True)]


def write(folder, name, content):
    data = content.encode() if isinstance(content, str) else content
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return str(path)


def read(*flags):
    """What `prepare text` reads."""
    return pairs.TextInput(text.parse(cli.Parser(), [*flags, "--out=x"])).read()


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_pairs(tmp_path, name, end):
    corpus = Corpus.open(write(tmp_path, name + end, FORMS[name]))
    assert list(corpus.pairs()) == PAIRS
    if name in (
        "deu.txt",
        "codes.tsv",
        "tatoeba.tsv",
        "roles.csv",
        "langs.csv",
    ):  # no name is German
        with pytest.raises(Question, match="--columns"):
            Corpus.open(corpus.path, wanted=("de", ""))
        return
    turned = Corpus.open(corpus.path, wanted=("de", ""))
    assert list(turned.pairs()) == [pair[::-1] for pair in PAIRS]
    for wanted in (("", "fr"), ("de-AT", "")):
        with pytest.raises(Question, match=wanted[0] or wanted[1]):
            Corpus.open(corpus.path, wanted=wanted)


@pytest.mark.parametrize("columns", ["2,1", "de,en"])
def test_columns_are_chosen(tmp_path, columns):
    path = write(tmp_path, "a.tsv", table([("en", "de", "fr"), ("a b", "c d", "e f")]))
    assert list(Corpus.open(path, columns.split(",")).pairs()) == [("c d", "a b")]
    with pytest.raises(SourceError, match="--columns"):
        Corpus.open(path)
    assert list(Corpus.open(path, wanted=("fr", "de")).pairs()) == [("e f", "c d")]


def test_the_zip_of_opus_is_read_by_names(tmp_path):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as file:
        for name, lines in zip(("x.de-en.en", "x.de-en.de"), LINES, strict=True):
            file.writestr(name, lines)
        file.writestr("README", "x")
        file.writestr("x.de-en.xml", "<x/>")
    path = write(tmp_path, "de-en.txt.zip", data.getvalue())
    archives.unpack(path, f"{tmp_path}/raw")
    (dataset,) = recognise.dataset_formats(Folder.open(f"{tmp_path}/raw"))
    assert dataset.name == "text"
    pairs = read(*dataset.arguments)
    assert sorted([*pairs.eval, *pairs.train]) == sorted(MANY)


def test_cleaning_and_the_evaluation_that_is_drawn(tmp_path):
    pairs = [(f"sentence {i // 2}", f"Satz {i}") for i in range(1000)]
    weak = [("<title>A</title>", "<title>B</title>"), ("<url>x</url>",) * 2]
    weak += [("OK", "OK"), pairs[0], ("a long sentence " * 9, "kurz"), ("", "x")]
    names = [write(tmp_path, f"{k}.tsv", table([*pairs[k::2], *weak])) for k in range(2)]
    flags = [f"--train={','.join(names)}", "--columns=1,2"]
    train, evaluation, left_out = read(*flags, "--clean", "--max_ratio=9")
    assert left_out["train"] == {"empty": 2, "equal": 1, "repeated": 6, "ratio": 1, "tags": 2}
    assert sorted([*evaluation, *train]) == sorted(pairs)
    assert 98 <= len(evaluation) <= 100
    assert not {pair[0] for pair in evaluation} & {pair[0] for pair in train}
    assert read(*flags[::-1], "--clean", "--max_ratio=9") == (train, evaluation, left_out)
    train, evaluation, left_out = read(*flags)
    assert len(evaluation) + len(train) == len(pairs) + 10 and left_out["train"] == {"empty": 2}


def test_cleaning_leaves_out_other_placeholders(tmp_path):
    kept = [(f"%s of {i}", f"{i} von %s") for i in range(90)]
    kept += [("50% of all", "50 % von allen"), ("Q&A", "F&A"), ("{n} <b>x</b>", "<b>x</b> {n}")]
    lost = [("%d files", "Dateien"), ("<b>x</b>", "<b>x"), ("{n} on", "an {N}"), ("a", "&amp;")]
    flags = f"--train={write(tmp_path, 'a.tsv', table([*kept, *lost]))}", "--columns=1,2"
    pairs = read(*flags, "--clean")
    assert sorted([*pairs.train, *pairs.eval]) == sorted(kept)
    assert pairs.left_out["train"] == {"empty": 0, "placeholders": 4}
    assert len([*read(*flags).train, *read(*flags).eval]) == len(kept) + len(lost)


@pytest.mark.parametrize("name", ["train.tsv", "train.jsonl.gz", "train.de"])
def test_the_reading_of_a_folder_makes_records(tmp_path, capsys, name):
    """From the flags that it gives, with the warnings for weak data."""
    contents = {
        "train.tsv": table(MANY),
        "train.jsonl.gz": "".join(json.dumps({"en": a, "de": b}) + "\n" for a, b in MANY),
        "train.de": LINES[1],
    }
    write(tmp_path, f"in/{name}", contents[name])
    if name == "train.de":
        write(tmp_path, "in/train.en", LINES[0])
        for split in ("val", "test"):
            write(tmp_path, f"in/{split}.en", "THE DOG NUMBER 5 RUNS.\nA cat sits.\n")
            write(tmp_path, f"in/{split}.de", "Der Hund Nummer 5 läuft.\nEine Katze sitzt.\n")
    write(tmp_path, "in/README.txt", "Sentences.\n")
    (dataset,) = recognise.dataset_formats(Folder.open(f"{tmp_path}/in"))
    flags = ["--vocabulary_size=120", "--shards=1", "--workers=1", f"--out={tmp_path}/out"]
    prepare.make("text", [*dataset.arguments, *flags])
    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "out/manifest.json").read_text())
    pairs = [content["splits"][split]["pairs"] for split in ("train", "eval")]
    assert pairs == ([60, 2] if name == "train.de" else [48, 12])
    assert ("1 of 2 sentences to evaluate on are among" in printed) == (name == "train.de")
    assert f"warning: {pairs[0]} pairs" in printed
    if name != "train.tsv":  # whose columns have no names
        turned = read(*dataset.arguments, "--source_language=de").train
        assert turned[0][0].startswith("Der Hund")
    sentences = (tmp_path / "out/sources.txt").read_text().splitlines()
    assert {*sentences} <= {*LINES[0].splitlines(), "THE DOG NUMBER 5 RUNS.", "A cat sits."}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.tsv", table(MANY)),
        ("eng_-french.csv", table([("English words", "French words"), *MANY], ",")),
        (
            "a.jsonl",
            "".join(json.dumps({"translation": {"en": a, "de": b}}) + "\n" for a, b in MANY),
        ),
    ],
)
def test_what_is_taken_as_text_has_no_fault_of_another_form(tmp_path, capsys, name, content):
    write(tmp_path, name, content)
    (dataset,) = prepare.dataset_formats(Folder.open(str(tmp_path)))
    assert dataset.preparation == "text" and "not taken" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ratings.csv", "userId,movieId,rating\n1,31,2.5\n1,1029,3.0\n"),
        ("movies.csv", "movieId,title,genres\n1,Toy Story (1995),Adventure|Children\n"),
        ("books.csv", "Title,Author\nThe Castle,Franz Kafka\nThe Trial,Franz Kafka\n"),
        ("edges.tsv", "source\ttarget\nn1\tn2\n"),
        ("u.tsv", "196\t242\t3\t881250949\n"),
        ("photos.csv", "file,label\na.jpg,red car\n"),
        ("labels/1.txt", "0 0.5 0.5 0.1 0.1\n"),
        ("requirements.txt", "numpy==1.0\n"),
        ("instances.json", '{"images": [], "annotations": []}'),
        ("user.jsonl", '{"user_id": "anna", "item_id": "x.", "no": "1."}\n'),
        ("en/1.txt", "one text.\n"),
        ("odd.tsv", b"\xff\xfe\x00"),
        ("empty.txt", b""),
        ("header.tsv", "en\tde\n"),
    ],
)
def test_other_data_are_no_text(tmp_path, name, content):
    write(tmp_path, name, content)
    assert not recognise.dataset_formats(Folder.open(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.tsv", "a b.\tc d.\ne f.\n", "a.tsv, line 2 has no text for both column 1 and column 2"),
        ("a.tsv", "a b.\n", "a.tsv has column 1: a pair has two"),
        ("a.tsv", "en\tde\tfr\na\tb\tc\n", "a.tsv has en, de, fr: which two are the source"),
        ("a.csv", 'en,de\n"a b,c\n', "a.csv, line"),
        (
            "a.csv",
            "source,target,source_lang,target_lang\na,b,en,fr\na,c,en,de\n",
            "a.csv, line 3 is en to de, and rows before are en to fr",
        ),
        (
            "a.jsonl",
            '{"source": "a", "target": "b", "lang": "fr"}\n'
            '{"source": "a", "target": "c", "lang": "de"}\n',
            "a.jsonl, line 2 is de, and rows before are fr",
        ),
        ("a.tsv", b"en\tde\na\t\xe4\n", "a.tsv, line 2 is not UTF-8 (byte 0xe4"),
        ("a.jsonl", "[1]\n", "a.jsonl, line 1 is not a JSON object"),
        ("a.jsonl", '{"en": "a", "de": ""}\n{"de": 3}\n', "a.jsonl, line 2 has no text for both"),
        ("a.zip", b"PK\x03\x04", "a.zip is not a file of pairs (.tsv, "),
        ("a.tsv", None, "there is no"),
        ("", None, "is a folder: give its files"),
        ("a.tsv", "en\tde\na\tb\n", "1 training pairs are too few to take some"),
    ],
)
def test_a_fault_takes_one_line(tmp_path, capsys, name, content, words):
    path = write(tmp_path, name, content) if content else str(tmp_path / name)
    code, line = leaves("text", [f"--train={path}", f"--out={tmp_path}/out"], capsys)
    assert code in (1, 2) and words in line, line
    assert not (tmp_path / "out/manifest.json").exists()


HEADER = 'msgid ""\nmsgstr ""\n"Language: fr\\n"\n\n'
CHINESE = [(f"Software {i}.", f"软件{i}。", f"軟體{i}。") for i in range(9)]
VARIANTS = {
    "a.csv": table([("en", "zh-CN", "zh_TW"), *CHINESE], ","),
    "b.tmx": tmx(CHINESE, ("en", "zh-CN", "zh-TW")),
    "c.jsonl": "".join(
        json.dumps(dict(zip(("en", "zh_Hans", "zh-TW"), row, strict=True))) + "\n"
        for row in CHINESE
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_another_language(tmp_path, name):
    path = write(tmp_path, name, VARIANTS[name])
    (pair, *_) = Corpus.open(path, wanted=("", "zh-TW")).pairs()
    assert pair == ("Software 0.", "軟體0。")
    simplified = "zh-Hans" if name == "c.jsonl" else "zh_CN"
    (pair, *_) = Corpus.open(path, wanted=("zh-TW", simplified)).pairs()
    assert pair == ("軟體0。", "软件0。")
    for wanted in (("", ""), ("", "zh"), ("", "zh-HK"), ("fr", "zh-TW")):
        with pytest.raises(Question, match="en, zh"):
            Corpus.open(path, wanted=wanted)


def test_two_variants_are_a_pair(tmp_path):
    path = write(tmp_path, "b.tmx", tmx([("Ônibus.", "Autocarro.")], ("pt-BR", "pt-PT")))
    assert [*Corpus.open(path).pairs()] == [("Ônibus.", "Autocarro.")]


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ("en\thau", ("en", "hau")),
        ("fr\tghz", ("fr", "ghz")),  # a code that is known by the other only
        ("src\ttgt", ("src", "tgt")),
    ],
)
def test_a_header_is_never_a_pair(tmp_path, header, names):
    path = write(tmp_path, "a.tsv", f"{header}\n" + table(PAIRS))
    corpus = Corpus.open(path)
    assert [*corpus.pairs()] == PAIRS and corpus.names == names


def test_the_folder_names_the_languages_of_a_table(tmp_path):
    corpus = Corpus.open(write(tmp_path, "en-bbj/train.tsv", table(PAIRS)))
    assert [*corpus.pairs()] == PAIRS and corpus.names == ("en", "bbj")
    turned = Corpus.open(corpus.path, wanted=("bbj", ""))
    assert [*turned.pairs()] == [pair[::-1] for pair in PAIRS]
    with pytest.raises(Question):
        Corpus.open(corpus.path, wanted=("", "hau"))


STATES = {
    "a.po": HEADER + '#, fuzzy\n#~ msgid "old"\n#~ msgstr "x"\n\n'
    'msgid "Go now."\nmsgstr "Va."\n#, c-format, fuzzy\nmsgid "No."\nmsgstr "N."\n',
    "weblate.csv": "location,source,target,fuzzy\na,Go now.,Va.,False\nb,No.,N.,True\n",
    "b.csv": "en,fr,status\nGo now.,Va.,translated\nNo.,N.,needs-review\n",
    "c.jsonl": '{"en": "Go now.", "fr": "Va.", "approved": true}\n'
    '{"en": "No.", "fr": "N.", "approved": false}\n',
}


@pytest.mark.parametrize("name", STATES)
def test_what_is_not_final_is_left_out_and_counted(tmp_path, name):
    corpus = Corpus.open(write(tmp_path, name, STATES[name]))
    for _ in range(2):
        assert [*corpus.pairs()] == [("Go now.", "Va.")] and corpus.left_out == {"fuzzy": 1}
    pairs = read(f"--train={corpus.path}", f"--eval={corpus.path}")
    assert pairs.train == pairs.eval == [("Go now.", "Va.")]
    assert pairs.left_out["train"] == pairs.left_out["eval"] == {"empty": 0, "fuzzy": 1}


def test_a_half_translated_file_is_text(tmp_path):
    rows = [
        f'msgid "Sentence {i}."\nmsgstr "{"" if i < 90 else f"Phrase {i}."}"\n' for i in range(99)
    ]
    po = Corpus.open(write(tmp_path, "a.po", HEADER + "\n".join(rows)))
    assert po.has_sentences() and sum(all(pair) for pair in po.pairs()) == 9
    none = Corpus.open(write(tmp_path, "b.po", HEADER + "\n".join(rows[:9])))
    assert not none.has_sentences()


def test_odd_files_of_gettext(tmp_path):
    """CRLF, escapes, plurals, U+2028; unfinished strings and lost translations are refused."""
    text = HEADER + 'msgid "A \\"dog\\"\\n"\n"runs."\nmsgstr "Un\\tchien."\n'
    text += 'msgid "One"\nmsgid_plural "Many"\nmsgstr[0] "Un\u2028"\nmsgstr[1] "Des"\n'
    corpus = Corpus.open(write(tmp_path, "a.po", text.replace("\n", "\r\n")))
    assert [*corpus.pairs()] == [('A "dog" runs.', "Un\tchien."), ("One", "Un\u2028")]
    for wrong in ('msgid "Go.', "<<<<<<< HEAD", "domain x", 'msgstr "lost"'):
        with pytest.raises(SourceError, match=r"b\.po, line 5 "):
            Corpus.open(write(tmp_path, "b.po", f'{HEADER}{wrong}\nmsgstr "Va."\n'))


def test_large_and_deep_files_take_linear_time(tmp_path):
    """In quadratic time each of them would take minutes."""
    comments = "# x\n" * 200_000 + '#~ msgid "x"\n#~ msgstr "y"\n' * 20_000
    path = write(tmp_path, "a.po", f'{HEADER}{comments}msgid "Go."\nmsgstr "Va."\n')
    assert [*Corpus.open(path).pairs()] == [("Go.", "Va.")]
    strings = '"abcdefgh"\n' * 100_000
    ((_, target),) = Corpus.open(
        write(tmp_path, "b.po", f'{HEADER}msgid "Go."\nmsgstr ""\n{strings}')
    ).pairs()
    assert target == "abcdefgh" * 100_000
    deep = "<hi>" * 200 + "a<ph>no<sub>n</sub></ph>b" + "</hi>" * 200
    assert [*Corpus.open(write(tmp_path, "c.tmx", tmx([(deep, "x")]))).pairs()] == [("ab", "x")]


SECRET = '<!DOCTYPE tmx [<!ENTITY x SYSTEM "{}/secret">]>'
LAUGHS = "".join(f'<!ENTITY x{i} "{f"&x{i + 1};" * 10}">' for i in range(12))


@pytest.mark.parametrize("end", [".tmx", ".xlf.gz"])
@pytest.mark.parametrize(
    ("head", "text"),
    [
        (f'<!DOCTYPE tmx [{LAUGHS}<!ENTITY x12 "ha">]>', "&x0;"),
        (SECRET, "&x;"),
        (SECRET.replace("ENTITY x", "ENTITY % x").replace("]", "%x;]"), "&x;"),
        ("", "<hi>" * 10_000 + "</hi>" * 10_000),
        ("", "a " * 6_000_000),
        ("", "<seg/>" * 3_000_000),
        ("", "<g>"),
    ],
    ids=["laughs", "file", "parameter", "deep", "long", "many", "damaged"],
)
def test_xml_that_would_fill_the_memory_is_refused(tmp_path, end, head, text):
    write(tmp_path, "secret", "secret")
    form = xliff if ".xlf" in end else tmx
    content = form([(text, "b")]).removeprefix('<?xml version="1.0"?>')
    with pytest.raises(SourceError, match=rf"a\{end} ") as caught:
        Corpus.open(write(tmp_path, f"a{end}", head.replace("{}", str(tmp_path)) + content))
    assert "secret" not in str(caught.value).partition(end)[2]


def test_large_xml_is_streamed():
    """Only what is read at once stays in the memory, 32 KB."""
    file = io.BytesIO(xliff(PAIRS * 2000).encode())
    units = translator_files.elements(file, ("trans-unit",), "a", SourceError)
    sizes = [len([*unit.getroottree().iter()]) for unit in itertools.islice(units, 0, None, 100)]
    assert len(sizes) == 61 and max(sizes) < 2000


def test_utf_16_is_read(tmp_path):
    """Excel's "Unicode text"."""
    corpus = Corpus.open(write(tmp_path, "a.txt", ("en\tde\n" + table(PAIRS)).encode("utf-16")))
    assert [*corpus.pairs()] == PAIRS
