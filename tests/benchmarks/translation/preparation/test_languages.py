"""Languages by the names of columns, folders and files."""

import pytest

from benchmarks.translation.preparation import languages


@pytest.mark.parametrize(
    ("word", "tag"),
    [
        *[("de", "de"), (" German ", "de"), ("deu", "de"), ("DE", "de"), ("xx", ""), ("", "")],
        *[("pt_BR", "pt-br"), ("zh-Hant", "zh-hant"), ("eng_Latn", "en-latn"), ("en-US", "en-us")],
        *[("src", "source"), ("tgt", "target"), ("de-12", ""), ("sr@latin", "sr-latin")],
    ],
)
def test_tags(word, tag):
    assert languages.code(word) == tag


@pytest.mark.parametrize(
    ("names", "wanted", "chosen"),
    [
        (["id", "de", "en"], ("", ""), ("en", "de")),
        (["fr", "de"], ("", ""), ("fr", "de")),
        (["de", "en"], ("de", ""), ("de", "en")),
        (["de", "en", "fr"], ("", "fr"), ("en", "fr")),
        (["de", "en", "fr"], ("", ""), ()),
        (["de", "en", "fr"], ("fr", "de"), ("fr", "de")),
        (["target", "source"], ("", ""), ("source", "target")),
        (["text_de", "English words"], ("", ""), ("English words", "text_de")),
        (["pt_BR", "en"], ("en", "pt"), ("en", "pt_BR")),
        (["pt_BR", "pt_PT", "en"], ("en", "pt"), ()),
        (["en", "xyz"], ("", ""), ("en", "xyz")),  # it stands beside a known one
        (["en", "xyz", "uvw"], ("", ""), ()),
        (["en", "xyz"], ("en", "xyz"), ("en", "xyz")),
        (["de", "en"], ("it", ""), ()),
        (["de"], ("", ""), ()),
    ],
)
def test_which_names_are_a_pair(names, wanted, chosen):
    assert languages.choose(names, wanted) == chosen


@pytest.mark.parametrize(
    ("path", "pair"),
    [
        *[("a/en-de/x.txt", ("en", "de")), ("x.de-en.de", ("de", "en"))],
        *[("en_to_fr/train", ("en", "fr")), ("en2fr.csv", ("en", "fr"))],
        ("en-abc/x", ("en", "abc")),  # only a folder
        *[("x.en-abc.txt", ()), ("is-it/x", ()), ("x.txt", ())],
    ],
)
def test_pairs_of_paths(path, pair):
    assert languages.pair_of(path) == pair


def test_languages_of_paths():
    paths = ("po/fr/x.po", "x-pt_BR.po", "x.fr.po", "x.de-en.de", "source/x.txt")
    assert [*map(languages.of_path, paths)] == ["fr", "pt-br", "fr", "de", ""]


def test_names_that_differ_in_the_language():
    names = ["x.de-en.en", "x.de-en.de", "y.fr.gz", "y.en", "z.it"]
    assert languages.groups(names) == [
        {"en": "x.de-en.en", "de": "x.de-en.de"},
        {"fr": "y.fr.gz", "en": "y.en"},
    ]
    assert languages.groups(["de.1.en.txt", "fr.1.en.txt"]) == [
        {"de": "de.1.en.txt", "fr": "fr.1.en.txt"}
    ]


def test_headers_and_columns_of_text():
    rows = [{0: "en", 1: "de", 2: "n"}, {0: "a dog", 1: "ein Hund", 2: "7"}]
    assert languages.have_header(rows, (), ("", ""))
    assert not languages.have_header(rows[1:], (), ("", ""))
    assert not languages.have_header([rows[0], {0: "en", 1: "fr"}], (), ("", ""))
    assert languages.have_header([{0: " p", 1: "q "}], ("p", "q"), ("", ""))
    assert not languages.have_header([{0: "p"}], ("p", "q"), ("", ""))
    assert languages.text_columns([{0: "1", 1: "de", 2: "a b", 3: "c d", 4: "e"}]) == [2, 3]
    for texts, expected in ((["a", "1"], True), (["a", "1", "2"], False), ([], False)):
        assert languages.are_mostly(texts, "[a-z]") == expected
