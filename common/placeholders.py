r"""The placeholders of a text: what a translation must keep, such as `%s`, `{name}` or `<b>`.

| kind | such as | what counts |
|---|---|---|
| printf, Python, Objective-C | `%s` `%-10s` `%1$s` `%(name)d` `%@` `%%` | all of it |
| Qt, KDE | `%1` `%L2` `%n` | all of it, where the text has `%1` |
| Python, .NET, Ruby | `{}` `{0:N2}` `{name!r}` `%{n}` `${x}` `%name%` `$NAME$` | all of it |
| Mustache, Jinja, Angular | `{{ x }}` `{% if x %}` | all of it but blanks |
| ICU | `{n, plural, one {#} other {#}}` | `{n, plural}`, and what any of its branches has |
| tags | `<b>` `</b>` `<br />` `<a href="%s">` | the name, and what its values have |
| entities | `&amp;` `&#160;` `&nbsp;`, but no letters, quotes and dashes | all of it |

What people write is none: `50% of`, `100%ige`, Turkish `%50`, `$5`, `a < b`, `<file>`, `AT&T`.
"""

import html
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator

_SHOWN, _WIDTH = 4, 40  # placeholders in a phrase, and characters of each
_DEPTH, _LONGEST = 10, 10_000  # ICU messages in each other, and characters between braces
_PRINTF = r"(?!-[^\d*])[-+#0'I]*(?:\d+|\*)?(?:\.(?:\d+|\*)?)?(?:hh?|ll?|[Lqjzt]|I64)?"
_PRINTF = rf"(?:{_PRINTF}[diouxXeEfFgGaAcCsSpnmr@]|<PRI\w+>)"
_KINDS = rf"""
    (?P<url>https?://[^\s<>"'{{}}%]{{0,500}}(?:%[0-9A-Fa-f]{{2}}[^\s<>"'{{}}%]*)+)
    |%%|%\([^()%]+\){_PRINTF}|%[A-Za-z_][\w.]{{2,}}%(?![A-Za-z0-9_%(])|(?<!\d)%[A-Z_]{{4,}}|%Ln
    |(?P<printf>%\d+\${_PRINTF}|(?<!\d)%{_PRINTF}|%{_PRINTF}(?![^\W\d_]))
    |\$[A-Za-z_]\w+\$|\$\(\w+\)|\$\[\w+\]
    |(?P<entity>&(?:\#\d+|\#[xX][0-9A-Fa-f]+|[A-Za-z][A-Za-z0-9]+);)
    |(?P<brace>(?<!\\)(?:[$%](?=\{{[^\W\d]))?\{{)
    |<(?P<end>/?)(?P<tag>\w[\w:-]*)
        (?P<values>(?:\s+[\w:.-]+\s*=\s*(?>"[^"<]*"|'[^'<]*'|[^\s<>]+))*)\s*(?P<empty>/?)>
"""
_PATTERNS = {  # by whether the text is Qt's
    False: re.compile(_KINDS, re.VERBOSE),
    True: re.compile(rf"%L?\d{{1,2}}(?![\d$])|{_KINDS.replace('|%%|', '|')}", re.VERBOSE),
}
_IS_QT = re.compile(r"%L?1(?![\d$]|\.\d)")
_IS_DATE = re.compile(r"%[-_]?[BHMRTYbky](?![A-Za-z])|%-?[Il](?![\w'])")
_DIGITS = re.compile("'|(?<!R)I(?!64)")  # of printf: group the digits, or are those of the language
_FREE = {"&nbsp;", "&#160;", "&#8239;", "&thinsp;", "&shy;"}  # a translation may have more
_ALONE = {"b", "br", "em", "hr", "i", "img", "li", "p", "qt", "strong", "u", "wbr"}  # need no end
_ENDS = re.compile(r"</(\w[\w:-]*)\s*>")
_BRACES, _BLANKS = re.compile("[{}]"), re.compile(r"\s*([{}%|,:])\s*")
_PLURAL = re.compile(r"({{[A-Z]{4,}:[^|]*)\|.*", re.DOTALL)  # MediaWiki translates what follows
# A field of Python or .NET: a number or a name, its parts, conversion, alignment and format.
_FIELD = re.compile(
    r"\s*(?:\d*|[$@#/-]?[^\W\d]\w*)(?:\.\w+|-\w+|\[[^][{}]+\])*(?:![rsa])?(?:,\s?-?\d+)?"
    r"(?::\S*|(?<=\d):[^{}]*)?\s*"
)
_ICU = re.compile(
    r"\s*([\w.-]+)\s*,\s*(plural|selectordinal|select|number|date|time|spellout|ordinal|duration)"
    r"\s*(?:,\s*(?:offset:\d+)?|$)"
)
_BRANCH = re.compile(r"\s*([\w-]+|=\d+)\s*(?={)")
_COUNTS = re.compile(r"zero|one|two|few|many|other|=\d+")
_UNNUMBERED = re.compile(r"(%)([^%({\d]\S*|\d+[^\d$]\S*)|({)((?:[!:,].*)?})", re.DOTALL)


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
    balances = [text.count("{") - text.count("}") for text in (source, translation)]
    first = [*_all(source)]
    second = [*_all(translation, is_qt=bool(_IS_QT.search(source)))]
    then, now = Counter(first), Counter(second)
    if then == now and balances[0] != balances[1] and any("{" in name for name in then):
        return f"{'lacks' if abs(balances[1]) < abs(balances[0]) else 'adds'} a brace"
    if then == now or Counter(_numbered(first)) == Counter(_numbered(second)):
        return ""
    more = Counter({name: n for name, n in (now - then).items() if name not in _FREE})
    parts = (("lacks", then - now), ("adds", more))
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


