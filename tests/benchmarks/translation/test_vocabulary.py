"""Vocabulary files: which kind they are, their ids, and what is no vocabulary."""

import hashlib
import io
import sys

import numpy as np
import pytest

from benchmarks.translation import vocabulary
from benchmarks.translation.preparation.subwords import build
from errors import DataError
from tests.benchmarks.translation.test_subwords import LINES, counts_of

TEXT = "the cat sat"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{name: path} of a file of subwords and of two models of sentencepiece."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("vocabularies")
    (folder / "subwords").write_text(build(counts_of(LINES), 60))
    for name, ids in (
        ("usual", {}),
        ("own", {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}),
    ):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES),
            model_writer=model,
            model_type="bpe",
            vocab_size=300,
            byte_fallback=True,
            character_coverage=1.0,
            minloglevel=2,
            **ids,
        )
        (folder / name).write_bytes(model.getvalue())
    (folder / "words").write_text("<unk>\n<s>\n</s>\nthe\ncat\ns@@\nat\nan\n")
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["subwords", "usual", "own"])
def test_text_comes_back(models, name):
    loaded = vocabulary.load(str(models[name]))
    assert loaded.digest == hashlib.sha256(models[name].read_bytes()).hexdigest()
    for text in (TEXT, "die Katze saß", "an é and 😀"):
        ids = loaded.encode(text)
        assert all(1 < i < loaded.size for i in ids)
        padded = np.array([0, *ids, 0, vocabulary.EOS, *ids, 5])
        assert loaded.decode(padded) == text
    assert loaded.decode([]) == loaded.decode([1, 7]) == ""
    assert isinstance(loaded.decode([loaded.size - 1, loaded.size, 10**6]), str)


def test_kinds_and_sizes(models):
    kinds = {name: vocabulary.load(str(path)) for name, path in models.items()}
    sizes = {name: (loaded.kind, loaded.size) for name, loaded in kinds.items()}
    expected = {"subwords": ("subwords", 55), "own": ("sentencepiece", 300)}
    assert sizes == expected | {"usual": ("sentencepiece", 302), "words": ("words", 8)}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "there is no such file"),
        (b"'<pad>_'\n'\xff'\n", "not UTF-8"),
        (b"'<pad>_'\n'a_'\n", "first two lines"),
        (b"\n\x07nothing", "no sentencepiece model"),
    ],
)
def test_other_files_take_one_line(tmp_path, data, words):
    path = tmp_path / "vocab.x"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(DataError, match=words) as caught:
        vocabulary.load(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


# Words of subword-nmt.

WORDS = ["the", "cat@@", "s", "s@@", "a", "@-@", "&quot;", ",", "."]
PLAIN = [  # of German text: what the Moses tokenizer cuts apart and escapes
    'Er sagte: "Das kostet 5%, nicht mehr!"',
    "Baden-Württemberg (im Süden) hat 11,1 Mio. Einwohner; und wir?",
    "A & B sind Möbelhäuser (ja).",
    "Gehen wir nach Haus, sagt die Nr. 5 - oder nicht.",
]


def load_words(tmp_path, words, specials=("<unk>", "<s>", "</s>"), newline="\n"):
    path = tmp_path / "vocab.bpe"
    path.write_bytes("".join(f"{w}{newline}" for w in (*specials, *words)).encode())
    return vocabulary.load(str(path))


@pytest.mark.parametrize(
    "specials", [("<unk>", "<s>", "</s>"), ("<pad>", "<unk>", "<s>", "</s>"), ()]
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_ids_are_those_of_the_file_behind_our_own(tmp_path, specials, newline):
    loaded = load_words(tmp_path, WORDS, specials, newline)
    assert (loaded.kind, loaded.size) == ("words", 3 + len(WORDS))
    content = (tmp_path / "vocab.bpe").read_bytes()
    assert loaded.digest == hashlib.sha256(content).hexdigest()
    assert loaded.encode(" ".join(WORDS)) == list(range(3, 3 + len(WORDS)))


def test_words_that_are_unknown_or_repeated_or_hold_ends_of_lines(tmp_path):
    loaded = load_words(tmp_path, WORDS)
    assert loaded.encode("  the   dog <s> </s> the\t ") == [3, 2, 2, 2, 2]
    assert loaded.encode("") == []
    assert loaded.decode([3, 2, 7]) == "the <unk> a"
    repeated = load_words(tmp_path, ["a", "b", "a", "c"])
    assert repeated.encode("a b c") == [3, 4, 6] and repeated.size == 7
    several = load_words(tmp_path, ["a", "b\x85c", "d\u2028e", "f"])
    assert len(several.decode([3, 4, 5, 6]).splitlines()) == 1


def test_parts_are_joined(tmp_path):
    loaded = load_words(tmp_path, WORDS)
    text = "the cat@@ s a @-@ cat@@ s , &quot; the &quot; ."
    assert loaded.decode(loaded.encode(text)) == 'the cats a-cats, "the".'
    assert loaded.decode(loaded.encode("the cat@@ s@@")) == "the cats"
    assert loaded.decode([0, 3, 0, 7, vocabulary.EOS, 3]) == "the a"
    assert loaded.decode([3, loaded.size - 1, loaded.size, 10**6]) == "the."
    assert loaded.decode([]) == loaded.decode([1, 3]) == ""


def test_text_comes_back_from_moses_tokenizer(tmp_path):
    sacremoses = pytest.importorskip("sacremoses")
    tokenizer = sacremoses.MosesTokenizer(lang="de")
    cut = [
        " ".join(
            f"{word[:3]}@@ {word[3:]}" if word[:6].isalpha() and len(word) > 5 else word
            for word in tokens
        )
        for tokens in map(tokenizer.tokenize, PLAIN)
    ]
    assert any("@@ " in line for line in cut) and any("&quot;" in line for line in cut)
    loaded = load_words(tmp_path, sorted({word for line in cut for word in line.split()}))
    assert [loaded.decode(loaded.encode(line)) for line in cut] == PLAIN


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"a\nb\nc d\ne\n", "line 3 is not one token: 'c d'"),
        (b"a b" + b"c" * 99 + b"\nd\ne\nf", f"line 1 is not one token: 'a b{'c' * 37}'"),
        (b"a\nb\tc\nd\ne\n", "line 2 is not one token: 'b\\tc'"),
        (b"a\nb\n\nd\n", "line 3 is not one token: ''"),
        (b"a\nb\nc\n\xff\n", "line 4 is not UTF-8"),
        (b"a\nb\nc\n", "it has 3 lines"),
    ],
)
def test_files_that_are_no_list_of_words(tmp_path, data, reason):
    path = tmp_path / "vocab"
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        vocabulary.load(str(path))
    message = str(caught.value)
    assert message.startswith(f"{path} is no vocabulary: give") and message.endswith(reason)
    assert "\n" not in message


def test_without_sacremoses_only_decoding_fails(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    loaded = load_words(tmp_path, WORDS)
    ids = loaded.encode("the cat@@ s")
    with pytest.raises(DataError, match="needs sacremoses .* pip install -r requirements.txt"):
        loaded.decode(ids)
