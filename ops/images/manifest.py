"""manifest.json of a folder of records, as `scripts/prepare_imagenet.py` writes it.

It says what the folder holds, so that nobody has to read it through to find out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from etils import epath

from errors import one_line
from ops import files
from ops.shards import DataError

NAME = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """`class_names[i]` is the name of label i + 1; `shards` is {name: (examples, bytes)}."""

    class_names: tuple[str, ...]
    shards: dict[str, tuple[int, int]]

    def counts(self, data_dir: str, paths: Sequence[str]) -> tuple[int, ...] | None:
        """Examples in each file; None if one is not in the manifest or not of the size it says.

        Raises:
          DataError: a file may not be read.
        """
        folder = data_dir.rstrip("/") + "/"
        known = [self.shards.get(path.removeprefix(folder)) for path in paths]
        sizes = files.sizes(paths) if None not in known else []
        if [size for _, size in filter(None, known)] != sizes:
            return None
        return tuple(examples for examples, _ in filter(None, known))


def load(data_dir: str) -> Manifest | None:
    """The manifest of a folder, local or gs://; None if there is none.

    Raises:
      DataError: it cannot be read or is of another form.
    """
    path = epath.Path(data_dir) / NAME
    try:
        if not path.exists():
            return None
        return _parse(json.loads(path.read_text()))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is not one that prepare_imagenet.py wrote ({error!r}): move it away, and the "
            "records are read through instead"
        ) from error
    except Exception as error:  # for gs://, TensorFlow's own kinds
        raise DataError(f"cannot read {path}: {one_line(error)}") from error


def _parse(content: dict[str, Any]) -> Manifest:
    classes = sorted(content["classes"], key=lambda row: row["label"])
    if [row["label"] for row in classes] != list(range(1, content["num_label_classes"] + 1)):
        raise ValueError("its labels do not count from 1")
    return Manifest(
        tuple(row["name"] for row in classes),
        {
            row["name"]: (int(row["examples"]), int(row["bytes"]))
            for split in content["splits"].values()
            for row in split["shards"]
        },
    )
