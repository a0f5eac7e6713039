"""Documents of translators, back in their form: gettext's .po, XLIFF 1.2 and TMX.

Only what the model translates changes: other messages of a .po keep their lines, and of XLIFF and
TMX their XML.
"""

import collections
import contextlib
import copy
import functools
import gettext
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from etils import epath

from benchmarks.uses import Sentences
from commands.predict.model import Request
from commands.predict.outputs import Row, save, say
from commands.predict.sources import Line, check_apart, refusing
from common import limits, placeholders, translator_files
from common.errors import ConfigError, DataError, count
from common.text import shown
from common.translator_files import XML_LANG

_FORMS = {".po": "po", ".pot": "po", ".xlf": "xliff", ".xliff": "xliff", ".tmx": "tmx"}
_MACHINE = "MT!"  # as an author, for Okapi and Wordfast
_MARK = r"\{/?\d+\}"  # stands for a code, such as {1} and {/1} around bold text
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ENGLISH = "nplurals=2; plural=(n != 1);"
_PLURALS = {  # of the languages with other forms than English, as gettext's msginit writes them
    "nplurals=1; plural=0;": "id ja ko ms th vi zh",
    "nplurals=2; plural=(n > 1);": "fr pt-br",
    "nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 && "
    "(n%100<10 || n%100>=20) ? 1 : 2);": "be bs hr ru sr uk",
    "nplurals=3; plural=(n==1 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2);": "pl",
    "nplurals=3; plural=(n==1) ? 0 : (n>=2 && n<=4) ? 1 : 2;": "cs sk",
    "nplurals=3; plural=n==1 ? 0 : (n==0 || (n%100 > 0 && n%100 < 20)) ? 1 : 2;": "ro",
    "nplurals=6; plural=n==0 ? 0 : n==1 ? 1 : n==2 ? 2 : n%100>=3 && n%100<=10 ? 3 : n%100>=11 "
    "? 4 : 5;": "ar",
}


class Unit(NamedTuple):
    """A text to translate."""

    text: str  # with marks for its codes
    place: str  # in messages
    # Takes a translation and what is wrong with it, and adds what is wrong with its codes.
    write: Callable[[str, list[str]], None]


class Document(NamedTuple):
    """What is to be translated in a file, the number of its messages, and the file afterwards."""

    units: list[Unit]
    total: int
    content: Callable[[], bytes]


def read(request: Request, every: bool, n_best: int, uses: Sentences) -> Document | None:
    """The document among the sources of a request; None if these are lines.

    With `every` translated messages are to be translated, too.
    UserError for a file that cannot be read, another --out, or other languages than the model's.
    """
    ends = {each: os.path.splitext(each.lower())[1] for each in (*request.sources, request.out)}
    named = (each for each in request.sources if ends[each] in _FORMS)
    path = next((each for each in named if " " not in each or epath.Path(each).exists()), "")
    if not path:
        if every:
            raise ConfigError(f"--all goes with a document: {', '.join(_FORMS)}")
        return None
    form, is_alone = _FORMS[ends[path]], len(request.sources) == n_best == 1
    if not is_alone or request.format != "text" or _FORMS.get(ends[request.out]) != form:
        raise ConfigError(
            f"{shown(path)} is a document, which comes back in its form: give it alone, without "
            f"--format and --n_best, and with --out=NAME{ends[path].replace('.pot', '.po')}"
        )
    check_apart([path], [("out", request.out)])
    with refusing(f"cannot read {shown(path)}"):
        limits.check_file(path)
        limits.check_size(path, epath.Path(path).stat().length, limits.TEXT_BYTES)
        data = epath.Path(path).read_bytes()
    return (_catalog if form == "po" else _xml)(path, data, every, uses.languages)


def lines(document: Document) -> Iterator[Line]:
    """The lines of a document that the model is to translate."""
    for unit in document.units:
        yield from (Line(part, "", unit.place) for part, is_text in _parts(unit.text) if is_text)


