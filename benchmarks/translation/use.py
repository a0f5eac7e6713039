"""What a trained translator can be used for: it translates, and its translations are shown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.translation import exhibits, program
from benchmarks.translation.vocabulary import EOS, PAD, Words
from benchmarks.uses import Exhibit, Uses
from errors import CheckpointError, DataError

if TYPE_CHECKING:
    from ops.portable import Program

Sentence = tuple[str, str, str]  # source, translation, reference
_SHOWN = 12  # sentences in the table
_WIDTH = 100  # columns of the terminal
_MOST_SHOWN = 32  # tokens of a sentence whose attention is drawn
_MOST_TOKENS = 2048  # of a sentence: the attention of 8 takes about 2 GB in the Transformer (big)


class TranslatorUses(Uses):
    """The uses of a translator."""

    answers = "sentences"
    at_once = 8  # sentences that a device translates at once
    commands = {
        "translate a sentence": 'python predict.py "A sentence." --workdir={workdir}',
        "translate a file": "python predict.py sentences.txt --workdir={workdir} --out=out.txt",
    }

    def __init__(self, benchmark: Any):
        """`benchmark` is a `translator.Translator`, which imports this module."""
        self._benchmark = benchmark

    def check_vocabulary(self, manifest: Mapping[str, Any], source: str) -> None:
        """Opens the vocabulary in the data folder.

        Args:
          manifest: of the checkpoint, which has the digest of the model's vocabulary.
          source: the checkpoint, for messages.

        Raises:
          UserError: the vocabulary is missing, or not the model's.
        """
        try:
            now = self._benchmark.metadata["vocabulary"]
        except DataError as error:
            raise DataError(
                f"{error}; the model translates with the vocabulary of its training: --data_dir "
                "names another folder that has it"
            ) from error
        if now["digest"] != (known := manifest["vocabulary"])["digest"]:
            here, there = (
                f"{v['size']:,} entries, SHA-256 {v['digest'][:12]}" for v in (now, known)
            )
            raise CheckpointError(
                f"the vocabulary in {self._benchmark.settings.data_dir} ({here}) is not the one of "
                f"{source} ({there}): give the --data_dir that the model was trained on"
            )

    def check_files(self, manifest: Mapping[str, Any], source: str) -> None:
        self.check_vocabulary(manifest, source)

    def programs(self, params: Any, model_state: Any) -> dict[str, Program]:
        """The translator with its beam search inside: ids in, ids and scores out."""
        del model_state
        return {"": program.make(self._benchmark, params)}

    def encode(self, text: str) -> list[int]:
        """The ids of a sentence with EOS at its end; none of an empty one."""
        return [*self._benchmark.vocabulary.encode(text), EOS] if text else []

    def unknown_words(self, sentences: Iterable[Sequence[int]]) -> int:
        """How many ids stand for words that the vocabulary does not have."""
        if not isinstance(self._benchmark.vocabulary, Words):
            return 0
        return sum(ids.count(Words.UNKNOWN) for ids in sentences)

    @property
    def longest(self) -> int:
        """The tokens of the longest sentences that evaluation pads to."""
        return self._benchmark.eval_lengths[-1]

    @property
    def most_tokens(self) -> int:
        """More tokens are not translated at once, for lack of memory."""
        return max(self.longest, _MOST_TOKENS)

    def size(self, length: int) -> int:
        """The least of few sizes that a sentence of `length` tokens fits; each is compiled once."""
        for size in self._benchmark.eval_lengths:
            if size >= length:
                return size
        size = self.longest
        while size < length:
            size *= 2
        return size

    def text(self, tokens: np.ndarray) -> str:
        """The text of a translation int32[n], in one line."""
        return self._benchmark.decode(tokens.tolist())

    def is_cut(self, tokens: np.ndarray) -> bool:
        """Whether a translation int32[n] reached the greatest length before its end."""
        return EOS not in tokens

    # What `attention` shows, in words.
    attends = ""

    def attention(self, params: Any, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """How much each token of a translation looks at each token of its source.

        Args:
          params: of the model, as NumPy arrays.
          source, target: ids int32[S] and int32[T], each with EOS.

        Returns:
          float32[T, S]; the rows sum to 1.
        """
        raise NotImplementedError

    def exhibits(self, rows: Iterator[dict[str, np.ndarray]]) -> list[Exhibit]:
        """Sentences to read, BLEU by length; translations.txt, and .tsv with the references."""
        translations = self._benchmark.translations(rows)
        decode, ids = self._benchmark.vocabulary.decode, self._benchmark.eval_pairs[0]
        sources = [decode(of_one) for of_one in ids.tolist()]
        sentences = list(zip(sources, translations, self._benchmark.references, strict=True))
        return [
            exhibits.worst(sentences, exhibits.sentence_bleu(sentences)),
            exhibits.by_length(sentences, np.count_nonzero(ids > EOS, axis=1)),
            _first(sentences),
        ]

    def insights(
        self, params: Any, model_state: Any, rows: Iterator[dict[str, np.ndarray]]
    ) -> list[Exhibit]:
        """The attention of one sentence as a picture."""
        del model_state
        sources = self._benchmark.eval_pairs[0]
        lengths = np.count_nonzero(sources, axis=1)
        best = 0, 0, sources[0]
        for row in rows:
            for i, tokens in zip(row["id"].tolist(), row["tokens"], strict=True):
                sides = lengths[i], np.count_nonzero(tokens)
                # The longest sentence whose picture can be read; of equal ones the first.
                longer = (max(sides), -i) > (best[0], -best[1])
                if min(sides) and max(sides) <= _MOST_SHOWN and longer:
                    best = max(sides), i, tokens[tokens != PAD]
        length, i, target = best
        if not length:
            return []
        source = sources[i][: lengths[i]]
        weights = self.attention(params, source, target)
        picture = exhibits.attention(weights, self._labels(source), self._labels(target))
        text = (
            f"Where the model looks while it writes a translation: {self.attends}. Each row is a "
            "token of the translation, each column one of the source. The sentence is the "
            f"longest of those with at most {_MOST_SHOWN} tokens."
        )
        head, sentence = ("source", "translation"), (self.text(source), self.text(target))
        return [
            Exhibit(title="Attention", text=text, columns=head, rows=[sentence], pictures=[picture])
        ]

    def _labels(self, tokens: np.ndarray) -> list[str]:
        return ["(end)" if i == EOS else self.text(np.array([i])) for i in tokens.tolist()]


def _first(sentences: Sequence[Sentence]) -> Exhibit:
    """The first translations, and files with all of them."""
    return Exhibit(
        title="Translations",
        text=f"{_exact(sentences):,} of {len(sentences):,} translations equal their reference. "
        f"Below are the first {min(_SHOWN, len(sentences))}, whatever their result; "
        "translations.tsv has all of them.",
        columns=("source", "translation", "reference"),
        rows=[
            (source, line, "the same" if line == reference else reference)
            for source, line, reference in sentences[:_SHOWN]
        ],
        files={
            "translations.txt": "".join(f"{line}\n" for _, line, _ in sentences).encode(),
            "translations.tsv": tsv(sentences),
            "sentences.txt": table(sentences, _SHOWN).encode(),
        },
    )


def table(sentences: Sequence[Sentence], count: int) -> str:
    """The first `count` sentences in lines of at most 100 characters.

    A translation that equals its reference is marked with "=", and its reference left out; all
    others with "!". The last line counts the exact ones among all of `sentences`.
    """
    lines: list[str] = []
    for source, translation, reference in sentences[:count]:
        is_exact = translation == reference
        lines += _lines("  source       ", source)
        lines += _lines(f"{'=' if is_exact else '!'} translation  ", translation)
        lines += [] if is_exact else _lines("  reference    ", reference)
        lines.append("")
    shown = f"; the first {count:,} are above" if count < len(sentences) else ""
    total = f"{_exact(sentences):,} of {len(sentences):,}"
    lines.append(f"{total} translations equal their reference (=){shown}")
    return "\n".join(lines) + "\n"


def tsv(sentences: Sequence[Sentence]) -> bytes:
    """All sentences as tab-separated UTF-8: a line of names, then a line each.

    The columns are source, translation, reference, and exact, which is 1 or 0. Tabs and ends of
    lines within a text become spaces.
    """
    lines = ["source\ttranslation\treference\texact"]
    for sentence in sentences:
        lines.append("\t".join([*map(_plain, sentence), str(_exact([sentence]))]))
    return ("\n".join(lines) + "\n").encode()


def _exact(sentences: Sequence[Sentence]) -> int:
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
