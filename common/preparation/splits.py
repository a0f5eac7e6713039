"""The words that say which split a folder, a file or a row of a table is for, in any data set."""

import re
from collections.abc import Iterable

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