def write(document: Document, rows: Iterator[Row], out: str) -> None:
    """Writes the document with the translations in the rows of its `lines`, and counts them.

    A text whose translation is empty, or of which a line has an error, stays untranslated.
    """
    done = faults = 0
    for unit in document.units:
        parts = [(part, next(rows) if is_text else None) for part, is_text in _parts(unit.text)]
        answers = [row for _, row in parts if row]
        if any(row.error for row in answers):
            continue
        found = ((part, row.content["translations"] if row else ()) for part, row in parts)
        text = "".join(every[0]["text"] if every else part for part, every in found)
        if not text.strip():
            say(f"{unit.place}: the model's translation is empty")
            continue
        wrong = [why for row in answers if (why := row.content.get("placeholders"))]
        unit.write(text, wrong)
        done, faults = done + 1, faults + bool(wrong)
    save(out, [document.content()])
    noted = f"; notes: {faults:,}, where placeholders or codes differ" if faults else ""
    say(f"{count(document.total, 'message')}: {count(done, 'text')} translated, to review{noted}")


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """The lines of a text, and what stays around them: blanks, marks, and lines without letters."""
    for i, line in enumerate(text.split("\n")):
        tokens = re.split(rf"(\s+|{_MARK})", line)  # what stays has odd numbers
        words = [k for k in range(0, len(tokens), 2) if tokens[k]]
        first, last = (words[0], words[-1] + 1) if words else (0, 0)
        core = "".join(tokens[first:last])
        yield "\n" * bool(i) + "".join(tokens[:first]), False
        words_only = re.sub(_MARK, "", core)
        for placeholder in placeholders.find(words_only):
            words_only = words_only.replace(placeholder, "")
        yield core, any(map(str.isalpha, words_only))
        yield "".join(tokens[last:]), False


def _check(path: str, said: tuple[str, str], languages: tuple[str, str]) -> None:
    """Refuses a document that names clearly other languages than the model's."""
    for side, tag, own in zip(("source", "target"), said, languages, strict=True):
        first, second = (re.split("[-_@.]", each.lower())[0] for each in (tag, own))
        if first and second and len(first) == len(second) and first != second:
            raise ConfigError(
                f"{shown(path)} says that its {side} language is {tag}, and the model translates "
                f"{languages[0] or '?'} to {languages[1] or '?'}: correct it, or take another model"
            )


def _catalog(path: str, data: bytes, every: bool, languages: tuple[str, str]) -> Document:
    """A .po or .pot; of a translated entry only the flags and msgstr change."""
    import polib

    catalog, lines = translator_files.catalog(data, path, DataError)
    fields = dict(catalog.metadata)
    _check(path, ("", fields.get("Language", "")), languages)
    rule, number, one, is_often = _plural_rule(fields.get("Plural-Forms", ""), languages[1])
    starts = [max(entry.linenum - 1, 0) for entry in catalog] + [len(lines)]
    # Lines are wrapped, unless a long one shows that they are not.
    width = 0 if any(len(line) > 100 and line.lstrip()[:1] == '"' for line in lines) else 78
    end = "\r" if lines[0].endswith("\r") else ""
    texts = collections.defaultdict[int, dict[int, str]](dict)  # by entry and form
    notes = collections.defaultdict[int, list[str]](list)
    units = []

    def add(index: int, forms: list[int], text: str, wrong: list[str]) -> None:
        texts[index].update(dict.fromkeys(forms, text))
        notes[index] += [f"# Machine translation: {each}{end}" for each in wrong]

    def replace(begin: int, stop: int, entry: Any) -> int:
        """Puts the msgstr of an entry into these lines, and returns where it begins."""
        first = begin
        while first < stop and not lines[first].lstrip().startswith("msgstr"):
            first += 1
        last = first
        while last < stop and lines[last].lstrip().startswith(("msgstr", '"')):
            last += 1
        lines[first:last] = [line + end for line in entry.__unicode__(width).split("\n")[1:-1]]
        return first

    for index, entry in enumerate(catalog):
        if entry.obsolete or not entry.msgid:
            continue
        is_plural, forms = bool(entry.msgid_plural), collections.defaultdict[str, list[int]](list)
        differs = is_often and placeholders.difference(entry.msgid, entry.msgid_plural)
        for i in range(number if is_plural else 1):
            if every or not (entry.msgstr_plural.get(i) if is_plural else entry.msgstr):
                is_one = not is_plural or (i == one and not differs)
                forms[entry.msgid if is_one else entry.msgid_plural].append(i)
        place = f"{shown(path)}, line {starts[index] + 1:,}"
        units += [Unit(each, place, functools.partial(add, index, forms[each])) for each in forms]

    def content() -> bytes:
        if not texts:
            return data
        for index in sorted(texts, reverse=True):  # so that the numbers of lines stay right
            entry, begin, new = catalog[index], starts[index], texts[index]
            forms = entry.msgstr_plural | new if entry.msgid_plural else {}
            new = polib.POEntry(msgstr=new.get(0, ""), msgstr_plural=forms)
            at = replace(begin, starts[index + 1], new)
            flags = next((i for i in range(begin, at) if lines[i].startswith("#,")), -1)
            if flags >= 0 and not entry.fuzzy:
                lines[flags] = lines[flags].replace("#,", "#, fuzzy,", 1)
            elif not entry.fuzzy:
                starting = ("#|", "msg")
                at = next(i for i in range(begin, at) if lines[i].lstrip().startswith(starting))
                lines.insert(at, f"#, fuzzy{end}")
            known = {*lines[begin : starts[index + 1]]}
            lines[begin:begin] = [each for each in notes[index] if each not in known]
        head = dict(fields)
        if not fields.get("Language") and languages[1]:
            first, *more = languages[1].split("-")  # pt_BR for pt-br
            more = (each.upper() if len(each) == 2 else each.title() for each in more)
            head["Language"] = "_".join([first, *more])
        if not re.search("charset=utf-8", fields.get("Content-Type", ""), re.IGNORECASE):
            head["Content-Type"] = "text/plain; charset=UTF-8"
        if any(entry.msgid_plural for entry in catalog):
            head["Plural-Forms"] = rule
        if head != fields:
            if not starts[0]:  # the first entry is no header
                lines[:0] = [f'msgid ""{end}', f'msgstr ""{end}', end]
            text = "".join(f"{name}: {value}\n" for name, value in head.items())
            replace(0, len(lines), polib.POEntry(msgstr=text))
        return "\n".join(lines).encode()

    return Document(units, len(catalog), content)


