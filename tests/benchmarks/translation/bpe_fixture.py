"""Makes a small folder of sentences to translate, in the files that users hold for GNMT.

The text is tokenized and cut into parts of words, with the names of MLPerf's reference.
"""

import pathlib

import numpy as np

UNITS = ("a", "b", "c", "d", "e", "f", "g", "x@@ y", "x@@ z")  # a word each
VOCABULARY = ("a", "b", "c", "d", "e", "f", "g", "x@@", "y", "z")  # ids begin at 3
TRAIN, EVAL, FILLER = 90, 23, 9  # pairs; lines behind those to evaluate


def pair(draw: np.random.Generator) -> tuple[list[str], list[str]]:
    """A sentence of 2 to 8 words and its translation, which is the sentence backwards."""
    units = [UNITS[i] for i in draw.integers(0, len(UNITS), draw.integers(2, 9))]
    return units, units[::-1]


def make(folder: pathlib.Path) -> None:
    """Writes the text to train from and to evaluate, the vocabulary, and plain references."""
    draw = np.random.default_rng(0)

    def write(name: str, sides: list[list[list[str]]]) -> None:
        for language, side in zip(("en", "de"), sides, strict=True):
            lines = "".join(f"{' '.join(units)}\n" for units in side)
            (folder / f"{name}.{language}").write_text(lines)

    def pairs(count: int) -> list[list[list[str]]]:
        return [list(side) for side in zip(*(pair(draw) for _ in range(count)), strict=True)]

    write("train.tok.clean.bpe.32000", pairs(TRAIN))
    evaluated = pairs(EVAL)
    write("newstest2014.tok.bpe.32000.padded", [side + [["a"]] * FILLER for side in evaluated])
    for language in ("en", "de"):
        lines = "".join(f"{line}\n" for line in ("<unk>", "<s>", "</s>", *VOCABULARY))
        (folder / f"vocab.bpe.32000.{language}").write_text(lines)
    references = [" ".join(units).replace("@@ ", "") for units in evaluated[1]]
    (folder / "newstest2014.de").write_text("".join(f"{line}\n" for line in references))
