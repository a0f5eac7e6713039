"""The words that say which split a folder, a file or a row of a table is for."""

import re
from collections.abc import Iterable

_WORDS = {
    "train": "train training trainset traindata trainval trn",
    "validation": "val valid validation validate valset validset dev devel devset newsdev "
    "eval evaluation evalset heldout holdout",
    "test": "test testing testset testdata tst newstest pred prediction",
}
_SPLITS = {word: split for split, words in _WORDS.items() for word in words.split()}


def split_of(name: str) -> str:
    """The split that the first such word of a name says, as "train" of "seg_train", or ""."""
    words = re.findall("[a-z]+", name.lower())
    words += re.findall("[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower())  # PublicTest
    return next(filter(None, map(_SPLITS.get, words)), "")


def whole_split(name: str) -> str:
    """The split that a name means as a whole, such as "Training" or "val2017", or ""."""
    return _SPLITS.get(re.sub(r"[\d\W_]+", "", name.lower()), "")


def have_splits(names: Iterable[str]) -> bool:
    """Whether some names say that they are for training, and others that they are not.

    One kind alone says nothing: asyncio-dev.po is a page about the development of asyncio.
    """
    splits = {*map(split_of, names)}
    return "train" in splits and bool(splits & {"validation", "test"})
