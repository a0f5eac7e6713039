"""What a folder holds as parallel text: which files, in which languages, for which split."""

import collections
import contextlib
import html
import itertools
import os
import re
import shlex
import zlib
from collections.abc import Iterable, Sequence

from benchmarks.translation.preparation import corpora, languages
from benchmarks.translation.preparation.corpora import Corpus, Lines, Question
from common.data.shards import tensorflow
from common.errors import UserError
from common.preparation import splits
from common.preparation.folders import Folder, Reading
from common.preparation.sources import SourceError
from common.text import text_lines

# Ends of the names of lines of text, beside languages.
_LINES = ("txt", "text", "tok", "sgm", "src", "tgt", "trg", "source", "target")
_MOST = 1000  # files of a form that are looked at
_SAME = 20, 100  # pairs that are compared to find two copies of a text, and the fewest letters

Row = tuple[str, ...]  # the names of two files of lines, or of a file of pairs
Inputs = dict[Row, Lines | Corpus]
Names = tuple[str, ...]  # of source and target: tags, or what a file calls them


def readings(folder: Folder) -> list[Reading]:
    """The ways to read a folder as parallel text: two files of lines, or files of pairs.

    SourceError if it has several pairs of languages, or none that the folder's flags ask for.
    """
    errors, questions = (UserError, OSError, tensorflow().errors.OpError), []
    names, typed = [file.name for file in folder.files], " ".join(folder.flags)
    asked = dict(re.findall(r"--(source|target)[-_]language[= ](\S+)", typed))
    wanted = asked.get("source", ""), asked.get("target", "")
    found: dict[str, dict[Names, Inputs]] = {}  # by form
    taken, seen, known = set(), collections.Counter[str](), set()
    with contextlib.suppress(*errors):
        for sides in languages.groups(filter(_is_lines, names)):
            if all(_has_letters(folder.head(name)) for name in sides.values()):
                taken |= {*sides.values()}
                for tags in itertools.combinations(sides, 2):
                    known |= {tuple(languages.choose(tags))} - {()}
                    if two := tuple(languages.choose(tags, wanted)):
                        row = tuple(sides[tag] for tag in two)
                        each = Lines(*map(folder.full, row))
                        found.setdefault("text", {}).setdefault(two, {})[row] = each
    for name in (name for name in names if name not in taken):
        form, _ = corpora.FORMS.get(corpora.ending(name), ("", None))
        seen[form] += 1
        if not form or seen[form] > _MOST:
            continue
        try:
            corpus = Corpus.open(folder.full(name), (), wanted)
            if corpus.has_sentences():
                two = tuple(languages.code(each) or each for each in corpus.names)
                found.setdefault(form, {}).setdefault(two, {})[name,] = corpus
        except Question as question:
            questions.append(question)
            with contextlib.suppress(*errors):  # what there is instead of the languages asked for
                two = Corpus.open(folder.full(name)).names
                known |= {tuple(languages.code(each) or each for each in two)}
        except errors:
            pass
    if not found and known:
        questions.insert(0, _question(folder, known, "none of them was asked for"))
    if unread := [name for name in names if corpora.ending(name) in corpora.CONVERTED]:
        questions.append(SourceError(corpora.not_read(folder.full(unread[0]))))
    if not found and questions:
        raise questions[0]
    return [_reading(folder, form, found[form], wanted) for form in found]


def _question(folder: Folder, pairs: Iterable[Names], fault: str) -> Question:
    pairs = sorted(pairs, key=lambda two: (two[0] != "en", two))
    shown = ", ".join(map(" to ".join, pairs[:8])) + " ..." * (len(pairs) > 8)
    fix = "--source_language={} --target_language={}".format(*pairs[0])
    return Question(f"{folder.given} has text of {shown}, and {fault}: type {fix}, or others")


