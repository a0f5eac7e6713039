"""Vocabulary files: which kind they are, their ids, and what is no vocabulary.

tensor2tensor's subwords: its own examples, vocabularies that it built, round trips.
"""

import collections
import hashlib
import io
import random
import sys
import unicodedata
from typing import Any

import numpy as np
import pytest

from benchmarks.translation import vocabulary
from benchmarks.translation.preparation import vocabularies
from benchmarks.translation.preparation.vocabularies import learn_subwords
from common.errors import DataError

TEXT = "the cat sat"
WORDS = ["the", "cat@@", "s", "s@@", "a", "@-@", "&quot;", ",", "."]
PLAIN = [  # of German text: what the Moses tokenizer cuts apart and escapes
    'Er sagte: "Das kostet 5%, nicht mehr!"',
    "Baden-Württemberg (im Süden) hat 11,1 Mio. Einwohner; und wir?",
    "A & B sind Möbelhäuser (ja).",
    "Gehen wir nach Haus, sagt die Nr. 5 - oder nicht.",
]
# Built by tensor2tensor 1.15.7 (build_to_target_size(size, counts, 1, 1e3)) from LINES.
LINES = [
    "the cat sat on the mat, the cat_2 sat.",
    "die Katze saß auf der Matte, die Katze saß.",
    "a back\\slash and the bat sat",
] * 3
BUILT = {
    45: "<pad>_ <EOS>_ _ a t e s h d c \\ ß z u n i b K . , ~ r o m l k f M 2 p S O E > < ; 9 8 7 "
    "6 5 4 3 1 0",
    60: "<pad>_ <EOS>_ _ the_ a sat_ \\ u t saß_ s n e die_ d cat_ ba at Katze_ ._ ,~_ r o m l k h "
    "f c M 2 ß z p i b S O K E > < ; 9 8 7 6 5 4 3 1 0 . , ~",
}
# Built by tensor2tensor 1.15.7 from `drawn_lines`: entries, and the SHA-256 of the file.
LARGE = {
    100: (100, "1f2e08bfcbe72a171891a456c7e43ec0b635c41c33bea9a0ccf78d61914a82a1"),
    500: (505, "cdd12db12d43ef564cd0ca3d879f456aae9807d69cd235a54e806b6c72935f2d"),
    2000: (1606, "da8acd945f36adf73e2a06f39419b2d5b4047d2844200ba604c504f613233774"),
}
LARGE_ENCODED = [  # by tensor2tensor, with the vocabulary of 500: line 7 and words of its own
    *(13, 6, 97, 328, 47, 11, 345, 13, 5, 40, 76, 100, 6, 4, 4, 45, 168, 214, 8, 6, 32, 502, 504),
    *(7, 489, 266, 501, 495, 55, 474, 124, 124, 67, 483, 481, 134, 476, 7, 489, 106, 133),
]
ENCODED = {  # by tensor2tensor, with these vocabularies
    (45, "the cat sat"): [4, 7, 5, 2, 9, 3, 4, 2, 6, 3, 4, 2],
    (60, "the cat sat"): [3, 15, 5],
    (60, "  the  "): [54, 54, 2, 3, 54, 54, 2],
    (60, "a_b\\c é 😀"): [
        *(4, 2, 6, 7, 2, 35, 2, 6, 6, 2, 28, 2, 6, 30, 49, 49, 42, 2),
        *(54, 6, 50, 30, 44, 47, 50, 30, 42, 2),
    ],
    (60, "\u00a0x\u2028"): [6, 50, 46, 51, 42, 2, 6, 50, 30, 51, 42, 2, 6, 44, 30, 49, 30, 42, 2],
}


