"""What a trained model can be used for, besides being scored.

`Benchmark.uses` gives the `Uses` of a benchmark. The commands call it. A training run calls it for
`config.init_from` only, to read another library's weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

if TYPE_CHECKING:
    from common.portable import Portable, Program


class Matrix(NamedTuple):
    """How often examples of a true class (row) were taken for a class (column); int[K, K]."""

    names: Sequence[str]
    counts: np.ndarray


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar of a chart; `value` and `ideal`, where a mark is drawn, are from 0 to 1."""

    label: str
    value: float
    ideal: float
    count: int  # the number of examples behind it


class Picture(NamedTuple):
    """A JPEG or PNG with a few lines below it; a `flag` is shown as a warning.

    A `wide` picture has two images beside each other, or needs as much space.
    """

    data: bytes
    caption: Sequence[str]
    flag: str = ""
    wide: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exhibit:
    """One thing to show about the predictions; the parts that are empty are not shown.

    Texts may come from the data: whoever shows them escapes them.
    """

    title: str
    text: str = ""
    columns: Sequence[str] = ()  # the head of the table
    rows: Sequence[Sequence[str]] = ()
    has_mean: bool = False  # whether the last row is the mean of the others
    matrix: Matrix | None = None
    bars: Sequence[Bar] = ()
    pictures: Sequence[Picture] = ()
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)  # by name


class Imported(NamedTuple):
    """Weights of another library under the names of a benchmark's model, as NumPy arrays."""

    source: str  # the file
    params: Any
    model_state: Any
    metadata: dict[str, Any]  # replaces `Benchmark.metadata` in a checkpoint's manifest
    summary: str  # the content of the file, in one line


class Uses:
    """The uses of one benchmark's models; every default says that there is no such use."""

    # What predict.py asks the model for: the name of a module of `commands.predict`, or "".
    answers = ""
    # How a trained model is used if predict.py cannot use it, as a sentence.
    hint = "python main.py --mode=eval evaluates it"
    # Commands that use a trained model, by purpose, for the report; "{workdir}" stands for its run.
    commands: Mapping[str, str] = {}

    def classify(self, params: Any, model_state: Any, images: jax.Array) -> dict[str, jax.Array]:
        """For "classes": logits f32[b, K] and features f32[b, F] of images uint8[b, s, s, 3]."""
        raise NotImplementedError

    def data_meaning(self) -> Mapping[str, Any]:
        """`Identity.meaning` as a small file in the data's folder has it now; {} without the file.

        Modes that do not read the data call it.

        Raises:
          DataError: the file is damaged.
        """
        return {}

    def exhibits(self, rows: Iterator[dict[str, np.ndarray]]) -> list[Exhibit]:
        """Shows the predictions: mistakes, examples, and files for other programs.

        --mode=report shows them on its page; --mode=eval and the report write their files. Only
        process 0 calls it, with the rows that `score` gets.
        """
        return []

    def portable(self, params: Any, model_state: Any) -> Portable | None:
        """The model in the forms that other programs read; None where there are none.

        The arrays are NumPy's.
        """
        return None

    def check_files(self, manifest: Mapping[str, Any], source: str) -> None:
        """Checks the files in the data folder that the use of the model needs.

        Args:
          manifest: of the checkpoint.
          source: the checkpoint, for messages.

        Raises:
          UserError: a file is missing, or it does not belong to the model.
        """

    def programs(self, params: Any, model_state: Any) -> Mapping[str, Program]:
        """The model as functions for other programs, if it is not `portable`.

        Most models have one program, named ""; other names become part of the file's name. The
        arrays are NumPy's.
        """
        return {}

    def read_foreign(self, file: str) -> Imported | None:
        """Reads another library's weights; None if the benchmark takes none.

        `common.foreign.find` returned `file`, local or gs://. The benchmark is made with what
        `benchmarks.base.Model.foreign_settings` returns for it.

        Raises:
          DataError: the file cannot be used.
        """
        return None