def _all(text: str, depth: int = 0, is_qt: bool = False) -> Iterator[str]:
    """The placeholders of a text in their order."""
    if not _may_have(text):
        return
    is_qt = is_qt or bool(_IS_QT.search(text))
    pattern, position = _PATTERNS[is_qt], 0
    is_date, closed = _IS_DATE.search(text), {*map(str.lower, _ENDS.findall(text))}
    ends = _ends(text)
    while match := pattern.search(text, position):
        position = match.end()
        if match["brace"]:
            if inner := _in_braces(text, match, ends, depth):
                position = ends[position - 1]
                yield from inner
        elif name := match["tag"]:
            name, values = name.lower(), match["values"]
            # Else it is a word for something, such as <file>, which may be translated.
            if match["end"] or match["empty"] or values or name in _ALONE or name in closed:
                is_empty = match["empty"] and name not in _ALONE  # <br/> is <br>
                yield f"<{match['end']}{name}{'/' * bool(is_empty)}>"
                yield from _all(values, depth, is_qt)
        elif match["printf"]:
            if not is_date:  # languages have other fields in it
                yield _DIGITS.sub("", match[0])
        elif match["entity"]:
            text_of = html.unescape(match[0])  # languages have other letters and punctuation
            if text_of[1:] or text_of in "&<>" or unicodedata.category(text_of)[0] not in "LP":
                yield match[0]
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
    end = ends.get(begin, 0)
    if not 0 < end - begin < _LONGEST:
        return []
    inner, whole = text[begin + 1 : end - 1], text[match.start() : end]
    if ends.get(begin + 1) == end - 1 or inner[:1] == inner[-1:] == "%":
        return [_PLURAL.sub(r"\1}}", _BLANKS.sub(r"\1", whole))]
    if len(match[0]) > 1 or _FIELD.fullmatch(inner):
        return [whole]  # Python takes no blanks
    if not (icu := _ICU.match(inner)) or depth == _DEPTH:
        return []
    head, position = f"{{{icu[1]}, {icu[2]}", begin + 1 + icu.end()
    if icu[2] not in ("plural", "selectordinal", "select"):
        return [f"{head}}}"]
    branches = {}
    while branch := _BRANCH.match(text, position):
        position = ends[branch.end()]
        branches[branch[1]] = text[branch.end() + 1 : position - 1]
    if text[position : end - 1].strip() or "other" not in branches:
        return []
    if icu[2] == "select":  # its words are the program's
        head += f", {' '.join(sorted(branches))}"
    elif not all(map(_COUNTS.fullmatch, branches)):
        return []
    most: Counter[str] = Counter()  # languages have other branches, so the most of one counts
    for content in branches.values():
        most |= Counter(_all(content, depth + 1))
        most["#"] |= int(icu[2] != "select" and "#" in content)
    return [f"{head}}}", *most.elements()]
