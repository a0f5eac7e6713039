"""Uses a trained translator: translates, shows translations, and exports it.

The exported `Program` has the beam search inside. Exhibits show where translations are wrong: the
worst sentences, BLEU by the source's length, and the first translations.
"""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from benchmarks.exhibits import csv_file, even_groups
from benchmarks.translation import evaluation
from benchmarks.translation.translator import Translator
from benchmarks.translation.vocabulary import EOS, Words
from benchmarks.uses import Bar, Exhibit, Sentences
from common.data import files
from common.errors import CheckpointError, DataError
from common.exportable import Arrays, ExportableProgram
from common.placeholders import difference, find

Sentence = tuple[str, str, str]  # source, translation, reference
_SHOWN = 12  # sentences in a table
_WIDTH = 100  # columns of the terminal
_GROUPS = 6  # groups of sentences of similar length
# Who reads a vocabulary file, by `Vocabulary.kind`.
_READERS = {
    "subwords": "tensor2tensor's SubwordTextEncoder reads",
    "sentencepiece": "sentencepiece reads; add 2 to its ids unless it has 0 for padding and 1 for "
    "the end",
    "marian": "holds two models of sentencepiece and the ids of their pieces; here <pad> is 0 and "
    "</s> is 1, and the others follow in their order",
    "words": "has a word or a part of one (subword-nmt) per line; the first line is id 3, after "
    "special ones, and 2 is any other word",
}
# The inputs and outputs of the program.
_MEANING = {
    "sources": "ids of the words of a sentence, then 1 (EOS), then 0 (PAD) to the end",
    "tokens": "ids of its translations, the best first; each ends with 1, then 0 to the end",
    "scores": "the logarithm of the probability over the length penalty; -inf is no translation",
}


