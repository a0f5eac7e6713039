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
        (["id", "de", "en"], ("", ""), (2, 1)),
        (["fr", "de"], ("", ""), (0, 1)),
        (["de", "en"], ("de", ""), (0, 1)),
        (["de", "en", "fr"], ("", "fr"), (1, 2)),
        (["de", "en", "fr"], ("", ""), ()),
        (["de", "en", "fr"], ("fr", "de"), (2, 0)),
        (["target", "source"], ("", ""), (1, 0)),
        (["English words/sentences", "French words/sentences"], ("", ""), (0, 1)),
        (["text_de", "text_en"], ("", ""), (1, 0)),
        (["zho_Hans", "es-419", "no", "id"], ("", ""), (0, 1)),
        (["target text", "source text"], ("", ""), (1, 0)),
        (["What is it?", "Was ist es?"], ("", ""), ()),
        (["It.", "Es."], ("", ""), ()),
        (["user_id", "item_id"], ("", ""), ()),
        (["pt_BR", "en"], ("en", "pt"), (1, 0)),
        (["pt_BR", "pt_PT", "en"], ("en", "pt"), ()),
        (["en", "xyz"], ("", ""), (0, 1)),  # it stands beside a known one
        (["en", "xyz", "uvw"], ("", ""), ()),
        (["en", "xyz"], ("en", "xyz"), (0, 1)),
        (["de", "en"], ("it", ""), ()),
        (["de"], ("", ""), ()),
    ],
)
def test_which_names_are_a_pair(names, wanted, chosen):
    assert languages.choose(names, wanted) == tuple(names[i] for i in chosen)


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


def test_groups_of_names():
    names = ["x.de-en.de", "x.de-en.en.gz", "x.cs-en.cs", "y.eng", "y.deu", "z.fr", "a/no.txt"]
    assert languages.groups(names) == [
        {"de": "x.de-en.de", "en": "x.de-en.en.gz"},
        {"en": "y.eng", "de": "y.deu"},
    ]
    names = ["zh-TW/how_to.txt", "zh-CN/how_to.txt", "x.pt-br", "x.pt-pt", "x.hau"]
    assert languages.groups(names) == [
        {"pt-br": "x.pt-br", "pt-pt": "x.pt-pt", "ha": "x.hau"},
        {"zh-tw": "zh-TW/how_to.txt", "zh-cn": "zh-CN/how_to.txt"},
    ]
    roles = languages.groups(["src-train.txt", "tgt-train.txt"])
    assert roles == [{"source": "src-train.txt", "target": "tgt-train.txt"}]
