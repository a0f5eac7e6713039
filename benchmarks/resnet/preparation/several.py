"""Several labels of a photo in a table: columns of 0 and 1, lists in cells, or several rows."""

import collections
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from common.errors import some
from common.preparation.sources import SourceError
from common.text import normal_name

COLUMNS, ROWS, LISTS = "columns", "rows", "lists"  # values of --several; others are signs
YES, NO = {"1", "1.0", "true", "yes"}, {"0", "0.0", "false", "no", ""}
_MINUS = {"-1", "-1.0"}  # no, where there is no 0
_SIGNS = "|;, "  # that may separate labels, the surest first
_PLURAL = (  # names of columns with several labels in a cell
    r"(^|_)(labels|tags|classes|categories|attributes|ids|targets?|genres?|findings|diseases"
    r"|keywords)(_list)?$"
)
_NUMBERED = re.compile(r"(.*(?:label|class|tag|category|genre|finding|disease))_?\d+")
# What stands for "no label", where it never stands beside a label.
_NOTHING = re.compile(r"no[ _-]?(findings?|labels?)|un[ _-]?label+ed|none|nan|null|empty", re.I)
_ITEM = re.compile(r"'([^']*)'|\"([^\"]*)\"|([^\s,'\"][^,]*)")  # of a list in a cell
_MANY = 0.2  # the share of photos with several rows from which on these are no mistakes


class Form(NamedTuple):
    """How a table has several labels for a photo."""

    kind: str  # `COLUMNS`, `ROWS`, `LISTS`, or the sign between the labels in a cell
    columns: tuple[str, ...]  # that have the labels

    def __str__(self) -> str:
        names = f"column{'s' * (len(self.columns) > 1)} {some(self.columns)}"
        ways = {COLUMNS: "one each", ROWS: "one per row", LISTS: "in lists", " ": "between blanks"}
        return f"labels in {names}, {ways.get(self.kind, f'between {self.kind!r}')}"


def find(
    columns: Mapping[str, Sequence[str]], label: str, is_known: bool, photos: Sequence[str]
) -> Form | None:
    """How the columns have several labels for a photo; None if they do not, as far as one can see.

    Args:
      columns: the cells by the names of the columns that may have labels.
      label: the column that looks like a single label; '' for none.
      is_known: whether its name says so.
      photos: the photo of each row.
    """
    values = {name: {cell.strip() for cell in cells} for name, cells in columns.items()}
    marks = [name for name in columns if _are_marks({*map(str.lower, values[name])})]
    are_marks = len(marks) > 2 or len(marks) == len(columns) == 2
    if are_marks and not is_known and not doubtful(columns):
        return Form(COLUMNS, tuple(marks))
    stems = collections.defaultdict(list)
    for name in columns:
        if match := _NUMBERED.fullmatch(key(name)):
            stems[match[1]].append(name)
    for names in stems.values():  # class1 and class2 may also be a kind and its species
        first, *rest = (values[name] - {""} for name in names)
        if any(first & other for other in rest) and not all(map(_number, first)):
            return Form(COLUMNS, tuple(names))
    is_text = label and not all(map(_number, values[label]))
    names = [label] if is_known or is_text else [*columns]
    lists = {name: sign for name in names if (sign := _separator(values[name] - {""}, name))}
    plural = [name for name in lists if is_plural(name)]
    if name := label if label in lists else next(iter(plural or lists), ""):
        return Form(lists[name], (name,))
    if label and not marks and (is_known or len(columns) == 1):
        pairs = {*zip(photos, columns[label], strict=True)}
        sizes = collections.Counter(photo for photo, _ in pairs)
        are_many = sum(size > 1 for size in sizes.values()) >= max(2, _MANY * len(sizes))
        if are_many and len(photos) < 1.01 * len(pairs):  # else they are opinions of several people
            return Form(ROWS, (label,))
    return None


def given(kind: str, columns: Mapping[str, Sequence[str]], names: Sequence[str]) -> Form:
    """The form that --several and --label_column name; SourceError if they cannot."""
    if not names and kind == COLUMNS and (form := find(columns, "", False, ())):
        names = form.columns if form.kind == kind else ()
    if problem := doubtful({name: columns[name] for name in names}):
        raise SourceError(problem)
    if not names:
        raise SourceError(f"--several={kind!r}: give --label_column, of {', '.join(columns)}")
    return Form(kind, tuple(names))


def read(columns: Mapping[str, Sequence[str]], form: Form) -> list[tuple[str, ...] | None]:
    """The labels of each row; None where all cells of marks are empty."""
    cells = {name: [cell.strip() for cell in columns[name]] for name in form.columns}
    values = {cell.lower() for column in cells.values() for cell in column}
    rows: list[tuple[str, ...] | None]
    if form.kind == COLUMNS and values <= YES | NO | _MINUS:
        names = [normal_name(name) for name in form.columns]
        rows = [
            tuple(name for name, cell in zip(names, row, strict=True) if cell.lower() in YES)
            if any(row)
            else None
            for row in zip(*cells.values(), strict=True)
        ]
    elif form.kind in (COLUMNS, ROWS):
        rows = [_labels(row) for row in zip(*cells.values(), strict=True)]
    else:
        (column,) = cells.values()
        rows = [_labels(_split(cell, form.kind)) for cell in column]
    if not has_several(rows, form):
        return rows
    alone = {row[0] for row in rows if row and len(row) == 1 and _NOTHING.fullmatch(row[0])}
    nothing = alone - {name for row in rows if row and len(row) > 1 for name in row}
    return [() if row and row[0] in nothing else row for row in rows]


