"""Names of classes, users and items that look the same to people."""

import collections
import re
import unicodedata
from collections.abc import Iterable

# Signs without width that change no letter; U+200C and U+200D, which join or part some, stay.
_NO_WIDTH = re.compile("[\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")


def normal_name(name: str) -> str:
    """A name in a normal form, the same for all names that look the same.

    Unicode's forms NFC and NFD of a letter look the same, and so do blanks of all kinds; blanks
    without width are not seen.
    """
    return " ".join(unicodedata.normalize("NFC", _NO_WIDTH.sub("", name)).split())


def alike(names: Iterable[str]) -> list[list[str]]:
    """The groups of different names that people take for one: equal but for blanks and case."""
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for name in dict.fromkeys(names):
        groups[normal_name(unicodedata.normalize("NFKC", name)).casefold()].append(name)
    return [group for group in groups.values() if len(group) > 1]
