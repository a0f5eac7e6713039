"""Files of translators: gettext's catalogs, and the XML of TMX and XLIFF."""

import contextlib
import importlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from common import limits
from common.errors import UserError, one_line
from common.text import decoded

_PO_LINE = re.compile(r'#.*|(msg[a-z_]+(\[\d+\])?\s*)?".*"')
_CHARSET = re.compile(rb"charset=([\w.-]+)\\n")  # in its header
XML_LANG = "{http://www.w3.org/XML/1998/namespace}lang"
# Of other files than the XML itself nothing is read; libxml2 bounds entities, depth and texts.
_XML = {"no_network": True, "load_dtd": False, "resolve_entities": "internal", "huge_tree": False}
_PAIRED = {"g", "hi", "mrk", "pc"}  # codes around text; of others the content is code, too


class _Lines(str):
    """The text of a catalog: polib cuts it where str.splitlines does, at U+2028 as well."""

    def splitlines(self, keepends: bool = False) -> list[str]:
        return [line + "\n" * keepends for line in self.split("\n")]


def etree() -> Any:
    """lxml's module for XML, imported at the first use."""
    return importlib.import_module("lxml.etree")


def catalog(data: bytes, path: str, kind: type[UserError]) -> tuple[Any, list[str]]:
    r"""A .po or .pot as polib's POFile, and its lines without "\n".

    The encoding is UTF-8, else what the header says, which may be old. `kind` is raised, with the
    `path` and the line, for another encoding or a fault.
    """
    import polib

    limits.check_size(path, len(data), limits.TEXT_BYTES, kind)
    try:
        text = decoded(data, path, kind)
    except kind as error:
        match = _CHARSET.search(data)
        try:
            text = data.decode(match[1].decode() if match else "utf-8")
        except (LookupError, UnicodeError):
            raise error  # noqa: B904 (the first one says how to convert the file)
    lines = text.split("\n")
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not _PO_LINE.fullmatch(line):
            raise kind(f"{path}, line {number} has no string in quotes: correct it")
    try:
        return polib.pofile(_Lines(text + "\n")), lines
    except OSError as error:
        number = re.search(r"line (\d+)", str(error))
        place = f"{path}, line {number[1]}" if number else path
        raise kind(
            f"{place} is no message of gettext with a string in each line: correct it"
        ) from error


def elements(file: Any, tags: Sequence[str], path: str, kind: type[UserError]) -> Iterator[Any]:
    """Yields the XML elements with some tags, of any namespace; each is cleared afterwards.

    `kind` is raised, with the `path`, if the binary `file` is damaged, or built to fill the memory.
    """
    bounded = _Bounded(file, path, kind)
    with _refusing(path, kind):
        for _, node in etree().iterparse(bounded, tag=[f"{{*}}{tag}" for tag in tags], **_XML):
            yield node
            bounded.size = 0
            node.clear()
            for each in (node, *node.iterancestors()):  # the empty ones would fill the memory, too
                while each.getprevious() is not None and each.getparent() is not None:
                    del each.getparent()[0]


def parse(data: bytes, path: str, kind: type[UserError]) -> Any:
    """The root of an XML file with all that it has; raises as `elements` does."""
    with _refusing(path, kind):
        return etree().fromstring(data, etree().XMLParser(strip_cdata=False, **_XML))


@contextlib.contextmanager
def _refusing(path: str, kind: type[UserError]) -> Iterator[None]:
    """Raises `kind` for XML that libxml2 refuses, without its hints for programmers."""
    try:
        yield
    except (etree().XMLSyntaxError, ValueError, LookupError) as error:
        hint = r",? (use|try|see) \w*XML\w*( option)?|, see xmlCtxt\w+\.| \(<string>.*"
        reason = re.sub(hint, "", one_line(error))
        raise kind(f"{path} is damaged, or too deep or large to be read: {reason}") from error


class _Bounded:
    """A binary file of which `limits.UNIT_BYTES` at most are read until `size` is set to 0."""

    def __init__(self, file: Any, path: str, kind: type[UserError]):
        self._file, self._path, self._kind, self.size = file, path, kind, 0

    def read(self, size: int) -> bytes:
        self.size += len(data := self._file.read(size))
        limits.check_size(
            f"the text between two units of {self._path}", self.size, limits.UNIT_BYTES, self._kind
        )
        return data


def language(node: Any) -> str:
    """The tag of a variant in a TMX, as it is written there."""
    return node.get(XML_LANG) or node.get("lang", "")


def xliff_languages(unit: Any) -> tuple[str, str]:
    """The tags of source and target that the file says above a unit; "" where it says none."""
    above = [unit, *unit.iterancestors()]
    names = (("source-language", "srcLang"), ("target-language", "trgLang"))
    found = ((node.get(name) for node in above for name in side) for side in names)
    source, target = (next(filter(None, tags), "") for tags in found)
    return source, target


def pieces(segment: Any) -> Iterator[str | tuple[Any, str]]:
    """The texts of a segment, and between them its codes: (element, "/" at the end of a pair)."""
    yield segment.text or ""
    for node in segment:
        paired = isinstance(node.tag, str) and node.tag.rpartition("}")[2] in _PAIRED
        yield node, ""
        if paired:
            yield from pieces(node)
            yield node, "/"
        yield node.tail or ""
