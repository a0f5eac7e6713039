"""Translates text with a trained Transformer or GNMT, one sentence per line.

    python -m scripts.translate --workdir=runs/phrases < sentences.en > sentences.de

The model is the newest checkpoint of the workdir. A model whose data were cut into words and
pieces ("H@@ aus") wants its input so too. Every line of the input becomes a line of the
output; an empty line stays empty. The translation of a line does not depend on the other lines.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from engine import environment

environment.set_defaults(TF_CPP_MIN_LOG_LEVEL="3")

import jax  # noqa: E402 (the environment decides how it starts)
import numpy as np  # noqa: E402

from benchmarks.translation.vocabulary import EOS, Words  # noqa: E402
from errors import CheckpointError, UserError  # noqa: E402
from modes import trained  # noqa: E402
from ops import console  # noqa: E402

_NAME = "translate"
_UNKNOWN = 0.2  # the share of unknown words that causes a warning
# Read before the first is translated, so that lines of one length share a batch; where a person
# types, it is one.
_LINES = 1024


class Model:
    """A trained translator."""

    def __init__(self, workdir: str, data_dir: str = ""):
        """Loads the newest checkpoint of `workdir`, or the one WORKDIR/checkpoints/STEP.

        `data_dir` is where the vocabulary lies; '' is where the run had it.

        Raises:
          UserError: there is no such checkpoint, it is no translator's, or the vocabulary is
            missing or another one.
        """
        model = trained.load(workdir, **({"data_dir": data_dir} if data_dir else {}))
        if "translate" not in model.benchmark.uses.commands:
            raise CheckpointError(
                f"{model.source} is a model of the benchmark {model.config.benchmark!r}, which "
                "does not translate"
            )
        self._benchmark: Any = model.benchmark
        self._vocabulary = self._benchmark.vocabulary
        if self._vocabulary.digest != (digest := model.manifest["vocabulary"]["digest"]):
            raise CheckpointError(
                f"the vocabulary in {model.config.data_dir} is not the one of {model.source} "
                f"(SHA-256 {digest[:12]}...): give the --data_dir that the model was trained on"
            )
        self._weights = jax.device_put((model.params, model.model_state))
        self._predict = jax.jit(self._benchmark.predict)
        self._warned = False

    def translate(self, lines: Sequence[str], batch_size: int) -> list[str]:
        """The translation of each line."""
        texts = [line.strip().removeprefix("\ufeff") for line in lines]  # as in training
        ids = [[*self._vocabulary.encode(text), EOS] if text else [] for text in texts]
        self._warn(ids)
        order = sorted((i for i, row in enumerate(ids) if row), key=lambda i: len(ids[i]))
        translations = [""] * len(lines)
        for begin in range(0, len(order), batch_size):
            batch = order[begin : begin + batch_size]
            size = self._size(len(ids[batch[-1]]))
            inputs = np.zeros((batch_size, size), np.int32)  # an empty row is not searched
            for row, i in enumerate(batch):
                inputs[row, : len(ids[i])] = ids[i]
            arrays = {"inputs": inputs, "id": np.arange(batch_size, dtype=np.int32)}
            tokens = np.asarray(self._predict(*self._weights, arrays)["tokens"])
            for row, i in enumerate(batch):
                translations[i] = self._benchmark.decode(tokens[row].tolist())
        return translations

    def _warn(self, ids: Sequence[Sequence[int]]) -> None:
        """Says once if many words are unknown: the text is not cut as the training data were."""
        if not isinstance(self._vocabulary, Words) or self._warned:
            return
        unknown = sum(row.count(Words.UNKNOWN) for row in map(list, ids))
        if unknown > _UNKNOWN * sum(map(len, ids)):
            self._warned = True
            print(
                f"{_NAME}: {unknown:,} words are not in the vocabulary: the input must be "
                "tokenized and cut into pieces as the training data were, see docs/gnmt.md",
                file=sys.stderr,
            )

    def _size(self, length: int) -> int:
        """The least of few sizes that a sentence fits; each is compiled once."""
        sizes = self._benchmark.eval_lengths
        return next((size for size in sizes if size >= length), -(-length // sizes[-1]) * sizes[-1])


def main(argv: list[str] | None = None) -> None:
    """The command line; argv without the program's name."""
    parser = console.Parser(prog=_NAME, description=console.summary(__doc__))
    parser.add_argument(
        "--workdir", required=True, help="of a run, or WORKDIR/checkpoints/STEP; local or gs://"
    )
    parser.add_argument(
        "--data_dir", default="", help="where the vocabulary is, if not where the run had it"
    )
    parser.add_argument("--batch_size", type=console.whole(1, 4096), default=32, help="sentences")
    args: argparse.Namespace = parser.parse_args(
        console.underscored(sys.argv[1:] if argv is None else argv)
    )
    try:
        model = Model(args.workdir, args.data_dir)
    except UserError as error:
        sys.exit(f"{_NAME}: {error}")
    try:
        lines, size = _lines(sys.stdin.buffer), 1 if sys.stdin.isatty() else _LINES
        while chunk := list(itertools.islice(lines, size)):
            for line in model.translate(chunk, args.batch_size):
                sys.stdout.buffer.write(f"{line}\n".encode())
            sys.stdout.buffer.flush()
    except (KeyboardInterrupt, BrokenPipeError):  # Ctrl-C, or a reader such as `head` has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(130)


def _lines(file: Iterable[bytes]) -> Iterator[str]:
    """The lines of a file; a byte that is not UTF-8 ends the program with one line."""
    for number, line in enumerate(file, 1):
        try:
            yield line.decode().removesuffix("\n")
        except UnicodeDecodeError:
            sys.exit(f"{_NAME}: line {number} of the input is not UTF-8")


if __name__ == "__main__":
    console.run(main)
