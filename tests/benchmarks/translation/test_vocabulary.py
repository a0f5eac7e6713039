"""Vocabulary files: which kind they are, their ids, and what is no vocabulary."""

import hashlib
import io

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


def test_ids_of_words(models):
    loaded = vocabulary.load(str(models["words"]))
    assert loaded.digest == hashlib.sha256(models["words"].read_bytes()).hexdigest()
    assert loaded.encode("the  cat s@@ at dog") == [3, 4, 5, 6, 2]
    assert loaded.decode([0, 3, 4, 2, 0, 5, 6, 7, 8, vocabulary.EOS, 3]) == "the cat <unk> sat an"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"the\ncat\n", "is no vocabulary: give a file"),
        (b"", "is no vocabulary: give a file"),
        (b"'<pad>_'\n'\xff'\n", "not UTF-8"),
        (b"'<pad>_'\n'a_'\n", "first two lines"),
        (b"\n\x07nothing", "no sentencepiece model"),
    ],
)
def test_other_files_take_one_line(tmp_path, data, words):
    path = tmp_path / "vocab.x"
    path.write_bytes(data)
    with pytest.raises(DataError, match=words) as caught:
        vocabulary.load(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_takes_one_line(tmp_path):
    with pytest.raises(DataError, match="there is no such file"):
        vocabulary.load(str(tmp_path / "vocab.x"))
