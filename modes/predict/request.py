"""What a person asks predict.py for."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from errors import visible


@dataclasses.dataclass(frozen=True)
class Request:
    """predict.py explains each flag.

    Attributes:
      sources: files, folders, patterns, "-", sentences, as the kind of the model takes them.
      model: a workdir or a checkpoint; or a file or folder of another library's weights.
      recipe, keys: for such weights, see `trained.load_foreign`; None where `model` is a workdir.
      format: one of `rows.FORMATS` or of the kind's own; "" if none was given.
      out: the file of results; "" writes them to the standard output.
      options: the flags that were given of those that single kinds of models have.
      accept_other_data: use a model also where its data have other classes by now.
      threads: that read and decode.
    """

    sources: Sequence[str]
    model: str
    recipe: Any
    keys: Mapping[str, str]
    checkpoint: str
    format: str
    out: str
    batch_size: int
    accept_other_data: bool
    threads: int
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def form(self) -> str:
        """The format of the results: "table" on a terminal, and CSV else, unless one was given."""
        return self.format or ("csv" if self.out or not sys.stdout.isatty() else "table")


def say(text: str) -> None:
    """Writes a line for the person; the standard output has the results."""
    print(visible(text), file=sys.stderr, flush=True)