class TranslatorUses(Sentences):
    """The uses of a translator."""

    commands = {
        "translate a sentence": 'python predict.py "A sentence." --workdir={workdir}',
        "translate a file": "python predict.py sentences.txt --workdir={workdir} --out=out.txt",
    }

    def __init__(self, benchmark: Translator):
        self._benchmark = benchmark
        self.lengths, self.beams = benchmark.settings.eval_lengths, benchmark.settings.beam_size

    @property
    def languages(self) -> tuple[str, str]:
        return self._benchmark.languages

    @property
    def codes(self) -> Sequence[str]:
        return self._benchmark.vocabulary.codes

    def check_files(self, manifest: Mapping[str, Any], source: str) -> None:
        """Opens the vocabulary in the data folder; UserError if it is missing, or another one."""
        try:
            now = self._benchmark.metadata["vocabulary"]
        except DataError as error:
            raise DataError(
                f"{error}; the model translates with the vocabulary of its training: --data_dir "
                "names another folder that has it"
            ) from error
        if now["digest"] != (then := manifest["vocabulary"])["digest"]:
            here, there = (
                f"{v['size']:,} entries, SHA-256 {v['digest'][:12]}" for v in (now, then)
            )
            raise CheckpointError(
                f"the vocabulary in {self._benchmark.settings.data_dir} ({here}) is not the one of "
                f"{source} ({there}): give the --data_dir that the model was trained on"
            )

    def programs(self, params: Any, model_state: Any) -> dict[str, ExportableProgram]:
        """The translator with its beam search inside: ids in, ids and scores out."""
        del model_state
        benchmark = self._benchmark
        params = jax.tree.map(jnp.asarray, params)
        length, beams = benchmark.settings.eval_lengths[-1], benchmark.settings.beam_size

        def translate(source: jax.Array) -> tuple[jax.Array, jax.Array]:
            tokens, scores = benchmark.n_best(params, source[None], beams)
            return tokens[0], scores[0]

        def compute(inputs: Arrays) -> Arrays:
            # One after another, so that no translation depends on the others even by rounding.
            tokens, scores = jax.lax.map(translate, inputs["sources"])
            return {"tokens": tokens, "scores": scores}

        def examples(pictures: Sequence[bytes]) -> Sequence[tuple[Arrays, None]]:
            del pictures
            rows = self.drawn()
            return [({"sources": rows}, None), ({"sources": rows[:1]}, None)]

        folder, pattern = benchmark.settings.data_dir, benchmark.settings.vocabulary_file
        vocabulary = epath.Path(files.find(folder, pattern, "vocabulary")[0])
        program = ExportableProgram(
            task=f"translates sentences into {benchmark.languages[1] or benchmark.language!r}. "
            f"Their ids are from "
            f"`{vocabulary.name}`, which {_READERS[benchmark.vocabulary.kind]}",
            compute=compute,
            inputs={"sources": (f"batch, {length}", np.int32)},
            meaning=_MEANING,
            examples=examples,
            files={vocabulary.name: vocabulary.read_bytes()},
        )
        return {"": program}

    def drawn(self) -> np.ndarray:
        """Three sentences of drawn words, int32[3, length], for checks."""
        draw, length = np.random.default_rng(0), self._benchmark.settings.eval_lengths[-1]
        rows = np.zeros((3, length), np.int32)
        for row, size in zip(rows, (1, length // 4, length // 2), strict=True):
            row[:size] = draw.integers(EOS + 1, self._benchmark.vocabulary_size, size)
            row[size] = EOS
        return rows

    def encode(self, text: str) -> list[int]:
        """The ids of a sentence with EOS at its end; no ids for an empty sentence."""
        return [*self._benchmark.vocabulary.encode(text), EOS] if text else []

    def n_best(self, params: Any, inputs: jax.Array, top: int) -> tuple[jax.Array, jax.Array]:
        return self._benchmark.n_best(params, inputs, top)

    def unknown_words(self, sentences: Iterable[Sequence[int]]) -> int:
        if not isinstance(self._benchmark.vocabulary, Words):
            return 0
        return sum(ids.count(Words.UNKNOWN) for ids in sentences)

    def text(self, tokens: np.ndarray) -> str:
        return self._benchmark.decode(tokens.tolist())

    def plain(self, text: str) -> str:
        vocabulary = self._benchmark.vocabulary
        return vocabulary.decode(vocabulary.encode(text)) if isinstance(vocabulary, Words) else text

    def is_cut(self, tokens: np.ndarray) -> bool:
        return EOS not in tokens

    def exhibits(self, rows: Iterator[dict[str, np.ndarray]]) -> list[Exhibit]:
        """Sentences to read, BLEU by length; translations.txt, and .tsv with the references."""
        translations = self._benchmark.translations(rows)
        sources, ids = self._benchmark.sources, self._benchmark.eval_pairs[0]
        sentences = list(zip(sources, translations, self._benchmark.references, strict=True))
        return [
            worst_sentences(sentences),
            *other_placeholders(sentences),
            bleu_by_length(sentences, np.count_nonzero(ids > EOS, axis=1)),
            _first_sentences(sentences),
        ]


def _first_sentences(sentences: Sequence[Sentence]) -> Exhibit:
    """The first translations, and files with all of them."""
    return Exhibit(
        title="Translations",
        text=f"{_matches(sentences):,} of {len(sentences):,} translations equal their reference. "
        f"Below are the first {min(_SHOWN, len(sentences))}, whatever their result; "
        "translations.tsv has all of them.",
        columns=("source", "translation", "reference"),
        rows=[
            (source, line, "the same" if line == reference else reference)
            for source, line, reference in sentences[:_SHOWN]
        ],
        files={
            "translations.txt": "".join(f"{line}\n" for _, line, _ in sentences).encode(),
            "translations.tsv": sentence_tsv(sentences),
            "sentences.txt": sentence_table(sentences, _SHOWN).encode(),
        },
    )


def sentence_table(sentences: Sequence[Sentence], count: int) -> str:
    """The first `count` sentences in lines of at most 100 characters.

    A translation that equals its reference is marked with "=", and its reference left out; all
    others with "!". The last line counts the translations that equal their reference.
    """
    lines: list[str] = []
    for source, translation, reference in sentences[:count]:
        is_same = translation == reference
        lines += _lines("  source       ", source)
        lines += _lines(f"{'=' if is_same else '!'} translation  ", translation)
        lines += [] if is_same else _lines("  reference    ", reference)
        lines.append("")
    shown = f"; the first {count:,} are above" if count < len(sentences) else ""
    total = f"{_matches(sentences):,} of {len(sentences):,}"
    lines.append(f"{total} translations equal their reference (=){shown}")
    return "\n".join(lines) + "\n"


def sentence_tsv(sentences: Sequence[Sentence]) -> bytes:
    """All sentences as tab-separated UTF-8: a line of names, then a line each.

    The columns are source, translation, reference, and exact, which is 1 or 0. Tabs and ends of
    lines within a text become spaces.
    """
    rows = [("source", "translation", "reference", "exact")]
    rows += [(*map(_plain, sentence), str(_matches([sentence]))) for sentence in sentences]
    return "".join("\t".join(row) + "\n" for row in rows).encode()


def _matches(sentences: Sequence[Sentence]) -> int:
    """How many translations equal their reference."""
    return sum(translation == reference for _, translation, reference in sentences)


def _lines(label: str, text: str) -> list[str]:
    """`text` after `label`, on as many lines as it needs."""
    indent = " " * len(label)
    return textwrap.wrap(_plain(text), _WIDTH, initial_indent=label, subsequent_indent=indent) or [
        label.rstrip()
    ]


def _plain(text: str) -> str:
    """`text` on one line."""
    return " ".join(text.replace("\t", " ").splitlines())


def worst_sentences(sentences: Sequence[Sentence]) -> Exhibit:
    """The sentences with the lowest sentence BLEU; at equal BLEU, the longest come first.

    BLEU has the settings of `evaluation.bleu`, and counts only n-grams that fit into the sentence.
    """
    words = evaluation.tokenizer([reference for _, _, reference in sentences])
    metric = evaluation.metric("BLEU", words, effective_order=True)
    scores = [metric.sentence_score(line, [true]).score for _, line, true in sentences]
    words = [len(reference.split()) for _, _, reference in sentences]
    wrong = [i for i, (_, line, true) in enumerate(sentences) if line != true]
    wrong.sort(key=lambda i: (scores[i], -words[i]))
    text = "Every translation equals its reference."
    if wrong:
        text = (
            f"{len(wrong):,} translations differ from their reference. These have the lowest BLEU "
            "per sentence, in per cent; at equal BLEU, the longest come first. worst.csv has all."
        )
    head = ("BLEU", "source", "translation", "reference")
    rows = [(f"{scores[i]:.1f}", *sentences[i]) for i in wrong]
    numbered = [(i + 1, *row) for i, row in zip(wrong, rows, strict=True)]
    files = {"worst.csv": csv_file(("sentence", *head), numbered)}
    title, shown = "Worst sentences", rows[:_SHOWN]
    return Exhibit(title=title, text=text, columns=head, rows=shown, files=files)


def other_placeholders(sentences: Sequence[Sentence]) -> list[Exhibit]:
    """The translations with other placeholders than their source; [] if no source has any."""
    if not (having := sum(bool(find(source)) for source, _, _ in sentences)):
        return []
    rows = [
        (i, text, *sentence)
        for i, sentence in enumerate(sentences, 1)
        if (text := difference(*sentence[:2]))
    ]
    text = (
        f"{having:,} sentences have placeholders, such as %s or <b>. In {len(rows):,} translations "
        f"they differ from those of the source{'; placeholders.csv has all' * bool(rows)}."
    )
    head = ("difference", "source", "translation", "reference")
    files = {"placeholders.csv": csv_file(("sentence", *head), rows)}
    shown = [row[1:] for row in rows[:_SHOWN]]
    return [Exhibit(title="Placeholders", text=text, columns=head, rows=shown, files=files)]


def bleu_by_length(sentences: Sequence[Sentence], lengths: np.ndarray) -> Exhibit:
    """BLEU of groups of sentences with similar `lengths` int[n] of their sources, in tokens."""

    words = evaluation.tokenizer([reference for _, _, reference in sentences])

    def bleu(some: Sequence[Sentence]) -> dict[str, float]:
        return evaluation.bleu([line for _, line, _ in some], [true for _, _, true in some], words)

    overall, bars, table = bleu(sentences)["BLEU"], [], []
    for group in even_groups(lengths, _GROUPS):
        scores = bleu([sentences[i] for i in group])
        low, high = int(lengths[group].min()), int(lengths[group].max())
        label = f"{low:,} to {high:,}" if high > low else f"{low:,}"
        bars.append(Bar(label, scores["BLEU"], overall, len(group)))
        numbers = [f"{scores[name]:.6f}" for name in ("BLEU", "exact", "length_ratio")]
        table.append([low, high, len(group), *numbers])
    head = ["least_tokens", "most_tokens", "sentences", "BLEU", "exact", "length_ratio"]
    return Exhibit(
        title="BLEU by length",
        text="Each bar is the BLEU of the sentences whose source has so many tokens of the "
        "vocabulary, and beside it their number. The mark is the BLEU of all sentences.",
        bars=bars,
        files={"bleu_by_length.csv": csv_file(head, table)},
    )
