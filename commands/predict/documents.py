"""Documents of translators, back in their form: gettext's .po, XLIFF 1.2 and TMX.

Only what the model translates changes: other messages keep their bytes in a .po, and their XML.
"""

import contextlib
import copy
import functools
import gettext
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from commands.predict.model import Request
from commands.predict.outputs import Row, save, say
from commands.predict.sources import Line, check_apart, refusing
from common import limits, placeholders, translator_files
from common.errors import ConfigError, DataError, count
from common.text import shown
from common.translator_files import XML_LANG

FORMS = {".po": "po", ".pot": "po", ".xlf": "xliff", ".xliff": "xliff", ".tmx": "tmx"}
_BY = "MT!"  # the author of translations that Okapi and Wordfast take for a machine
_MARK = r"\{/?\d+\}"  # stands for a code, such as {1} and {/1} around bold text
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PLURALS = {  # of languages whose forms are not those of English, as msginit of gettext writes them
    "nplurals=1; plural=0;": "id ja ko ms my th vi zh",
    "nplurals=2; plural=(n > 1);": "fr oc pt-br",
    "nplurals=2; plural=(n%10!=1 || n%100==11);": "is mk",
    "nplurals=3; plural=(n==1 ? 0 : n%10>=2 && n%10<=4 && (n%100<12 || n%100>14) ? 1 : 2);": "pl",
    "nplurals=3; plural=(n==1) ? 0 : (n>=2 && n<=4) ? 1 : 2;": "cs sk",
    "nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 && "
    "(n%100<10 || n%100>=20) ? 1 : 2);": "be bs hr ru sr uk",
    "nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n%10>=2 && (n%100<10 || n%100>=20) ? 1 : 2);"
    "": "lt",
    "nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n != 0 ? 1 : 2);": "lv",
    "nplurals=3; plural=n==1 ? 0 : (n==0 || (n%100 > 0 && n%100 < 20)) ? 1 : 2;": "ro",
    "nplurals=4; plural=(n%100==1 ? 0 : n%100==2 ? 1 : n%100==3 || n%100==4 ? 2 : 3);": "sl",
    "nplurals=6; plural=n==0 ? 0 : n==1 ? 1 : n==2 ? 2 : n%100>=3 && n%100<=10 ? 3 : n%100>=11 "
    "? 4 : 5;": "ar",
}


class Unit(NamedTuple):
    """A text to translate."""

    text: str  # with marks for its codes
    place: str  # in messages
    write: Callable[[str, Sequence[str]], bool]  # takes a translation and what is wrong in it;
    # whether something is


class Document(NamedTuple):
    """What is to be translated in a file, and the file as it is then."""

    units: Sequence[Unit]
    total: int  # messages
    content: Callable[[], bytes]


def form(path: str) -> str:
    """The form of a document, by the end of its name; "" if it is none."""
    return FORMS.get(os.path.splitext(path.lower())[1], "")


def read(request: Request, every: bool, n_best: int, languages: tuple[str, str]) -> Document | None:
    """The document among the sources of a request; None if these are lines.

    With `every` translated messages are to be translated, too. `languages` are the model's.
    UserError for a file that cannot be read, another --out, or other languages than the model's.
    """
    is_one = (
        bool(form(each)) and (" " not in each or os.path.exists(each)) for each in request.sources
    )
    path = next((each for each, one in zip(request.sources, is_one, strict=True) if one), "")
    if not path:
        if every:
            raise ConfigError("--all goes with a document: .po, .pot, .xlf, .xliff or .tmx")
        return None
    is_alone = len(request.sources) == n_best == 1
    if not is_alone or form(request.out) != form(path) or request.format != "text":
        raise ConfigError(
            f"{shown(path)} is a document, which comes back in its form: give it alone, without "
            f"--format and --n_best, and with --out=NAME{os.path.splitext(path)[1]}"
        )
    check_apart([path], [("out", request.out)])
    with refusing(f"cannot read {shown(path)}"):
        limits.check_file(path)
        file = epath.Path(path)
        limits.check_size(path, file.stat().length, limits.TEXT_BYTES)
        data = file.read_bytes()
    if form(path) == "po":
        return _catalog(path, data, every, languages)
    return _xml(path, data, every, languages)


def lines(document: Document) -> Iterator[Line]:
    """The lines of a document that the model is to translate."""
    for unit in document.units:
        yield from (Line(part, "", unit.place) for part, is_text in _parts(unit.text) if is_text)