def counts_of(lines):
    return collections.Counter(token for line in lines for token in vocabulary.split_tokens(line))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{name: path} of a file of subwords and of two models of sentencepiece."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("vocabularies")
    (folder / "subwords").write_text(learn_subwords(counts_of(LINES), 60))
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
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "kind", "size"),
    [("subwords", "subwords", 55), ("usual", "sentencepiece", 302), ("own", "sentencepiece", 300)],
)
def test_text_comes_back(models, name, kind, size):
    loaded: Any = vocabulary.load_vocabulary(str(models[name]))
    assert (loaded.kind, loaded.size) == (kind, size)
    assert loaded.digest == hashlib.sha256(models[name].read_bytes()).hexdigest()
    for text in (TEXT, "die Katze saß", "an é and 😀"):
        ids = loaded.encode(text)
        assert all(1 < i < loaded.size for i in ids)
        padded = np.array([0, *ids, 0, vocabulary.EOS, *ids, 5])
        assert loaded.decode(padded) == text
    if kind == "sentencepiece":
        own = pytest.importorskip("sentencepiece").SentencePieceProcessor(str(models[name]))
        assert [loaded.pieces[i] for i in ids] == own.encode(text, out_type=str)
        assert loaded.pieces[loaded.unknown] == own.id_to_piece(own.unk_id())
    assert loaded.decode([]) == loaded.decode([1, 7]) == ""
    assert isinstance(loaded.decode([loaded.size - 1, loaded.size, 10**6]), str)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "there is no such file"),
        (b"'<pad>_'\n'\xff'\n", "not UTF-8"),
        (b"'<pad>_'\n'a_'\n", "first two lines"),
        (b"'<pad>_'\n'<EOS>_'\n'a'\n'1'\n", "has no subword '0', which unknown characters need"),
        (b"\n\x07nothing", "not a sentencepiece model"),
    ],
)
def test_other_files_take_one_line(tmp_path, data, words):
    path = tmp_path / "vocab.x"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(DataError, match=words) as caught:
        vocabulary.load_vocabulary(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


# Words of subword-nmt.


def load_words(tmp_path, words, specials=("<unk>", "<s>", "</s>"), newline="\n"):
    path = tmp_path / "vocab.bpe"
    path.write_bytes("".join(f"{w}{newline}" for w in (*specials, *words)).encode())
    return vocabulary.load_vocabulary(str(path))


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
        vocabulary.load_vocabulary(str(path))
    message = str(caught.value)
    assert message.startswith(f"{path} is not a vocabulary: give") and message.endswith(reason)
    assert "\n" not in message


# Subwords of tensor2tensor.


def drawn_lines():
    """600 lines of 900 words, of which the first ones are frequent."""
    draw = random.Random(8)
    text = "an ber die ge haus kat le mö nung over rat schl sun the tion ung ver wa ß zu"
    syllables = text.split(" ")
    words = [
        "".join(syllables[int(draw.random() ** 2 * 20)] for _ in range(1 + int(draw.random() * 4)))
        for _ in range(900)
    ]
    lines = []
    for i in range(600):
        line = " ".join(words[int(draw.random() ** 3 * 900)] for _ in range(12))
        lines.append(f"{line[:40]}, {line[40:]} {i}.")
    return lines


def entries(size):
    return BUILT[size].replace("~", "\0").split(" ")


def subwords(entries):
    """A vocabulary of these subwords."""
    return vocabulary.Subwords("".join(f"'{entry}'\n" for entry in entries).encode(), "x")


def encoder(size):
    return subwords(entry.replace("\0", " ") for entry in entries(size))


def test_text_without_blanks_has_bounded_work(monkeypatch):
    """Of a run of letters the first 100 count; beyond a number of characters no token does."""
    run = "".join(random.Random(0).choices("abcdefgh", k=50_000))
    counts = {"cat": 9, run: 1}
    entries = learn_subwords(counts, 2000).split("\n")
    assert len(entries) < 200 and max(map(len, entries)) <= 102
    assert learn_subwords(counts, 2000) == learn_subwords({"cat": 9, run[:100]: 1}, 2000)
    monkeypatch.setattr(vocabularies, "_CHARACTERS", 50)
    few = learn_subwords({"cat": 9, **{f"{i:020}": 1 for i in range(999)}}, 60)
    assert few == learn_subwords({"cat": 9, **{f"{i:020}": 1 for i in range(2)}}, 60)


def test_words_are_the_categories_letter_and_number():
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    runs = vocabulary.split_tokens(everything)
    assert "".join(runs) == everything.replace(" ", " ")
    for run in runs:
        assert {unicodedata.category(c)[0] in "LN" for c in run} in ({True}, {False})


@pytest.mark.parametrize(
    ("text", "tokens"),
    [  # of tensor2tensor's tokenizer.py and its test
        ("Dude - that's so cool.", ["Dude", " - ", "that", "'", "s", "so", "cool", "."]),
        ("two. \nlines", ["two", ". \n", "lines"]),
        (" a  b ", [" ", "a", "  ", "b", " "]),
        ("", []),
        (" ", [" "]),
        ("ab_c", ["ab", "_", "c"]),
    ],
)
def test_tokens(text, tokens):
    assert vocabulary.split_tokens(text) == tokens
    assert vocabulary.join_tokens(tokens) == text


def test_escapes():
    alphabet = set("ab\\_u;0123456789")
    assert vocabulary.escape_token("a_b\\é\n", alphabet) == "a\\ub\\\\\\233;\\10;_"
    assert vocabulary.unescape_token("a\\ub\\\\\\233;\\10;") == "a_b\\é\n"
    for code in ("1114112", "55296", "57343", "9" * 5000):  # no characters that a file can hold
        assert vocabulary.unescape_token(f"\\{code};") == "\u3013"
    for code in (0, 55295, 57344, 1114111):
        assert (
            vocabulary.unescape_token(f"\\{code};")
            == vocabulary.unescape_token(f"\\{code:09};")
            == chr(code)
        )


@pytest.mark.parametrize("size", BUILT)
def test_builds_what_tensor2tensor_builds(size):
    text = learn_subwords(counts_of(LINES), size)
    assert text == "".join(f"'{entry}'\n" for entry in entries(size)).replace("\0", " ")
    assert vocabulary.Subwords(text.encode(), "x").pieces == encoder(size).pieces


def test_builds_larger_ones_as_tensor2tensor():
    counts = counts_of(drawn_lines())
    texts = {size: learn_subwords(counts, size) for size in LARGE}
    for size, (count, digest) in LARGE.items():
        assert texts[size].count("\n") == count
        assert hashlib.sha256(texts[size].encode()).hexdigest() == digest
    tested = vocabulary.Subwords(texts[500].encode(), "x")
    assert tested.encode(f"{drawn_lines()[7]} Ünseen wörd_s") == LARGE_ENCODED


@pytest.mark.parametrize(("size", "text"), ENCODED)
def test_encodes_as_tensor2tensor(size, text):
    assert encoder(size).encode(text) == ENCODED[size, text]
    assert encoder(size).decode(ENCODED[size, text]) == text


def test_every_text_comes_back():
    draw, tested = random.Random(5), encoder(60)
    letters = "ab zA_\\\\\n\t é\u00a0\u2028\u0085\x0c😀ß;u129,.'\"<pad>EOS中文ก\x00"
    for _ in range(3000):
        text = "".join(draw.choice(letters) for _ in range(draw.randint(0, 25)))
        text += chr(draw.choice([draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)]))
        ids = tested.encode(text)
        assert tested.decode(ids) == text
        assert min(ids) >= 2  # never the padding or the end


def test_ids_outside_of_the_vocabulary_are_skipped():
    tested = encoder(60)
    assert tested.decode([-1, 3, 55, 15, 10**9]) == "the cat"


def test_a_character_without_a_subword_of_its_own_is_escaped():
    entries_without = [entry for entry in BUILT[60].replace("~", " ").split(" ") if entry != "K"]
    tested = subwords(entries_without)
    text = "Katze K"
    assert tested.decode(tested.encode(text)) == text
    pieces = [entries_without[i] for i in tested.encode("ucK")]
    assert pieces == ["u", "c", "\\", "7", "5", ";", "_"]


def test_reads_files_without_quotes_and_of_the_reference():
    rest = [*"\\_u;0123456789", "a b", "'", "'c", "d'", '"e', "f'\""]
    unquoted = "\n".join(["<pad>", "<EOS>", *rest])
    quoted = "\n".join(f"'{entry}'" for entry in ["<pad>", "<EOS>", *rest]) + "\n"
    for text in (unquoted, quoted):
        assert vocabulary.Subwords(text.encode(), "x").pieces == ["<pad>", "<EOS>", *rest]
