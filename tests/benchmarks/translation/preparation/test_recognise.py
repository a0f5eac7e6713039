"""Which files of a folder are parallel text, in which languages, and for which split."""

import dataclasses

import pytest

from benchmarks.translation.preparation import recognise
from benchmarks.translation.preparation.text_formats import Question
from common.preparation.folders import Folder
from common.preparation.sources import SourceError
from tests.helpers.preparation import place


def lines(part, language, count=40):
    text = (f"Sentence {i} of {part} in {language}, it is long." for i in range(count))
    return "\n".join(text) + "\n"


def sides(*stems, languages=("en", "de")):
    return {f"{stem}.{code}": lines(stem, code) for stem in stems for code in languages}


def pages(*names, language="fr"):
    header = f'msgid ""\nmsgstr ""\n"Language: {language}\\n"\n'
    return {
        f"{name}.po": header
        + "".join(
            f'\nmsgid "Sentence {i} of {name}."\nmsgstr "Phrase {i} ({language})."\n'
            for i in range(30)
        )
        for name in names
    }


def tables(*pairs, header=True):
    files = {}
    for first, second in pairs:
        for split in ("train", "dev"):
            rows = [f"The {split} sentence {i}.\tA {second} text {i}." for i in range(30)]
            rows = [f"{first}\t{second}", *rows] if header else rows
            files[f"{first}-{second}/{split}.tsv"] = "\n".join(rows) + "\n"
    return files


def recognised(tmp_path, files, *flags):
    folder = place(tmp_path, files)
    return recognise.dataset_formats(dataclasses.replace(folder, flags=flags))


def chosen(tmp_path, files, *flags):
    """The files to train and to evaluate on, and the format."""
    (dataset,) = recognised(tmp_path, files, *flags)
    values = [flag.partition("=") for flag in dataset.arguments]
    parts = {"train": [], "eval": []}
    for name, _, value in values:
        if name[2:].partition("_")[0] in parts:
            paths = [path.removeprefix(f"{tmp_path}/") for path in value.split(",")]
            parts[name[2:].partition("_")[0]] += paths
    return parts["train"], parts["eval"], dataset


@pytest.mark.parametrize(
    ("stems", "train", "evaluation"),
    [
        ("europarl test", "europarl", "test"),
        ("c-v7 newstest2014", "c-v7", "newstest2014"),
        ("news newstest2014-ref", "news", "newstest2014-ref"),
        ("Training/x Testing/x", "Training/x", "Testing/x"),
        ("a/b dev/b", "a/b", "dev/b"),
        ("x.train x.heldout", "x.train", "x.heldout"),
        ("train valid test", "train", "valid"),
        ("asyncio-dev intro", "asyncio-dev intro", ""),
    ],
)
def test_names_of_lines_say_what_is_for_evaluation(tmp_path, stems, train, evaluation):
    def names(words):
        return [f"{word}.{code}" for code in ("en", "de") for word in words.split()]

    assert chosen(tmp_path, sides(*stems.split()))[:2] == (names(train), names(evaluation))


def test_a_page_about_tests_is_no_evaluation(tmp_path):
    """Nothing is named for training, so that dev and test are subjects of a documentation."""
    files = pages("about", "library/asyncio-dev", "library/test")
    assert chosen(tmp_path / "a", files)[:2] == (sorted(files), [])
    files = pages("train/about", "test/about")
    assert chosen(tmp_path / "b", files)[:2] == (["train/about.po"], ["test/about.po"])


def test_text_for_evaluation_is_never_trained_on(tmp_path):
    with pytest.raises(SourceError, match=r"dev\.en: to train on it, name its files, see .*text"):
        recognised(tmp_path, sides("dev", "newstest2014"))
    path = tmp_path / "test.tsv"  # the user names it
    path.write_text("".join(f"A dog {i}.\tEin Hund {i}.\n" for i in range(30)), "utf-8")
    (dataset,) = recognise.dataset_formats(Folder.open(str(path)))
    assert dataset.arguments[0] == f"--train={path}"


def test_columns_are_asked_for(tmp_path):
    rows = [f"The text {i}.\tDer Text {i}.\tLe texte {i}." for i in range(9)]
    files = {"a.tsv": "\n".join(["en\tde\tfr", *rows])}
    with pytest.raises(Question, match=r"a\.tsv has en, de, fr: .* --columns=A,B"):
        recognised(tmp_path, files)
    (dataset,) = recognised(tmp_path, files, "--columns=de,fr")
    assert "de to fr" in dataset.output


