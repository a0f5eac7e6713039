"""Makes English sentences about dates, times, numbers and amounts with German translations.

    python -m scripts.prepare phrases --out=data/phrases

20,000 pairs for training and 500 for evaluation come from Babel (the Unicode locale data, CLDR) and
num2words, without a network. In every evaluation sentence, a value or the combination of values is
one that no training sentence has: 1 in 20 are reserved for the evaluation. OUT/raw has the text, a
sentence per line, and `text` makes the records of it. The same versions of Babel and num2words give
the same bytes. The program does nothing if the folder is complete.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import random
from collections.abc import Iterator

from benchmarks.translation import manifest
from benchmarks.translation.preparation import phrase_patterns, text
from errors import DataError, parse_json
from ops import console, files
from ops.preparation import arguments, writing
from ops.shards import tensorflow

COUNTS = {"train": 20_000, "eval": 500}
VOCABULARY, LENGTH = 800, 64  # subwords; tokens of a row
_RESERVED = 20  # 1 of so many values is for the evaluation
_TRIES = 1000  # sentences of one pattern
_ABOUT = "about.json"  # in OUT/raw, written last
# Folders of earlier versions have this text, whose end was the name of the program.
_DESCRIPTION = "English sentences with German translations by scripts.data.phrases, version 2"


def pairs(split: str, count: int) -> list[tuple[str, str]]:
    """Sentences in English and German, all different: a function of the arguments.

    Args:
        split: "train", whose values and combinations are common, or "eval", where one is reserved.
        count: how many.
    """
    draw, texts = random.Random(f"phrases {split}"), {}
    patterns = _patterns(draw)
    while len(texts) < count:
        pattern = next(patterns)
        for _ in range(_TRIES if split == "eval" else 1):  # few sentences have a reserved value
            phrase = phrase_patterns.phrase(draw, pattern)
            if is_reserved(phrase) == (split == "eval") and phrase.en not in texts:
                texts[phrase.en] = phrase.de
                break
    return list(texts.items())


def is_reserved(phrase: phrase_patterns.Phrase) -> bool:
    """Whether a value of the sentence, or the combination of all of them, is for the evaluation.

    A value has parts, such as the two times of opening hours. The day of a date is no part of it.
    """
    values = [slot.value for slot in phrase.slots if slot.is_open]
    values += [part for slot in phrase.slots for part in slot.parts]
    if len(phrase.slots) > 1:
        values.append(" | ".join(sorted(slot.value for slot in phrase.slots)))
    return any(_hash(value) % _RESERVED == 0 for value in values)


def write_raw(folder: str) -> None:
    """Writes train.en, train.de, eval.en and eval.de, and then about.json."""
    about = {"description": _DESCRIPTION, "libraries": {}, "sha256": {}}
    for library in ("Babel", "num2words"):
        about["libraries"][library] = importlib.metadata.version(library)
    for split, count in COUNTS.items():
        for language, lines in zip(
            ("en", "de"), zip(*pairs(split, count), strict=True), strict=True
        ):
            data = "".join(f"{line}\n" for line in lines).encode()
            about["sha256"][f"{split}.{language}"] = hashlib.sha256(data).hexdigest()
            files.write(os.path.join(folder, f"{split}.{language}"), [data])
    files.write(os.path.join(folder, _ABOUT), [json.dumps(about, indent=1).encode() + b"\n"])


def prepare(args: argparse.Namespace) -> str:
    """Makes the text and the records that are missing; returns the last line to print.

    Raises:
        UserError: the folder holds other records.
    """
    out, folder = args.out, os.path.join(args.out, "raw")
    state = (
        f"{COUNTS['train']:,} pairs for training and {COUNTS['eval']:,} for evaluation are in "
        f"{out}; train on them: {arguments.train_command('phrases', out)}"
    )
    raw_is_complete, is_ours = _raw_state(folder)
    if raw_is_complete and _has_records(out):
        return f"already complete: {state}"
    writing.State(out).refuse_others(is_ours)
    print(f"{sum(COUNTS.values()):,} pairs of sentences into {out}, about 30 s", flush=True)
    if not raw_is_complete:
        write_raw(folder)
    _prepare(out, folder)
    return f"wrote: {state}"


def _patterns(draw: random.Random) -> Iterator[int]:
    """Endless patterns: all of them in a new order, again and again."""
    order = list(range(len(phrase_patterns.PATTERNS)))
    while True:
        draw.shuffle(order)
        yield from order


def _hash(value: str) -> int:
    return int.from_bytes(hashlib.sha256(value.encode()).digest()[:8], "big")


def _prepare(out: str, folder: str) -> None:
    """Makes the vocabulary and the records of the text in `folder`."""
    flags = [
        f"--{split}_{side}={folder}/{split}.{language}"
        for split in COUNTS
        for side, language in (("source", "en"), ("target", "de"))
    ]
    flags += [f"--vocabulary_size={VOCABULARY}", f"--length={LENGTH}"]
    text.prepare(text.parse(console.Parser(), [*flags, f"--out={out}", "--overwrite"]))


def _raw_state(folder: str) -> tuple[bool, bool]:
    """Whether all text is in the folder, and whether this program wrote it, in any version."""
    gfile = tensorflow().io.gfile

    def read(name: str) -> bytes:
        path = os.path.join(folder, name)
        if not gfile.exists(path):
            return b""
        with gfile.GFile(path, "rb") as file:
            return file.read()

    try:
        about = parse_json(read(_ABOUT) or b"{}")
    except ValueError:
        about = {}
    description = str(about.get("description", ""))
    if description != _DESCRIPTION:
        return False, description.startswith(_DESCRIPTION[:40])
    sums = about["sha256"].items()
    return all(hashlib.sha256(read(name)).hexdigest() == digest for name, digest in sums), True


def _has_records(out: str) -> bool:
    """Whether the files that the manifest lists are there, and no others."""
    try:
        content = manifest.load(out)
    except DataError:  # damaged
        return False
    if not content:
        return False
    names = [content.vocabulary_file, "sources.txt", "references.txt"]
    if not all(tensorflow().io.gfile.exists(os.path.join(out, name)) for name in names):
        return False
    return writing.are_complete(out, {name: row.bytes for name, row in content.shards.items()})
