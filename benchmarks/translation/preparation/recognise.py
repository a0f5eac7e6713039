"""What a folder holds as parallel text: which files, in which languages, for which split."""

import collections
import contextlib
import html
import itertools
import os
import re
import zlib
from collections.abc import Iterable, Sequence

from benchmarks.translation.preparation import languages, text_formats
from benchmarks.translation.preparation.text_formats import Corpus, Lines, Question
from common.errors import UserError
from common.preparation import folders
from common.preparation.folders import DatasetFormat, Folder
from common.preparation.sources import SourceError
from common.tensorflow import tensorflow
from common.text import text_lines

# Ends of the names of lines of text, beside languages.
_LINES = ("txt", "text", "tok", "sgm", "src", "tgt", "trg", "source", "target")
_MOST = 1000  # files with the same end that are looked at
_SAME = 20, 100  # pairs that are compared to find two copies of a text, and the fewest letters

Row = tuple[str, ...]  # the names of two files of lines, or of a file of pairs
Inputs = dict[Row, Lines | Corpus]
Names = tuple[str, ...]  # of source and target: tags, or what a file calls them


def dataset_formats(folder: Folder) -> list[DatasetFormat]:
    """The formats of parallel text that a folder has: two files of lines, or files of pairs.

    Question if it has several pairs of languages, or none that the folder's flags ask for.
    """
    errors, questions = (UserError, OSError, tensorflow().errors.OpError), []
    names, typed = [file.name for file in folder.files], " ".join(folder.flags)
    asked = dict(re.findall(r"--(columns|source|target)(?:[-_]language)?[= ](\S+)", typed))
    wanted = asked.get("source", ""), asked.get("target", "")
    columns = [*filter(None, asked.get("columns", "").split(","))]
    found: dict[str, dict[Names, Inputs]]  # by form
    found = collections.defaultdict(lambda: collections.defaultdict(dict))
    taken, seen, known = set(), collections.Counter[str](), set()
    unread: list[Exception] = []  # by their encoding only
    with contextlib.suppress(*errors):
        for sides in languages.groups(filter(_is_lines, names)):
            if all(_has_letters(folder.head(name)) for name in sides.values()):
                taken |= {*sides.values()}
                for tags in itertools.combinations(sides, 2):
                    known |= {languages.choose(tags)} - {()}
                    if two := languages.choose(tags, wanted):
                        row = sides[two[0]], sides[two[1]]
                        found["text"][two][row] = Lines(*map(folder.full, row))
    for name in names:
        seen[end := text_formats.ending(name)] += 1
        if name in taken or seen[end] > _MOST or end not in text_formats.FORMATS:
            continue
        try:
            corpus = Corpus.open(folder.full(name), columns, wanted)
            if corpus.has_sentences():
                two = tuple(languages.code(each) or each for each in corpus.names)
                found[text_formats.FORMATS[end][0]][two][name,] = corpus
        except Question as question:
            questions.append(question)
        except errors as error:
            cause = error.__cause__
            if isinstance(cause, UnicodeDecodeError) and b"\0" not in cause.object:
                unread.append(error)
    if not found and known:
        raise _question(folder, known, "none of them was asked for")
    if not found and questions:
        raise questions[0]
    if not found and 2 * len(unread) >= len(names) > 0:
        raise unread[0]
    return [_format(folder, form, found[form], wanted) for form in found]


def _question(folder: Folder, pairs: Iterable[Names], fault: str) -> Question:
    pairs = sorted(pairs, key=lambda two: (not two[0].startswith("en"), two))
    shown = ", ".join(map(" to ".join, pairs[:8])) + " ..." * (len(pairs) > 8)
    fix = "--source_language={} --target_language={}".format(*pairs[0])
    return Question(f"{folder.given} has text of {shown}, and {fault}: type {fix}, or others")