def write(document: Document, rows: Iterator[Row], out: str) -> None:
    """Writes the document with the translations in the rows of its `lines`, and counts them.

    A text of which a line has an error stays untranslated.
    """
    done = faults = 0
    for unit in document.units:
        parts = [(part, next(rows) if is_text else None) for part, is_text in _parts(unit.text)]
        answers = [row for _, row in parts if row]
        if any(row.error for row in answers):
            continue
        found = ((part, row.content["translations"] if row else ()) for part, row in parts)
        text = "".join(every[0]["text"] if every else part for part, every in found)
        wrong = [why for row in answers if (why := row.content.get("placeholders"))]
        done, faults = done + 1, faults + unit.write(text, wrong)
    save(out, [document.content()])
    said = (
        f"{count(done, 'text')} translated, to be reviewed, in {count(document.total, 'message')}"
    )
    say(said + (f"; {faults:,} have a note: placeholders or codes differ" if faults else ""))


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """The lines of a text, and what stays around them: blanks, marks, and lines without letters."""
    for i, line in enumerate(text.split("\n")):
        tokens = re.split(rf"(\s+|{_MARK})", line)  # what stays has odd numbers
        words = [k for k in range(0, len(tokens), 2) if tokens[k]]
        first, last = (words[0], words[-1] + 1) if words else (0, 0)
        core = "".join(tokens[first:last])
        yield "\n" * bool(i) + "".join(tokens[:first]), False
        yield core, any(map(str.isalpha, re.sub(_MARK, "", core)))
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


# gettext.


def _catalog(path: str, data: bytes, every: bool, languages: tuple[str, str]) -> Document:
    """A .po or .pot: entries keep their lines, of which only the flags and msgstr change."""
    import polib

    catalog, lines = translator_files.catalog(data, path, DataError)
    fields = dict(catalog.metadata)
    _check(path, ("", fields.get("Language", "")), languages)
    rule, number, one, is_often = _plural_rule(fields.get("Plural-Forms", ""), languages[1])
    starts = [max(entry.linenum - 1, 0) for entry in catalog] + [len(lines)]
    width = 0 if any(len(line) > 100 and line.lstrip()[:1] == '"' for line in lines) else 78
    end = "\r" if lines[0].endswith("\r") else ""
    texts: dict[int, dict[int, str]] = {}  # new ones by the index of the entry and of the form
    notes: dict[int, list[str]] = {}
    units = []

    def add(index: int, forms: Sequence[int], text: str, wrong: Sequence[str]) -> bool:
        texts.setdefault(index, {}).update(dict.fromkeys(forms, text))
        notes.setdefault(index, []).extend(f"# {_note(each)}" for each in wrong)
        return bool(wrong)

    def strings(texts: Mapping[int, str], is_plural: bool) -> list[str]:
        forms = {"msgstr_plural": dict(texts)} if is_plural else {"msgstr": texts[0]}
        return polib.POEntry(**forms).__unicode__(width).split("\n")[1:-1]

    def replace(begin: int, stop: int, new: list[str]) -> int:
        """Replaces the strings of an entry in these lines, and returns where they begin."""
        first = last = next(i for i in range(begin, stop) if _starts(lines[i], "msgstr"))
        while last < stop and _starts(lines[last], "msgstr", '"'):
            last += 1
        lines[first:last] = [line + end for line in new]
        return first

    for index, entry in enumerate(catalog):
        if entry.obsolete or not entry.msgid:
            continue
        old = entry.msgstr_plural if entry.msgid_plural else {0: entry.msgstr}
        forms: dict[str, list[int]] = {}
        differs = is_often and placeholders.difference(entry.msgid, entry.msgid_plural)
        for i in range(number if entry.msgid_plural else 1):
            is_one = not entry.msgid_plural or (i == one and not differs)
            if every or not old.get(i):
                forms.setdefault(entry.msgid if is_one else entry.msgid_plural, []).append(i)
        place = f"{shown(path)}, line {starts[index] + 1:,}"
        units += [Unit(each, place, functools.partial(add, index, forms[each])) for each in forms]

    def content() -> bytes:
        for index in sorted(texts, reverse=True):
            entry, begin = catalog[index], starts[index]
            is_plural = bool(entry.msgid_plural)
            old = entry.msgstr_plural if is_plural else {}
            at = replace(begin, starts[index + 1], strings(old | texts[index], is_plural))
            if not entry.fuzzy:
                flags = [i for i in range(begin, at) if lines[i].startswith("#,")]
                if flags:
                    lines[flags[0]] = lines[flags[0]].replace("#,", "#, fuzzy,", 1)
                else:
                    at = next(i for i in range(begin, at) if _starts(lines[i], "#|", "msg"))
                    lines.insert(at, "#, fuzzy" + end)
            known = {line.strip() for line in lines[begin : starts[index + 1]]}
            lines[begin:begin] = [each + end for each in notes[index] if each not in known]
        new = {"Language": fields.get("Language") or _locale(languages[1])}
        if not re.search("charset=utf-8", fields.get("Content-Type", ""), re.IGNORECASE):
            new["Content-Type"] = "text/plain; charset=UTF-8"
        if any(entry.msgid_plural for entry in catalog):
            new["Plural-Forms"] = rule
        new = fields | {name: value for name, value in new.items() if value}
        if new != fields:
            if not fields:
                lines[:0] = ['msgid ""' + end, 'msgstr ""' + end, end]
            block = strings(
                {0: "".join(f"{name}: {value}\n" for name, value in new.items())}, False
            )
            replace(0, len(lines), block)
        return "\n".join(lines).encode()

    return Document(units, len(catalog), content)


