"""Recognises photos, text and ratings that lie where records should, and names their command."""

from __future__ import annotations

import collections
import os
import re
import shlex

from common.data.shards import tensorflow

_PHOTOS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_RATINGS = ("ratings.csv", "ratings.dat", "train-ratings.csv", "u.data")
_LANGUAGE = re.compile(r"(?!vocab)(.+?)\.[a-z]{2}(\.gz)?")  # such as train.en
_RECORDS = re.compile(r"-\d{5}-of-\d{5}")
_MOST = 20  # folders that are looked into


def hint(folder: str) -> str:
    """What a folder without records holds, and the command that prepares it; "" for other things.

    Raises:
      tf.errors.OpError: the folder cannot be listed.
    """
    folders, own = _folders(folder), _names(folder)
    if any(map(_RECORDS.search, own)):
        return ""
    inside = {"": own} | {n: _names(f"{folder}/{n}") for n in folders[:_MOST]}
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
    elif flags := _languages(inside[""]):
        text, name = "text", "text"
    else:
        file = next((name for name in _RATINGS if name in inside[""]), "")
        return f"it holds {file}, which --config=configs/ncf.py trains on" if file else ""
    words = [
        f"--{key}={shlex.quote(f'{folder}/{path}'.rstrip('/'))}" for key, path in flags.items()
    ]
    out = shlex.quote(f"data/{os.path.basename(folder)}")
    return f"it holds {text}: python -m scripts.prepare {name} {' '.join(words)} --out={out}"


def _languages(names: list[str]) -> dict[str, str]:
    """The flags for text in two languages; {} if no two files have one name and two endings."""
    pairs = collections.defaultdict(list)
    for name in sorted(names, key=lambda name: ".en" not in name):
        if match := _LANGUAGE.fullmatch(name):
            pairs[match[1]].append(name)
    stems = [stem for stem in pairs if len(pairs[stem]) == 2]
    if not stems:
        return {}
    train = _first(stems, "train") or stems[0]
    others = [stem for stem in stems if stem != train] or [""]
    pairs[""] = ["OTHER_SOURCE", "OTHER_TARGET"]
    evaluated = _first(others, "val") or _first(others, "dev") or others[0]
    keys = ("train_source", "train_target", "eval_source", "eval_target")
    return dict(zip(keys, pairs[train] + pairs[evaluated], strict=True))


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