def _reading(
    folder: Folder, form: str, pairs: dict[Names, Inputs], wanted: tuple[str, str]
) -> Reading:
    """The reading of the files of a form; their names say which are for evaluation."""
    everything = {name for inputs in pairs.values() for row in inputs for name in row}
    asked = [*map(languages.code, wanted)]

    def fit(two: Names) -> tuple[bool, ...]:
        """Whether the tags are those asked for, pt and not pt-br; by itself English is a source."""
        same = [tag in ("", mine) for tag, mine in zip(asked, two, strict=True)]
        return (*same, bool(asked[1]) and two[0].startswith("en"))

    best = max(map(fit, pairs))
    pairs = {two: pairs[two] for two in pairs if fit(two) == best}
    spoken = [two for two in pairs if all(re.fullmatch(r"[a-z]{2,3}(-\w+)*", x) for x in two)]
    if len(spoken) > 1:
        raise _question(folder, spoken, "they are not mixed")
    sides = max(pairs, key=lambda two: len(pairs[two]))
    inputs = pairs[sides]
    train, evaluation = _by_split(folder, form, [*inputs])
    flags, ends = [], ("_source", "_target") if form == "text" else ("",)
    for name, part in (("train", train), ("eval", evaluation)):
        _check_copies(folder, {row: inputs[row] for row in part})
        for i, end in enumerate(ends if part else ()):
            flags.append(f"--{name}{end}=" + ",".join(folder.full(row[i]) for row in part))
    flags += ["--clean", "--max_ratio=9"]  # the ratio of Moses' clean-corpus-n
    sizes = {file.name: file.size for file in folder.files}
    size = sum(sizes[name] for row in train for name in row)
    number = f"{len(train) * len(train[0]):,} files, such as " if len(train) > 1 else ""
    how = "text" if sides[0].startswith("column ") else "names"
    about = (
        f"{number}{' and '.join(train[0])}, {size:,} bytes: "
        f"{sides[0]} and {sides[1]} by their {how}"
    )
    text = ", ".join(row[0] for row in evaluation[:3]) or "a part of the training pairs"
    turn = f" (--source_language={sides[1]} turns it)" if languages.code(sides[1]) else ""
    makes = f"packed rows, {sides[0]} to {sides[1]}{turn}; evaluation on {text}"
    used = {*itertools.chain(*train, *evaluation)}
    ends = {*map(corpora.ending, used), *corpora.CONVERTED}
    everything |= {name for name in sizes if corpora.ending(name) in ends}
    if aside := sorted(everything - used):
        makes += f"; {len(aside):,} not used: {', '.join(aside[:3])}{' ...' * (len(aside) > 3)}"
    return Reading("text", form, about, makes, flags, sum(map(len, inputs)))


def _by_split(folder: Folder, form: str, rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The inputs to train on and to evaluate on; SourceError if all are for evaluation."""

    def split(name: str, whole: bool) -> str:
        """What a folder or a word of the file's name says; with `whole` its first word."""
        *folders, base = name.split("/")
        say = splits.whole_split if whole else splits.split_of
        words = re.split(r"[^A-Za-z]", base)[0] if whole else base
        return next(filter(None, map(say, (words, *reversed(folders)))), "")

    found = [split(row[0], False) for row in rows]
    if not splits.have_splits(found):  # in documentation, dev and test are subjects
        found = ["" if form == "po" else split(row[0], True) for row in rows]
    parts = collections.defaultdict(list)
    for row, part in zip(rows, found, strict=True):
        parts[part or "train"].append(row)
    if parts["train"]:
        return parts["train"], parts["validation"] or parts["test"]
    if folder.is_file:
        return [*rows], []
    flags = "--train_source=FILE --train_target=FILE" if form == "text" else "--train=FILE"
    raise SourceError(
        f"{folder.given} has only text to evaluate on by its names, such as {rows[0][0]}: to train "
        f"on it, type python -m scripts.prepare text {flags} --out=DIR"
    )


def _check_copies(folder: Folder, inputs: Inputs) -> None:
    """Question if two inputs begin with the same letters, as a text and its words do."""
    seen: dict[str, str] = {}
    for (name, *_), each in inputs.items():
        text = ""
        with contextlib.suppress(UserError, OSError, tensorflow().errors.OpError):
            text = " ".join(itertools.chain(*itertools.islice(each.pairs(), _SAME[0])))
        letters = re.sub(r"[\W_]+", "", html.unescape(text).casefold())
        other = seen.setdefault(letters, name) if len(letters) > _SAME[1] else name
        if other != name:
            folders = [folder.full(os.path.dirname(path)) for path in (other, name)]
            command = ["python", "-m", "scripts.prepare"]
            fix = " or ".join(shlex.join([*command, path, *folder.flags]) for path in folders)
            if folders[0] == folders[1]:
                fix = "python -m scripts.prepare text --help, and give the files of one"
            raise Question(f"{folder.given} has the same text in {other} and {name}: type {fix}")


def _is_lines(name: str) -> bool:
    end = os.path.splitext(name.lower().removesuffix(".gz"))[1][1:]
    return end in _LINES or bool(languages.code(end))


def _has_letters(head: bytes) -> bool:
    """Whether most of the first lines hold text: labels are numbers."""
    if head[:2] == b"\x1f\x8b":
        with contextlib.suppress(zlib.error):
            head = zlib.decompressobj(31).decompress(head)
    return languages.are_mostly(text_lines(head.decode(errors="replace"))[:50], languages.LETTER)