def _format(
    folder: Folder, form: str, pairs: dict[Names, Inputs], wanted: tuple[str, str]
) -> DatasetFormat:
    """The files of a format; their names say which are for evaluation."""
    # The tags that are asked for: pt and not pt-br; beside a target English is the source.
    asked = [languages.find(tag, itertools.chain(*pairs)) for tag in wanted]
    fit = [two for two in pairs if all(map(lambda tag, side: tag in ("", side), asked, two))]
    fit = fit or [*pairs]
    if asked[1]:
        fit = [two for two in fit if two[0].startswith("en")] or fit
    spoken = [two for two in fit if all(re.fullmatch(r"[a-z]{2,3}(-\w+)*", tag) for tag in two)]
    if len(spoken) > 1:
        raise _question(folder, spoken, "they are not mixed")
    sides = max(fit, key=lambda two: len(pairs[two]))
    train, evaluation = _by_split(folder, form, [*pairs[sides]])
    flags, ends = [], ("_source", "_target") if form == "text" else ("",)
    for name, part in (("train", train), ("eval", evaluation)):
        _check_copies(folder, {row: pairs[sides][row] for row in part})
        for i, end in enumerate(ends if part else ()):
            flags.append(f"--{name}{end}=" + ",".join(folder.full(row[i]) for row in part))
    flags += ["--clean", "--max_ratio=9"]  # the ratio of Moses' clean-corpus-n
    sizes = {file.name: file.size for file in folder.files}
    size = sum(sizes[name] for row in train for name in row)
    number = f"{len(train) * len(train[0]):,} files, such as " if len(train) > 1 else ""
    how = "text" if sides[0].startswith("column ") else "names"
    files = f"{number}{' and '.join(train[0])}, {size:,} bytes"
    evidence = f"{files}: {sides[0]} and {sides[1]} by their {how}"
    text = ", ".join(row[0] for row in evaluation[:3]) or "a part of the training pairs"
    turn = f" (--source_language={sides[1]} turns it)" if languages.code(sides[1]) else ""
    output = f"packed rows, {sides[0]} to {sides[1]}{turn}; evaluation on {text}"
    used, texts = {*itertools.chain(*train, *evaluation)}, itertools.chain(*pairs.values())
    forms = {*map(text_formats.ending, itertools.chain(*texts))}
    if aside := sorted(name for name in {*sizes} - used if text_formats.ending(name) in forms):
        output += f"; {len(aside):,} not used: {', '.join(aside[:3])}{' ...' * (len(aside) > 3)}"
    return DatasetFormat("text", form, evidence, output, flags, sum(map(len, pairs[sides])))


def _by_split(folder: Folder, form: str, rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The inputs to train on and to evaluate on; SourceError if all are for evaluation."""

    def by_words(path: str) -> str:  # a folder, or the first word of a file's name
        *above, base = path.split("/")
        words = [*above, re.split("[^A-Za-z]", base)[0]]
        return next(filter(None, map(folders.whole_split, reversed(words))), "")

    paths = [row[0] for row in rows]
    split = folders.split_of if folders.have_splits(paths) else by_words
    # In documentation dev and test are subjects.
    found = ["" if form == "po" and split is by_words else split(path) for path in paths]
    parts = collections.defaultdict(list)
    for row, part in zip(rows, found, strict=True):
        parts[part or "train"].append(row)
    if not (parts["train"] or folder.is_file):
        raise SourceError(
            f"{folder.given} has only text to evaluate on by its names, such as {rows[0][0]}: to "
            "train on it, name its files, see python -m scripts.prepare text --help"
        )
    evaluation = parts["validation"] or parts["test"]
    return (parts["train"], evaluation) if parts["train"] else ([*rows], [])


def _check_copies(folder: Folder, inputs: Inputs) -> None:
    """Question if two inputs begin with the same letters, as a text and its words do."""
    seen: dict[str, str] = {}
    for (name, *_), each in inputs.items():
        text = ""
        with contextlib.suppress(UserError, OSError, tensorflow().errors.OpError):
            text = " ".join(itertools.chain(*itertools.islice(each.pairs(), _SAME[0])))
        letters = re.sub(r"[\W_]+", "", html.unescape(text).casefold())
        if len(letters) > _SAME[1] and (other := seen.setdefault(letters, name)) != name:
            fix = "keep one of them in it, or name files, see python -m scripts.prepare text --help"
            raise Question(f"{folder.given} has the same text in {other} and {name}: {fix}")


def _is_lines(name: str) -> bool:
    end = os.path.splitext(name.removesuffix(".gz"))[1][1:]
    return end.lower() in _LINES or bool(languages.code(end) or folders.whole_split(end))


def _has_letters(head: bytes) -> bool:
    """Whether most of the first lines hold text: labels are numbers."""
    if head[:2] == b"\x1f\x8b":
        with contextlib.suppress(zlib.error):
            head = zlib.decompressobj(31).decompress(head)
    return languages.are_mostly(text_lines(head.decode(errors="replace"))[:50], languages.LETTER)