THREE = sides("train", "val", languages=("en", "de", "fr"))


def test_the_languages_asked_for_are_taken_or_refused(tmp_path):
    train, evaluation, dataset = chosen(tmp_path, THREE, "--target_language=fr")
    assert (train, evaluation) == (["train.en", "train.fr"], ["val.en", "val.fr"])
    assert "2 not used: train.de, val.de" in dataset.output
    flags = "--source_language", "fra", "--target_language", "German"
    assert chosen(tmp_path, THREE, *flags)[0] == ["train.fr", "train.de"]
    for flags in (
        (),
        ("--target_language=es",),
        ("--source_language=fr",),
        ("--target_language=fr-CA",),
    ):
        with pytest.raises(Question, match="(en to de.*|fr to de.*)--source_language=.* --target_"):
            recognised(tmp_path, THREE, *flags)


@pytest.mark.parametrize("header", [True, False])
def test_pairs_of_languages_are_never_mixed(tmp_path, header):
    files = tables(("en", "hau"), ("en", "bbj"), ("fr", "ghz"), header=header)
    with pytest.raises(Question, match="en to bbj, en to ha, fr to ghz"):
        recognised(tmp_path, files)
    for code in ("hau", "ha", "Hausa"):
        train, evaluation, dataset = chosen(tmp_path, files, f"--target_language={code}")
        assert (train, evaluation) == (["en-hau/train.tsv"], ["en-hau/dev.tsv"])
        assert "4 not used" in dataset.output
    assert chosen(tmp_path, files, "--source_language=fr")[0] == ["fr-ghz/train.tsv"]
    with pytest.raises(Question, match="has en, bbj, and --target_language=yor names none"):
        recognised(tmp_path, files, "--target_language=yor")


def test_locales_of_gettext(tmp_path):
    files = {}
    for code in ("de", "pt", "pt_BR"):
        files |= {f"{code}/{name}": text for name, text in pages("a", language=code).items()}
    with pytest.raises(Question, match="en to de, en to pt, en to pt-br"):
        recognised(tmp_path, files)
    assert chosen(tmp_path, files, "--target_language=pt")[0] == ["pt/a.po"]
    assert chosen(tmp_path, files, "--target_language=pt-BR")[0] == ["pt_BR/a.po"]


@pytest.mark.parametrize(
    ("stem", "tags", "words"),
    [
        ("train.{}", ("en", "sr_Cyrl", "sr_Latn"), "en to sr-cyrl, en to sr-latn, sr-cyrl to"),
        ("dev/{}.dev", ("deu_Latn", "eng_Latn", "fra_Latn"), "en-latn to de-latn, en-latn to fr"),
    ],
)
def test_scripts_behind_languages_are_read(tmp_path, stem, tags, words):
    with pytest.raises(Question, match=words):
        recognised(tmp_path, {stem.format(tag): lines("train", tag) for tag in tags})


def test_text_whose_encoding_alone_is_wrong_is_named(tmp_path):
    (tmp_path / "a.po").write_bytes(pages("a")["a.po"].replace("Phrase", "Übung").encode("cp1252"))
    for path in (tmp_path, tmp_path / "a.po"):
        with pytest.raises(SourceError, match=r"a\.po, line 6 is not UTF-8 .*iconv"):
            recognise.dataset_formats(Folder.open(str(path)))


def test_two_copies_of_a_text_are_a_question(tmp_path):
    files = sides("raw/train", "raw/val")
    for name, text in sides("raw/train", "raw/val").items():
        tokens = text.lower().replace(",", " ,").replace(".", " .").replace("'", "&apos;")
        files[name.replace("raw/", "tok/").replace(".", ".lc.norm.tok.")] = tokens
    words = "raw/train.en and tok/train.lc.norm.tok.en: keep one of them in it"
    with pytest.raises(Question, match=words):
        recognised(tmp_path, files)
    texts = {code: lines("train", code) for code in ("en", "de")}
    bpe = {f"train.bpe.{code}": texts[code].replace("ence", "@@ ence") for code in texts}
    with pytest.raises(Question, match=r"train\.bpe\.en and train\.en"):
        recognised(tmp_path / "two", sides("train") | bpe)
    # The same text in both splits is no second copy.
    files = sides("train") | {f"test.{code}": texts[code] for code in texts}
    assert chosen(tmp_path / "leak", files)[1] == ["test.en", "test.de"]
