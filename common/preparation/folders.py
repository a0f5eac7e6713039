"""The files of what a user points at, and what they may be."""

import dataclasses
import os
import re
from collections.abc import Iterable
from typing import NamedTuple, Self

from common import limits, pools
from common.preparation import sources
from common.tensorflow import tensorflow
from common.text import decoded


@dataclasses.dataclass(frozen=True)
class Folder:
    """The files of a folder, or one file."""

    path: str  # the folder, local or gs://; for one file, the folder that holds it
    files: tuple[sources.File, ...]  # sorted by names relative to `path`, without hidden files
    is_file: bool = False  # whether the user named the file
    flags: tuple[str, ...] = ()  # what the user typed beside the path

    @classmethod
    def open(cls, path: str) -> Self:
        """Lists a folder with all folders in it; a file is a folder of one file."""
        gfile = tensorflow().io.gfile
        if gfile.exists(path) and not gfile.isdir(path):
            limits.check_file(path, sources.SourceError)
            folder, name = os.path.split(path)
            return cls(folder or ".", (sources.File(name, gfile.stat(path).length),), True)
        source = sources.list_input(path, pools.threads(path))
        return cls(source.path, tuple(source.files))

    @property
    def given(self) -> str:
        """The path that the user gave: the folder's, or the one file's."""
        return self.full(self.files[0].name if self.is_file else "")

    def inner(self) -> Self | None:
        """The only folder at the top, without the files beside it; None if there are others."""
        tops = {top for top, slash, _ in (f.name.partition("/") for f in self.files) if slash}
        if len(tops) != 1:
            return None
        top = f"{tops.pop()}/"
        files = [f._replace(name=f.name[len(top) :]) for f in self.files if f.name.startswith(top)]
        return dataclasses.replace(self, path=self.full(top[:-1]), files=tuple(files))

    def named(self, *suffixes: str) -> list[str]:
        """The names that end with one of the lower-case suffixes, in any case."""
        return [file.name for file in self.files if file.name.lower().endswith(suffixes)]

    def full(self, name: str) -> str:
        """The path of a file; '' is the folder itself."""
        return os.path.join(self.path, name) if name else self.path

    def head(self, name: str, size: int = 1 << 16) -> bytes:
        """The first bytes of a file."""
        with tensorflow().io.gfile.GFile(self.full(name), "rb") as file:
            return file.read(size)

    def text(self, name: str) -> str:
        """A text file; SourceError if its encoding is not known."""
        return decoded(self.head(name, limits.TEXT_BYTES), self.full(name), sources.SourceError)


class DatasetFormat(NamedTuple):
    """A format that a folder has, such as COCO's, YOLO's, or photos in class folders."""

    preparation: str  # that reads it, such as "coco"
    name: str  # the value of --as that chooses it, such as "yolo"
    evidence: str  # what lies there and how it is known: "12 folders of JPEGs: classes"
    output: str  # of the preparation: "records of 12 classes, a tenth for validation"
    arguments: list[str]  # of the preparation, without --out
    num_files: int  # of several formats the one with more is likelier; 0: only by --as


_WORDS = {
    "train": "train training trainset traindata trainval trn",
    "validation": "val valid validation validate valset validset dev devel devset newsdev "
    "eval evaluation evalset heldout holdout",
    "test": "test testing testset testdata tst newstest pred prediction",
}
_SPLITS = {word: split for split, words in _WORDS.items() for word in words.split()}
COLUMNS = ("split", "set", "subset", "partition", "usage")  # in tables, perhaps with s or "data_"


def split_of(path: str, outermost: bool = False) -> str:
    """The split that a path says: "train", "validation", "test" or "".

    The innermost part with such a word counts, or the outermost: folders below may be classes.
    """
    for part in path.split("/")[:: 1 if outermost else -1]:
        name = re.sub(r"(?i)(held|hold)[\W_]+out", r"\1out", part)
        spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)  # PublicTest
        words = re.findall("[a-z]+", f"{name} {spaced}".lower())
        if split := next(filter(None, map(_SPLITS.get, words)), ""):
            return split
    return ""


def whole_split(name: str) -> str:
    """The split that a name means as a whole, such as "Training" or "val2017", or ""."""
    return _SPLITS.get(re.sub(r"[\d\W_]+", "", name.lower()), "")


def have_splits(paths: Iterable[str]) -> bool:
    """Whether some paths say training, and others not; asyncio-dev.po alone is documentation."""
    splits = {*map(split_of, paths)}
    return "train" in splits and bool(splits & {"validation", "test"})