def _starts(line: str, *starts: str) -> bool:
    return line.lstrip().startswith(starts)


def _note(wrong: str) -> str:
    return f"Machine translation: {wrong}"


def _locale(tag: str) -> str:
    """A tag as gettext writes it: pt_BR for pt-br."""
    first, *more = tag.split("-")
    return "_".join([first, *(each.upper() if len(each) == 2 else each.title() for each in more)])


def _plural_rule(said: str, target: str) -> tuple[str, int, int, bool]:
    """The rule that a header says, else the language's; the number of forms; the one for 1.

    The last value says whether the form is for other numbers, too, as 21 and 31 in Russian.
    """
    tags = target, target.split("-")[0]
    known = (rule for tag in tags for rule, names in _PLURALS.items() if tag in names.split())
    for rule in (said, *known):
        match = re.match(r"\s*nplurals\s*=\s*(\d)\s*;\s*plural\s*=\s*([^;]+)", rule)
        with contextlib.suppress(ValueError, ArithmeticError):
            if match:
                function = gettext.c2py(match[2])
                one, counts = function(1), [*map(function, range(200))]
                return rule, int(match[1]), one, counts.count(one) > 4
    return "nplurals=2; plural=(n != 1);", 2, 0, False


# XML.


def _xml(path: str, data: bytes, every: bool, languages: tuple[str, str]) -> Document:
    """XLIFF 1.2 or TMX."""
    from lxml import etree

    try:
        parser = etree.XMLParser(strip_cdata=False, **translator_files.XML)
        tree = etree.fromstring(data, parser).getroottree()
    except (etree.XMLSyntaxError, ValueError, LookupError) as error:
        raise translator_files.xml_fault(path, error, DataError) from error
    root, is_xliff = tree.getroot(), form(path) == "xliff"
    units = [*(_xliff if is_xliff else _tmx)(path, root, every, languages)]
    total = sum(1 for _ in root.iter("{*}trans-unit" if is_xliff else "{*}tu"))

    def content() -> bytes:
        head = re.match(rb"(\xef\xbb\xbf)?<\?xml[^>]*\?>\s*", data)  # as it was written
        encoding = tree.docinfo.encoding or "UTF-8"
        text = etree.tostring(tree, encoding=encoding, xml_declaration=not head)
        text += b"\n" * data.endswith(b"\n")
        text = text.replace(b"\n", b"\r\n") if b"\r\n" in data[:1000] else text
        return (head[0] if head else b"") + text

    return Document(units, total, content)


def _xliff(path: str, root: Any, every: bool, languages: tuple[str, str]) -> Iterator[Unit]:
    """The units of an XLIFF without target, with an empty one, or one that says it is no text."""
    if root.get("version", "1").startswith("2"):
        raise DataError(
            f"{shown(path)} is XLIFF {root.get('version')}, and only 1.2 can be translated: export "
            "it as 1.2, or as .po"
        )
    for unit in root.iter("{*}trans-unit"):
        source, target = (unit.find(f"{{*}}{name}") for name in ("source", "target"))
        segments = unit.find("{*}seg-source")
        source = source if segments is None else segments
        says = (node.get("translate") for node in (unit, *unit.iterancestors()))
        if source is None or next(filter(None, says), "yes") == "no":
            continue
        is_new = target is None or not ("".join(target.itertext()).strip() or len(target))
        if every or is_new or target.get("state") in ("new", "needs-translation"):
            _check(path, translator_files.xliff_languages(unit), languages)
            text, codes = _marked(source)
            if text.strip():
                write = functools.partial(_write_target, unit, source, target, codes, languages[1])
                yield Unit(text, f"{shown(path)}, line {source.sourceline:,}", write)


