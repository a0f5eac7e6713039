"""Recognises photos that are not yet prepared, and knows the command that prepares them."""

from __future__ import annotations

import os
import shlex

from ops.shards import tensorflow

_PHOTOS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_MOST = 20  # folders that are looked into


def hint(folder: str) -> str:
    """What a folder without records holds, and the command that prepares it; "" for other things.

    Raises:
      tf.errors.OpError: the folder cannot be listed.
    """
    folders = _folders(folder)
    inside = {"": _names(folder)} | {n: _names(f"{folder}/{n}") for n in folders[:_MOST]}
    files = [os.path.join(n, file) for n in inside for file in inside[n] if file.endswith(".json")]
    lists = [file for file in files if _lists_images(f"{folder}/{file}")]
    pictured = [name for name in inside if any(map(_is_photo, inside[name]))]
    train, val = (_first(folders, split) for split in ("train", "val"))
    if lists and pictured:
        file = _first(lists, "train") or lists[0]
        text, name = f"photos and {file}", "coco"
        flags = {"train_images": train if train in pictured else "", "train_annotations": file}
        flags |= {"val_images": val} if val in pictured else {}
        flags["val_annotations"] = _first(lists, "val") or "ANOTHER.json"
    elif classes := [name for name in pictured if name]:
        count = len(folders) if len(classes) == _MOST else len(classes)
        text, name, flags = f"{count} folders of photos", "imagenet --layout=folder", {"train": ""}
    elif pictured:
        return "it holds photos, but no folder for each class and no annotations in COCO's form"
    elif train and "--train=" in hint(f"{folder}/{train}"):
        text, name, flags = "folders of photos", "imagenet --layout=folder", {"train": train}
        flags |= {"validation": val} if val else {}
    else:
        return ""
    words = [
        f"--{key}={shlex.quote(f'{folder}/{path}'.rstrip('/'))}" for key, path in flags.items()
    ]
    out = shlex.quote(f"data/{os.path.basename(folder)}")
    return f"it holds {text}: python -m scripts.prepare {name} {' '.join(words)} --out={out}"


def _names(path: str) -> list[str]:
    return sorted(name.rstrip("/") for name in tensorflow().io.gfile.listdir(path))


def _folders(path: str) -> list[str]:
    isdir = tensorflow().io.gfile.isdir
    return [name for name in _names(path) if not _is_photo(name) and isdir(f"{path}/{name}")]


def _lists_images(path: str) -> bool:
    """Whether a file begins as annotations in COCO's form may."""
    with tensorflow().io.gfile.GFile(path, "rb") as file:
        start = file.read(1 << 20)
    return any(key in start for key in (b'"images"', b'"annotations"'))


def _is_photo(name: str) -> bool:
    return name.lower().endswith(_PHOTOS)


def _first(names: list[str], part: str) -> str:
    return next((name for name in names if part in name.lower()), "")
