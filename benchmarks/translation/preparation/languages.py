"""Names of languages: tells which two of several columns, keys or files are a translation."""

import collections
import re
from collections.abc import Iterable, Sequence

# In names of files, columns and keys: ISO 639-1 and -3, and English. Flags may name others.
_WORDS = """source src, target tgt trg, en eng english, de deu ger german, fr fra fre french,
es spa spanish, it ita italian, pt por portuguese, nl nld dut dutch, ru rus russian,
zh zho chi cmn chinese, ja jpn japanese, ko kor korean, ar ara arabic, tr tur turkish,
pl pol polish, cs ces cze czech, sk slk slo slovak, sl slv slovenian, ro ron rum romanian,
hu hun hungarian, fi fin finnish, sv swe swedish, da dan danish, nb nob, no nor norwegian,
is isl ice icelandic, et est estonian, lv lav latvian, lt lit lithuanian, el ell gre greek,
bg bul bulgarian, hr hrv croatian, sr srp serbian, uk ukr ukrainian, he heb hebrew,
fa fas per persian, hi hin hindi, bn ben bengali, ta tam tamil, vi vie vietnamese, th tha thai,
id ind indonesian, ca cat catalan, eu eus basque, gl glg galician, ga gle irish, cy cym welsh"""
_CODES = {word: row.split()[0] for row in _WORDS.split(",") for word in row.split()}
_VARIANT = r"([A-Za-z]+)(?:[-_](?:[A-Z][A-Za-z]{1,3}|[a-z]{2}|[0-9]{3}))*"  # en-US, eng_Latn


def code(word: str) -> str:
    """The language code that a word stands for; "source" and "target" are codes too; or ""."""
    match = re.fullmatch(_VARIANT, word.strip())
    return _CODES.get(match[1].lower(), "") if match else ""


def named(names: Iterable[str], wanted: tuple[str, str] = ("", "")) -> dict[str, str]:
    """The names of languages, by code: "de"; else a part, as in "text_de" and "German words".

    Languages that are `wanted` need not be known here.
    """
    sides: dict[str, str] = {}
    parts: dict[str, str] = {}
    others = {*map(str.lower, wanted)} - {""}
    for name in names:
        word = name.strip()
        if known := code(word) or (word.lower() if word.lower() in others else ""):
            sides.setdefault(known, name)
        elif len(word) < 40:
            label = re.fullmatch(r"\w+?[_.-]([A-Za-z]+?)(?:_[A-Z][a-z]{3})?", word)
            words = [label[1]] if label else re.findall(r"[A-Za-z]{5,}", word)
            parts.setdefault(next(filter(None, map(code, words)), ""), name)
    return sides | {each: parts[each] for each in parts if each and each not in sides}


def choose(names: Iterable[str], wanted: tuple[str, str] = ("", "")) -> Sequence[str]:
    """The names of the source and of the target; () if they are not clear.

    The languages in `wanted` come first; each may be "". Then the words source and target count.
    Otherwise English is the source, or the first name where none is English.
    """
    source, target = (code(word) or word.lower() for word in wanted)
    sides = named(names, wanted)
    if {"source", "target"} <= {*sides} and not {source, target} <= {*sides}:
        source, target = "source", "target"
    missing = [source, target].count("")
    rest = [each for each in sides if each not in (source, target)]
    if len(rest) > missing:  # columns "id" and "no" hold numbers
        rest = [each for each in rest if each not in ("id", "no", "source", "target")]
    if missing and len(rest) != missing:
        return ()
    rest.sort(key=lambda each: each != "en")
    source = source or rest.pop(0)
    target = target or rest.pop(0)
    return (sides[source], sides[target]) if {source, target} <= {*sides} else ()


def pairs(names: Iterable[str]) -> tuple[Sequence[str], list[tuple[str, str]]]:
    """The names that differ in the language only, such as x.de-en.en and x.de-en.de.

    The last word of a name that is a language counts. If there are more than two languages, the two
    that most names have are taken; at equal numbers English, German, then the alphabet's order.

    Returns:
        The codes of source and target, and the pairs of names; neither if there is no pair.
    """
    stems: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for name in names:
        if words := [word for word in re.finditer(r"[A-Za-z]+", name) if code(word[0])]:
            stem = name[: words[-1].start()] + "*" + name[words[-1].end() :]
            stems[stem.removesuffix(".gz")][code(words[-1][0])] = name
    groups = [sides for sides in stems.values() if len(sides) > 1]
    counts = collections.Counter(each for sides in groups for each in sides)
    ranks = {each: (-number, each not in ("en", "de"), each) for each, number in counts.items()}
    if not (codes := choose(sorted(ranks, key=lambda each: ranks[each])[:2])):
        return (), []
    source, target = codes
    full = [sides for sides in groups if source in sides and target in sides]
    return codes, [(sides[source], sides[target]) for sides in full]