def _write_target(
    unit: Any,
    source: Any,
    target: Any,
    codes: Mapping[str, Any],
    tag: str,
    text: str,
    wrong: Sequence[str],
) -> bool:
    """Writes the target of a unit, with a note for each thing that is wrong."""
    if target is None:
        target = _after(source, "target")
    kept = dict(target.attrib)
    target.clear(keep_tail=True)
    state = {"state": "needs-review-translation", "state-qualifier": "mt-suggestion"}
    target.attrib.update(kept | state)
    wrong = [*wrong, *_fill(target, text, codes)]
    for each in wrong:
        _after(target, "note", {"from": "predict.py"}).text = _note(each)
    if unit.get("approved") == "yes":
        unit.set("approved", "no")
    for file in unit.iterancestors("{*}file"):
        if tag and not file.get("target-language"):
            file.set("target-language", tag)
    return bool(wrong)


def _tmx(path: str, root: Any, every: bool, languages: tuple[str, str]) -> Iterator[Unit]:
    """The units of a TMX with the source language and without the target, or a machine's."""
    header = root.find("{*}header")
    source = languages[0] or ("" if header is None else header.get("srclang", ""))
    target, count = languages[1], 0
    if not target:
        fix = "prepare the data again with --source_language and --target_language"
        raise ConfigError(f"{shown(path)}: the model does not say its target language; {fix}")
    for unit in root.iter("{*}tu"):
        sides = [(translator_files.language(side), side) for side in unit.iterfind("{*}tuv")]
        first, old = (
            next((side for word, side in sides if _is(word, tag)), None) for tag in (source, target)
        )
        if first is None or (segment := first.find("{*}seg")) is None:
            continue
        count += 1
        if old is not None and not (every and old.get("creationid") == _BY):
            continue
        text, codes = _marked(segment)
        if text.strip():
            write = functools.partial(_write_variant, first, old, segment, codes, target)
            yield Unit(text, f"{shown(path)}, line {segment.sourceline:,}", write)
    if not count:
        raise ConfigError(f"{shown(path)} has no text of {source or 'its source language'}")


def _is(word: str, tag: str) -> bool:
    """Whether two tags name one language: en-US is en, and pt-BR is not pt-PT."""
    first, second = (f"{each.lower().replace('_', '-')}-" for each in (word, tag))
    return first.startswith(second) or second.startswith(first)


def _write_variant(
    first: Any,
    old: Any,
    segment: Any,
    codes: Mapping[str, Any],
    tag: str,
    text: str,
    wrong: Sequence[str],
) -> bool:
    """Writes the variant of a target language after that of the source."""
    name = "lang" if first.get(XML_LANG) is None else XML_LANG
    variant = _after(first, "tuv", {name: tag, "creationid": _BY}) if old is None else old
    for node in [*variant]:
        variant.remove(node)
    seg = variant.makeelement(segment.tag)
    wrong = [*wrong, *_fill(seg, text, codes)]
    for each in wrong:
        note = variant.makeelement(segment.tag.replace("seg", "note"))
        note.text = _note(each)
        variant.append(note)
    variant.append(seg)
    return bool(wrong)


def _after(node: Any, name: str, attributes: Mapping[str, str] | None = None) -> Any:
    """A new element after another, of the same namespace and with the same space around it."""
    space = node.tag.rpartition("}")
    new = node.makeelement("".join([*space[:2], name]), attributes or {})
    node.addnext(new)
    before = node.getparent().text or ""
    new.tail, node.tail = node.tail, before if not before.strip() else node.tail
    return new


def _marked(segment: Any) -> tuple[str, dict[str, Any]]:
    """The text of a segment with a mark for each code, and the elements of the marks."""
    pieces = [*translator_files.pieces(segment)]
    numbers = re.findall(
        r"\{/?(\d{1,9})\}", "".join(each for each in pieces if isinstance(each, str))
    )
    free = max(map(int, numbers), default=0)
    ids: dict[Any, int] = {}
    text, codes = "", {}
    for piece in pieces:
        if isinstance(piece, str):
            text += piece
        else:
            node, end = piece
            mark = f"{{{end}{ids.setdefault(node, free + len(ids) + 1)}}}"
            codes[mark] = node
            text += mark
    if segment.xpath("ancestor-or-self::*[@xml:space][1]/@xml:space") != ["preserve"]:
        text = re.sub(r"(?<=\S)[ \t]*\n[ \t]+(?=\S)", " ", text)  # XML that is indented
    return text, codes


def _fill(node: Any, text: str, codes: Mapping[str, Any]) -> list[str]:
    """Puts a translation with its codes into an element; says so if it has to leave them out."""
    parts = re.split(f"({_MARK})", _NOT_XML.sub("", text))
    marks = [part for part in parts if part in codes]

    def in_order(marks: Iterable[str]) -> list[str]:  # begin and end are elements of their own
        return [mark for mark in marks if str(codes[mark].tag).endswith(("bpt", "ept", "bx", "ex"))]

    fits = sorted(marks) == sorted(codes) and in_order(marks) == in_order(codes)
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
    return [] if fits else ["it lacks the codes of the layout"]
