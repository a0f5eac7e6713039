"""Text as ids: the same as line by line in Python, whatever the blocks and odd characters."""

import numpy as np
import pytest

from benchmarks.translation import vocabulary
from benchmarks.translation.gnmt import corpus
from benchmarks.translation.gnmt import text as texts
from errors import DataError

WORDS = ["a", "bc@@", "d", "é", "\u2028", "x\ry", "&quot;"]
PIECES = [*WORDS, "unknown", "b", "a\u00a0a", "\t", "ü", "<s>"]


@pytest.fixture(scope="module")
def words():
    return vocabulary.Words("\n".join(("<unk>", "<s>", "</s>", *WORDS)).encode(), "vocab")


def read(path, words, longest=None):
    return texts.read_side(str(path), words, longest, lambda size: None)


def loop(text, words):
    """The sentences in Python, with EOS."""
    return [
        [*words.encode(line.removesuffix("\r")), vocabulary.EOS]
        for line in text.removesuffix("\n").split("\n")
    ]


def assert_same(actual, sentences, longest=10**9):
    assert actual.lengths.tolist() == [len(ids) for ids in sentences]
    assert actual.ids.tolist() == [i for ids in sentences if len(ids) <= longest for i in ids]
    assert actual.lengths.dtype == np.int32


@pytest.mark.parametrize("block", [5, 64, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "", "\r\n", "\r"])
def test_ids_of_random_text(tmp_path, monkeypatch, words, block, end):
    monkeypatch.setattr(texts, "_BLOCK", block)
    draw = np.random.default_rng(0)
    rows = []
    for _ in range(60):
        picked = [PIECES[i] for i in draw.integers(0, len(PIECES), draw.integers(0, 9))]
        gaps = draw.choice(["", " ", "  "], 2)
        rows.append(gaps[0] + draw.choice([" ", "  "]).join(picked) + gaps[1])
    text = draw.choice(["\n", "\r\n"]).join(rows) + "\na" + end
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    sizes = []
    actual = texts.read_side(str(path), words, None, sizes.append)
    assert_same(actual, loop(text, words))
    assert actual.ids.dtype == np.uint16
    assert sum(sizes) - len(text.encode()) in (0, 1)  # the last line may lack its end
    assert_same(read(path, words, 4), loop(text, words), 4)


def test_empty_files_and_lines(tmp_path, words):
    path = tmp_path / "text"
    path.write_bytes(b"")
    assert [len(part) for part in read(path, words)] == [0, 0]
    path.write_bytes(b"\n\r\n  \n\n")
    assert_same(read(path, words), [[1], [1], [1], [1]])


def test_large_vocabularies_need_wide_ids(tmp_path):
    words = vocabulary.Words("\n".join(f"w{i}" for i in range(70_000)).encode(), "vocab")
    path = tmp_path / "text"
    path.write_text("w0 w69999 w70000\n")
    actual = read(path, words)
    assert actual.ids.tolist() == [3, 70_002, 2, 1] and actual.ids.dtype == np.int32
    assert [corpus.id_type(n) for n in (1 << 16, (1 << 16) + 1)] == [np.uint16, np.int32]


def test_bytes_that_are_not_utf8(tmp_path, monkeypatch, words):
    monkeypatch.setattr(texts, "_BLOCK", 16)
    path = tmp_path / "text"
    path.write_bytes(b"a d\n" * 30 + b"d\nd \xff\nd\n")
    with pytest.raises(DataError, match=f"^{path}, line 32: not UTF-8; convert the file$"):
        read(path, words)


def test_a_missing_file_takes_one_line(tmp_path, words):
    with pytest.raises(DataError, match=f"^cannot read {tmp_path}/none: ") as caught:
        read(tmp_path / "none", words)
    assert "\n" not in str(caught.value)