def _plural_rule(said: str, target: str) -> tuple[str, int, int, bool]:
    """The rule that a header says, else the language's; the number of forms; the one for 1.

    The last value says whether the form is for other numbers, too, as 21 and 31 in Russian.
    """
    tags = target, target.split("-")[0]
    known = (rule for tag in tags for rule, names in _PLURALS.items() if tag in names.split())
    for rule in (said, *known, _ENGLISH):
        match = re.search(r"nplurals\s*=\s*(\d)\s*;\s*plural\s*=\s*([^;]+)", rule)
        with contextlib.suppress(ValueError, ArithmeticError):
            if match:
                forms = [*map(gettext.c2py(match[2]), range(1000))]
                return rule, int(match[1]), forms[1], forms.count(forms[1]) > 4
    raise AssertionError


def _xml(path: str, data: bytes, every: bool, languages: tuple[str, str]) -> Document:
    """XLIFF 1.2 or TMX."""
    root = translator_files.parse(data, path, DataError)
    is_tmx, tree = path.lower().endswith(".tmx"), root.getroottree()

    def content() -> bytes:
        head = re.match(rb"(\xef\xbb\xbf)?<\?xml[^>]*\?>\s*", data)  # as it was written
        encoding = tree.docinfo.encoding or "UTF-8"
        text = translator_files.etree().tostring(tree, encoding=encoding, xml_declaration=not head)
        text += b"\n" * data.endswith(b"\n")
        text = text.replace(b"\n", b"\r\n") if b"\r\n" in data[:1000] else text
        return (head[0] if head else b"") + text

    units = [*(_tmx if is_tmx else _xliff)(path, root, every, languages)]
    return Document(units, len([*root.iter("{*}tu" if is_tmx else "{*}trans-unit")]), content)


def _xliff(path: str, root: Any, every: bool, languages: tuple[str, str]) -> Iterator[Unit]:
    """The units of an XLIFF without a translation, or with one that says it is none."""
    if root.get("version", "1").startswith("2"):
        raise DataError(
            f"{shown(path)} is XLIFF {root.get('version')}, and only 1.2 can be translated: export "
            "it as 1.2, or as .po"
        )

    def put(unit: Any, source: Any, codes: Mapping[str, Any], text: str, wrong: list[str]) -> None:
        target = unit.find("{*}target")
        target = _after(source, "target", {}) if target is None else target
        attributes = dict(target.attrib)
        target.clear(keep_tail=True)
        state = {"state": "needs-review-translation", "state-qualifier": "mt-suggestion"}
        target.attrib.update(attributes | state)
        _fill(target, text, codes, wrong)
        for each in wrong:
            _after(target, "note", {"from": "machine translation"}).text = each
        if unit.get("approved") == "yes":
            unit.set("approved", "no")
        for file in unit.iterancestors("{*}file"):
            if languages[1] and not file.get("target-language"):
                file.set("target-language", languages[1])

    for unit in root.iter("{*}trans-unit"):
        names = ("source", "seg-source", "target")
        source, segments, target = (unit.find(f"{{*}}{name}") for name in names)
        source = source if segments is None else segments
        says = (node.get("translate") for node in (unit, *unit.iterancestors()))
        if source is None or next(filter(None, says), "yes") == "no":
            continue
        is_empty = target is None or not ("".join(target.itertext()).strip() or len(target))
        state = "new" if target is None or is_empty else target.get("state")
        if every or state in ("new", "needs-translation"):
            _check(path, translator_files.xliff_languages(unit), languages)
            text, codes = _marked(source)
            place = f"{shown(path)}, line {source.sourceline:,}"
            if text.strip():
                yield Unit(text, place, functools.partial(put, unit, source, codes))


