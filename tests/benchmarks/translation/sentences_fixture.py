"""Makes a small folder of sentences to translate, in the files of `preparation.text`."""

import pathlib

import numpy as np

from benchmarks.translation.preparation import examples
from benchmarks.translation.vocabulary import EOS

WORDS = "abcdefghijk"  # their ids begin at 2
VOCABULARY = 27  # entries: two of their own, the words, and 14 to escape other characters with
LENGTH = 12  # tokens of a training row


def sentence(draw: np.random.Generator) -> list[int]:
    """2 to 8 words."""
    return draw.integers(2, 2 + len(WORDS), draw.integers(2, 9)).tolist()


def text(ids: list[int]) -> str:
    """The words of a sentence."""
    return " ".join(WORDS[i - 2] for i in ids)


def pair(draw: np.random.Generator) -> tuple[list[int], list[int]]:
    """A sentence and its translation, which is the sentence backwards, with EOS."""
    ids = sentence(draw)
    return [*ids, EOS], [*ids[::-1], EOS]


def make(folder: pathlib.Path) -> None:
    """Writes 90 rows to train from in 4 files, 23 sentences to evaluate, and the vocabulary."""
    from common.tensorflow import tensorflow

    tf, draw = tensorflow(), np.random.default_rng(0)
    rows = [examples.row([pair(draw)], LENGTH) for _ in range(90)]
    for shard in range(4):
        with tf.io.TFRecordWriter(f"{folder}/toy_packed-train-{shard:05d}-of-00004") as file:
            for row in rows[shard::4]:
                file.write(examples.serialize_example(row))
    pairs = [pair(draw) for _ in range(23)]
    with tf.io.TFRecordWriter(f"{folder}/toy-dev-00000-of-00001") as file:
        for inputs, targets in pairs:
            file.write(examples.serialize_example({"inputs": inputs, "targets": targets}))
    entries = ["<pad>_", "<EOS>_", *(f"{word}_" for word in WORDS), *"\\_u;0123456789"]
    (folder / "vocab.toy.subwords").write_text("".join(f"'{entry}'\n" for entry in entries))
    (folder / "references.txt").write_text("".join(f"{text(t[:-1])}\n" for _, t in pairs))
