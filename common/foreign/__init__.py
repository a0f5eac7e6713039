"""Weights of other libraries: .safetensors, PyTorch's .pth, TensorFlow's checkpoints.

Nothing in them runs. `find` says which file a path means; `files.read` reads it, and is imported
for such a file only.
"""

from __future__ import annotations

import re

from etils import epath

from common.errors import DataError, one_line
from common.foreign import checkpoints, downloads

# Published weights that messages and the preparations name; docs/models.md has more.
RESNET = "hf-hub:timm/resnet{depth}.a1_in1k"  # of depth 18, 34, 50, 101 or 152
MASK_RCNN = "https://download.pytorch.org/models/maskrcnn_resnet50_fpn_coco-bf2d0c1e.pth"
_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".pth.tar")
# The names of files that together are a checkpoint of TensorFlow
_PART = re.compile(r"\.(index|meta)$|-\d{5}-of-\d{5}$")


def is_name(path: str) -> bool:
    """Whether weights have to be downloaded, see `common.foreign.downloads`."""
    return path.startswith(("hf-hub:", "https://"))


def describe(file: str) -> str:
    """What a file is that `find` returned, in words."""
    if checkpoints.is_second(file) or checkpoints.is_first(file):
        return f"a checkpoint of TensorFlow with the arrays {checkpoints.listed(file)}"
    return f"{file} is a file, as other libraries write their weights"


def find(path: str) -> str:
    """The file of weights that a path means, local, gs:// or a name; "" if it is none.

    A file is one whatever its name. A folder is one if it has a file of weights and no folder
    `checkpoints`. Of a checkpoint of TensorFlow it is the prefix.

    Raises:
      DataError: a folder has several files of weights, or cannot be listed, or weights cannot be
        downloaded.
    """
    if is_name(path):
        _, path = downloads.fetch(path)
    try:
        folder = epath.Path(path)
        if not folder.is_dir():
            file = path if folder.exists() else ""
            return file if file and not _PART.search(path) else checkpoints.find(path) or file
        if (folder / "checkpoints").exists():
            return ""
        names = sorted(p.name for p in folder.iterdir())
        files = [name for name in names if name.endswith(_SUFFIXES)]
        if not files and any(_PART.search(name) for name in names):
            return checkpoints.newest(folder, names)
    except DataError:
        raise
    except Exception as error:  # gs:// raises TensorFlow's own classes
        raise DataError(f"cannot read {path}: {one_line(error)}") from error
    published = [name for name in downloads.PUBLISHED if name in files]
    if len(files) > 1 and not published:
        raise DataError(f"{path} has the weights {', '.join(files[:4])}: name one of them")
    return str(folder / (published or files)[0]) if files else ""
