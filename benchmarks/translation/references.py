"""Reads the true translations of the sentences to evaluate."""

from __future__ import annotations

from errors import DataError, one_line
from ops.shards import read_errors, tensorflow


def read(data_dir: str, names: str) -> tuple[str, list[str]]:
    """Reads a file of references, one per line, without the white space around each.

    Args:
      data_dir: folder, local or gs://.
      names: files, with commas between, relative to `data_dir` or absolute. Of several names the
        first that exists is read, and there may be none. A single name must exist.

    Returns:
      (the path, the lines), or ("", []) if there is none.

    Raises:
      DataError: the file is missing, cannot be read, or is not UTF-8.
    """
    gfile = tensorflow().io.gfile
    listed = [name.strip() for name in names.split(",") if name.strip()]
    for name in listed:
        is_absolute = "://" in name or name.startswith("/")
        path = name if is_absolute else f"{data_dir.rstrip('/')}/{name}"
        try:
            if not gfile.exists(path):
                continue
            with gfile.GFile(path, "rb") as file:
                data: bytes = file.read()
        except read_errors() as error:
            raise DataError(f"cannot read the references {path}: {one_line(error)}") from error
        try:
            # Only "\n" ends a line: texts of the web hold other ends of lines inside.
            lines = data.decode().removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            number = data[: error.start].count(b"\n") + 1
            raise DataError(f"{path}, line {number}: not UTF-8; convert the file") from error
        return path, [line.strip() for line in lines]
    if len(listed) == 1:
        raise DataError(
            f"config.eval_references={names!r}: there is no such file in {data_dir}; '' takes the "
            "targets of the records"
        )
    return "", []
