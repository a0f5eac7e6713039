"""A trained translator as a function for other programs, see `ops.portable.Program`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from benchmarks.translation.vocabulary import EOS
from ops import files
from ops.portable import Arrays, Program

# Who reads a vocabulary file, by `Vocabulary.kind`.
_READERS = {
    "subwords": "tensor2tensor's SubwordTextEncoder reads",
    "sentencepiece": "sentencepiece reads; add 2 to its ids unless it has 0 for padding and 1 for "
    "the end",
    "words": "has a word or a part of one (subword-nmt) per line; the first line is id 3, after "
    "special ones, and 2 is any other word",
}
_MEANING = {
    "sources": "ids of the words of a sentence, then 1 (EOS), then 0 (PAD) to the end",
    "tokens": "ids of its translations, the best first; each ends with 1, then 0 to the end",
    "scores": "the logarithm of the probability over the length penalty; -inf is no translation",
}


def make(benchmark: Any, params: Any) -> Program:
    """The program of a translator, a `benchmarks.translation.translator.Translator`."""
    params = jax.tree.map(jnp.asarray, params)
    length, beams = benchmark.eval_lengths[-1], benchmark.settings.beam_size

    def translate(source: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens, scores = benchmark.n_best(params, source[None], beams)
        return tokens[0], scores[0]

    def compute(inputs: Arrays) -> Arrays:
        # One after another, so that no translation depends on the others even by rounding.
        tokens, scores = jax.lax.map(translate, inputs["sources"])
        return {"tokens": tokens, "scores": scores}

    def examples(pictures: Sequence[bytes]) -> Sequence[Arrays]:
        del pictures
        draw = np.random.default_rng(0)
        rows = np.zeros((3, length), np.int32)
        for row, size in zip(rows, (1, length // 4, length // 2), strict=True):
            row[:size] = draw.integers(EOS + 1, benchmark.vocabulary_size, size)
            row[size] = EOS
        return [{"sources": rows}, {"sources": rows[:1]}]

    (vocabulary,) = content = _vocabulary(benchmark)
    return Program(
        task=f"translates sentences into {benchmark.language!r}. Their ids are those of "
        f"`{vocabulary}`, which {_READERS[benchmark.vocabulary.kind]}",
        compute=compute,
        inputs={"sources": (f"batch, {length}", np.int32)},
        meaning=_MEANING,
        examples=examples,
        files=content,
    )


def _vocabulary(benchmark: Any) -> dict[str, bytes]:
    """The vocabulary's file by its name."""
    settings = benchmark.settings
    path = files.find(settings.data_dir, settings.vocabulary_file, "vocabulary")[0]
    return {os.path.basename(path): epath.Path(path).read_bytes()}
