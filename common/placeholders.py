r"""The placeholders of a text: what a translation must keep, such as `%s`, `{name}` or `<b>`.

| kind | such as | what counts |
|---|---|---|
| printf, Python, Objective-C | `%s` `%-10s` `%1$s` `%(name)d` `%@` `%%` | all of it |
| Qt, KDE | `%1` `%L2` `%n` | all of it, where the text has `%1` |
| Python, .NET, Ruby | `{}` `{0:N2}` `{name!r}` `%{n}` `${x}` `%name%` `$NAME$` | all of it |
| Mustache, Jinja, Angular | `{{ x }}` `{% if x %}` | all of it but blanks |
| ICU | `{n, plural, one {#} other {#}}` | `{n, plural}`, and what any of its branches has |
| tags | `<b>` `</b>` `<br />` `<a href="%s">` | the name, and what its values have |
| entities | `&amp;` `&#160;` | all of it |

What people write is none: `50% of`, `100%ige`, Turkish `%50`, `$5`, `a < b`, `<file>`, `AT&T`.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator

_SHOWN, _WIDTH = 4, 40  # placeholders in a phrase, and characters of each
_DEPTH = 10  # of ICU messages in each other
_PRINTF = r"(?!-[^\d*])[-+#0']*(?:\d+|\*)?(?:\.(?:\d+|\*)?)?(?:hh?|ll?|[Lqjzt]|I64)?"
_PRINTF = rf"(?:{_PRINTF}[diouxXeEfFgGaAcCsSpnmr@]|<PRI\w+>)"
_KINDS = rf"""
    (?P<url>https?://[^\s<>"'{{}}%]*(?:%[0-9A-Fa-f]{{2}}[^\s<>"'{{}}%]*)+)
    |(?P<whole>%%|%(?:\([^()%]+\)|\d+\$){_PRINTF}|%[A-Za-z_][\w.]{{2,}}%(?![\w%(])|%L?n\b
        |(?<!\d)%{_PRINTF}|%{_PRINTF}(?![^\W\d_])|\$[A-Za-z_]\w+\$
        |&(?:\#\d+|\#[xX][0-9A-Fa-f]+|[A-Za-z][A-Za-z0-9]+);)
    |(?P<brace>(?<!\\)[$%\#]?\{{)
    |<(?P<end>/?)(?P<tag>\w[\w:-]*)(?P<values>(?:\s+[\w:.-]+\s*=\s*(?:"[^"]*"|'[^']*'|[^\s<>]+))*)
        \s*(?P<empty>/?)>
"""
_PATTERNS = {
    False: re.compile(_KINDS, re.VERBOSE),
    True: re.compile(rf"(?P<qt>%L?\d{{1,2}}(?![\d$]))|{_KINDS}", re.VERBOSE),
}
_IS_QT = re.compile(r"%L?1(?![\d$.])")
# Tags of HTML, which count without an end.
_HTML = (
    "a abbr b big blockquote br button cite code dd div dl dt em font h1 h2 h3 h4 h5 h6 hr i img "
    "input kbd label li ol p pre q s samp small span strike strong sub sup table td th tr tt u ul "
    "var wbr"
)
_HTML = frozenset(_HTML.split())
_BRACES, _BLANKS = re.compile("[{}]"), re.compile(r"\s*([{}%|,:])\s*")
# A field of Python or .NET: a number or a name, its parts, conversion, alignment and format.
_FIELD = re.compile(
    r"\s*(?:\d*|[^\W\d]\w*)(?:\.\w+|-\w+|\[[^][{}]+\])*(?:![rsa])?(?:,\s?-?\d+)?"
    r"(?::\S*|(?<=\d):[^{}]*)?\s*"
)
_ICU = re.compile(
    r"\s*([\w.-]+)\s*,\s*(plural|selectordinal|select|number|date|time|spellout|ordinal|duration)"
    r"\s*(?:,\s*(?:offset:\d+)?|$)"
)
_BRANCH = re.compile(r"\s*([\w-]+|=\d+)\s*(?={)")
_PLURALS = re.compile(r"zero|one|two|few|many|other|=\d+")
_UNNUMBERED = re.compile(r"(%)([^%(<{\d]\S*|\d+[^\d$]\S*)|({)((?:[!:,].*)?})", re.DOTALL)


def find(text: str) -> Counter[str]:
    """The placeholders of a text, in a normal form that is the same for equal ones, counted."""
    return Counter(_all(text))


def difference(source: str, translation: str) -> str:
    """How the placeholders of two texts differ, such as "lacks %s, adds {name}"; "" if they agree.

    Their order is free. Fields with numbers equal those without in the order of the numbers, as
    `%2$d` and `{1}` equal the second `%d` and `{}`.
    """
    if not (_may_have(source) or _may_have(translation)) or source == translation:
        return ""
    first, second = [*_all(source)], [*_all(translation)]
    then, now = Counter(first), Counter(second)
    if then == now or Counter(_numbered(first)) == Counter(_numbered(second)):
        return ""
    parts = (("lacks", then - now), ("adds", now - then))
    return ", ".join(f"{verb} {_phrase(counts)}" for verb, counts in parts if counts)


def _may_have(text: str) -> bool:
    """Whether a text has a character that begins a placeholder; most texts have none."""
    return "%" in text or "{" in text or "<" in text or "&" in text or "$" in text


def _phrase(counts: Counter[str]) -> str:
    """Some placeholders in words."""
    every = [*counts.elements()]
    shown = [name if len(name) <= _WIDTH else f"{name[: _WIDTH - 1]}…" for name in every[:_SHOWN]]
    return " ".join(shown) + (f" and {len(every) - _SHOWN:,} more" * (len(every) > _SHOWN))


def _numbered(every: Iterable[str]) -> Iterator[str]:
    """The placeholders, with the numbers of arguments that those without have."""
    numbers = {"%": itertools.count(1), "{": itertools.count()}
    for each in every:
        if not (match := _UNNUMBERED.fullmatch(each)):
            yield each
        elif match[1]:
            yield f"%{next(numbers['%'])}${match[2]}"
        else:
            yield f"{{{next(numbers['{'])}{match[4]}"


def _all(text: str, depth: int = 0) -> Iterator[str]:
    """The placeholders of a text in their order."""
    if not _may_have(text):
        return
    pattern, position = _PATTERNS[bool(_IS_QT.search(text))], 0
    ends = _ends(text)
    while match := pattern.search(text, position):
        position = match.end()
        if match["brace"]:
            inner = [] if position - 1 not in ends else _in_braces(text, match, ends, depth)
            if inner:
                position = ends[position - 1]
                yield from inner
        elif name := match["tag"]:
            name = name.lower()
            is_tag = name in _HTML or match["end"] or match["empty"] or match["values"]
            if is_tag or f"</{name}>" in text.lower():
                is_open = name in _HTML or not match["empty"]  # <br/> is <br>
                yield f"<{match['end']}{name}{'' if is_open else '/'}>"
                yield from _all(match["values"], depth)
        elif not match["url"]:
            yield match[0]


def _ends(text: str) -> dict[int, int]:
    """The end of each pair of braces, by its start."""
    begun, ends = [], {}
    for match in _BRACES.finditer(text):
        if match[0] == "{":
            begun.append(match.start())
        elif begun:
            ends[begun.pop()] = match.end()
    return ends


def _in_braces(text: str, match: re.Match[str], ends: dict[int, int], depth: int) -> list[str]:
    """The placeholders that the braces at a match are; [] if they are none."""
    begin = match.end() - 1
    end = ends[begin]
    inner, whole = text[begin + 1 : end - 1], _BLANKS.sub(r"\1", text[match.start() : end])
    if inner[:1] + inner[-1:] in ("{}", "%%") or len(match[0]) > 1:
        # MediaWiki translates what follows {{PLURAL:$1|
        return [re.sub(r"^({{[A-Z]{4,}:[^|]*)\|.*", r"\1}}", whole, flags=re.DOTALL)]
    if _FIELD.fullmatch(inner):
        return [whole]
    if not (icu := _ICU.match(inner)) or depth == _DEPTH:
        return []
    head, position = f"{{{icu[1]}, {icu[2]}", begin + 1 + icu.end()
    if icu[2] not in ("plural", "selectordinal", "select"):
        return [f"{head}}}"]
    branches: dict[str, Counter[str]] = {}
    while branch := _BRANCH.match(text, position):
        position = ends[branch.end()]
        content = text[branch.end() + 1 : position - 1]
        branches[branch[1]] = Counter(_all(content, depth + 1))
        if icu[2] != "select":
            branches[branch[1]]["#"] = int("#" in content)
    if text[position : end - 1].strip() or "other" not in branches:
        return []
    if icu[2] == "select":  # its words are the program's
        head += f", {' '.join(sorted(branches))}"
    elif not all(map(_PLURALS.fullmatch, branches)):
        return []
    most: Counter[str] = Counter()
    for counts in branches.values():
        most |= counts  # languages have other branches, so the most of one counts
    return [f"{head}}}", *most.elements()]