def _tmx(path: str, root: Any, every: bool, languages: tuple[str, str]) -> Iterator[Unit]:
    """The units of a TMX with the source language and without the target, or a machine's."""
    source = languages[0] or next((node.get("srclang", "") for node in root.iter("{*}header")), "")
    target, total = languages[1], 0
    if not target:
        fix = "prepare the data again with --source_language and --target_language"
        raise ConfigError(f"{shown(path)}: the model does not say its target language; {fix}")

    def put(first: Any, old: Any, codes: Mapping[str, Any], text: str, wrong: list[str]) -> None:
        name = "lang" if first.get(XML_LANG) is None else XML_LANG
        new = _after(first, "tuv", {name: target, "creationid": _MACHINE}) if old is None else old
        del new[:]
        segment = copy.copy(first.find("{*}seg"))
        _fill(segment, text, codes, wrong)
        new.append(segment)
        for each in wrong:  # notes stand first
            note = new.makeelement(segment.tag.replace("seg", "note"))
            note.text = f"Machine translation: {each}"
            new.insert(0, note)

    for unit in root.iter("{*}tu"):
        sides = [(translator_files.language(side), side) for side in unit.iterfind("{*}tuv")]
        first, old = (
            next((side for word, side in sides if _is(word, tag)), None) for tag in (source, target)
        )
        segment = None if first is None else first.find("{*}seg")
        if segment is None:
            continue
        total += 1
        if old is None or (every and old.get("creationid") == _MACHINE):
            text, codes = _marked(segment)
            place = f"{shown(path)}, line {segment.sourceline:,}"
            if text.strip():
                yield Unit(text, place, functools.partial(put, first, old, codes))
    if not total:
        raise ConfigError(f"{shown(path)} has no text of {source or 'its source language'}")


def _is(word: str, tag: str) -> bool:
    """Whether two tags name one language: en-US is en, and pt-BR is not pt-PT."""
    first, second = (f"{each.lower().replace('_', '-')}-" for each in (word, tag))
    return first.startswith(second) or second.startswith(first)


def _after(node: Any, name: str, attributes: Mapping[str, str]) -> Any:
    """A new element after another, of the same namespace and with the same space around it."""
    new = node.makeelement("".join([*node.tag.rpartition("}")[:2], name]), attributes)
    node.addnext(new)
    before = node.getparent().text or ""
    new.tail, node.tail = node.tail, node.tail if before.strip() else before
    return new


def _marked(segment: Any) -> tuple[str, dict[str, Any]]:
    """The text of a segment with a mark for each code, and the elements of the marks."""
    texts, codes, numbers = [], dict[str, Any](), dict[Any, int]()
    pieces = [*translator_files.pieces(segment)]
    own = re.findall(r"\{/?(\d{1,9})\}", "".join(each for each in pieces if isinstance(each, str)))
    first = max(map(int, own), default=0) + 1
    for piece in pieces:
        if not isinstance(piece, str):
            node, end = piece
            piece = f"{{{end}{numbers.setdefault(node, first + len(numbers))}}}"
            codes[piece] = node
        texts.append(piece)
    text = "".join(texts)
    if segment.xpath("ancestor-or-self::*[@xml:space][1]/@xml:space") != ["preserve"]:
        text = re.sub(r"(?<=\S)[ \t]*\n[ \t]+(?=\S)", " ", text)  # the XML is indented
    return text, codes


def _fill(node: Any, text: str, codes: Mapping[str, Any], wrong: list[str]) -> None:
    """Puts a translation with its codes into an element; adds to `wrong` if they are left out."""
    parts = re.split(f"({_MARK})", _NOT_XML.sub("", text))
    marks = [part for part in parts if part in codes]
    # The begin and the end of a pair may be elements of their own.
    halves = ("bpt", "ept", "bx", "ex")
    order, expected = (
        [mark for mark in every if str(codes[mark].tag).endswith(halves)]
        for every in (marks, codes)
    )
    fits = sorted(marks) == sorted(codes) and order == expected
    del node[:]
    node.text = None
    opened, place, attribute = [("", node)], node, "text"  # where text goes on
    for is_code, group in itertools.groupby(parts, codes.__contains__):
        for part in group if is_code and fits else ():
            if part[1] == "/":
                end, place = opened.pop()
                fits, attribute = end == part, "tail"  # else crossed
                continue
            code, end = codes[part], part.replace("{", "{/")
            place = node.makeelement(code.tag, code.attrib) if end in codes else copy.deepcopy(code)
            opened[-1][1].append(place)
            place.tail, attribute = None, "tail"
            if end in codes:
                opened, attribute = [*opened, (end, place)], "text"
        if not is_code:
            setattr(place, attribute, "".join(group))
    if not fits:
        del node[:]
        node.text = "".join(part for part in parts if part not in codes)
        wrong.append("the codes of the layout are left out")