def has_several(rows: Sequence[tuple[str, ...] | None], form: Form) -> bool:
    """Whether a photo may have several labels, or none; else each row has exactly one, a class."""
    return form.kind == ROWS or {len(row) for row in rows if row is not None} != {1}


def summary(labels: Collection[tuple[str, ...]], form: Form) -> str:
    """How many labels there are, which columns are of none, and how many labels a photo has."""
    counts, used = [len(names) for names in labels], {*itertools.chain(*labels)}
    columns = {normal_name(name) for name in form.columns}
    unused = sorted(name for name in columns - used if not _NOTHING.fullmatch(name))
    absent = f" (no photo has {some(unused)})" if unused and used <= columns else ""
    text = f"{len(used):,} labels{absent}, {min(counts)} to {max(counts)} per photo, "
    text += f"{sum(counts) / len(counts):.2f} on average"
    none = counts.count(0)
    return f"{text}; {none:,} of {len(counts):,} photos have none: also examples" if none else text


def separated(cells: Collection[str], is_plural: bool) -> tuple[str, str]:
    """(the sign between several labels in a cell, such a cell), or two times ''.

    What "|", ";" or "," separates are labels where each part is in other cells, too, and what
    blanks separate, where each is a cell of its own: "golden retriever" is one class. "black,
    white" is one as well where neither is a cell and there are no fewer parts than cells. In a
    column whose name says so, parts need not be cells if there are fewer of them than cells, or if
    most are in several cells, which have different numbers of them.
    """
    for sign in _SIGNS:
        parts = {cell: {part.strip() for part in cell.split(sign)} for cell in cells}
        uses = collections.Counter(itertools.chain(*parts.values()))
        labels = {x for x in uses if x.isdigit() or (x in cells if sign == " " else uses[x] > 1)}
        lists = [cell for cell in cells if len(parts[cell]) > 1]
        are_mostly = 2 * sum(parts[cell] <= labels for cell in lists) >= len(lists)
        are_mostly &= len(uses) < len(cells) or bool(labels & {*cells})
        is_varied = len({*map(len, parts.values())}) > 1
        is_varied &= 2 * sum(number > 1 for number in uses.values()) > len(uses)
        are_likely = is_plural and (len(uses) < len(cells) or is_varied)
        if lists and (sign == "|" or are_mostly or are_likely):
            return sign, min(lists, key=len)
    return "", ""


def is_plural(name: str) -> bool:
    """Whether the name of a column says that its cells have several labels."""
    return bool(re.search(_PLURAL, key(name)))


def _separator(cells: Collection[str], name: str) -> str:
    """What separates the labels in the cells of a column; '' if they are no lists."""
    lists = [cell for cell in cells if re.fullmatch(r"\[[^{}\[\]]*\]", cell)]
    if 2 * len(lists) > len(cells):
        is_numbers = all(_number(x) and "." in x for cell in lists for x in _split(cell, LISTS))
        return "" if is_numbers else LISTS
    if all(map(_number, cells)) and not is_plural(name):
        return ""
    return separated(cells, is_plural(name))[0]


def _split(cell: str, kind: str) -> list[str]:
    if kind != LISTS:
        return cell.split(kind)
    return ["".join(parts) for parts in _ITEM.findall(cell.strip("[]() "))]


def _labels(parts: Sequence[str]) -> tuple[str, ...]:
    """The names in parts, each once."""
    return tuple(dict.fromkeys(filter(None, map(normal_name, parts))))


def doubtful(columns: Mapping[str, Sequence[str]]) -> str:
    """Why columns of marks do not say what holds, and the fix; '' if they do."""
    values = {name: {cell.strip().lower() for cell in cells} for name, cells in columns.items()}
    marks = {name: cells for name, cells in values.items() if _are_marks(cells)}
    found = {*itertools.chain(*marks.values())}
    if not (found & _MINUS and found & (NO - {""})):
        return ""
    problem = "has -1 beside 0 and 1, which may mean that nobody knows"
    return f"{problem} (columns {some(list(marks))}): write 0 or 1 instead"


def _are_marks(values: Collection[str]) -> bool:
    return bool({*values} - {""}) and {*values} <= YES | NO | _MINUS


def _number(text: str) -> bool:
    return bool(re.fullmatch(r"-?[\d.]+", text))


def key(name: str) -> str:
    """The name of a column in small letters, with a single _ for other signs."""
    return re.sub(r"\W+", "_", name.lower())
