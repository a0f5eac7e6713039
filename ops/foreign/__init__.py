"""Weights of other libraries: .safetensors, PyTorch's .pth, Keras's .h5; nothing in them runs.

`find` says which file a path means; `files.read` reads it, and is imported for such a file only.
"""

from __future__ import annotations

from etils import epath

from errors import DataError, one_line

# The names of a model's files, where it is a folder. Only beside these do JSON files count.
PUBLISHED = ("model.safetensors", "pytorch_model.bin")
_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".pth.tar", ".h5", ".keras")


def find(path: str) -> str:
    """The file of weights that a path, local or gs://, means; "" if it is none.

    A file is one whatever its name. A folder is one if it has a file of weights and no folder
    `checkpoints`.

    Raises:
      DataError: a folder has several files of weights, or cannot be listed.
    """
    try:
        folder = epath.Path(path)
        if not folder.is_dir():
            return path if folder.exists() else ""
        if (folder / "checkpoints").exists():
            return ""
        files = sorted(p.name for p in folder.iterdir() if p.name.endswith(_SUFFIXES))
    except Exception as error:  # gs:// raises TensorFlow's own classes
        raise DataError(f"cannot read {path}: {one_line(error)}") from error
    published = [name for name in PUBLISHED if name in files]
    if len(files) > 1 and not published:
        raise DataError(f"{path} has the weights {', '.join(files[:4])}: name one of them")
    return str(folder / (published or files)[0]) if files else ""
