"""Evaluates translations: batches of sentences, the true ones, and BLEU, chrF and TER."""

import collections
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.base import HostBatch
from common.data import decoding
from common.errors import DataError, one_line
from common.tensorflow import read_errors, tensorflow
from common.text import decoded, is_sgm, sgm_sentences

BLANKS = "intl"  # sacrebleu's words of texts with blanks between words, as in WMT
# Its words of other texts, by the first word of the names that Unicode gives to their letters.
_SCRIPTS = "HIRAGANA KATAKANA HANGUL THAI LAO TIBETAN MYANMAR KHMER TAI BALINESE JAVANESE"
_WORDS = {"CJK": "zh", **dict.fromkeys(_SCRIPTS.split(), "char")}


def batches(
    sentences: np.ndarray, sizes: Sequence[int], batch_size: int, shard: int, num_shards: int
) -> Iterator[HostBatch]:
    """Every sentence once over all shards, sorted by length.

    Yields inputs int32[h, size], where `size` is the first of `sizes` that fits all of the global
    batch; id int32[h], the row of `sentences`; and mask float32[h]. `sentences` are
    int32[n, sizes[-1]] with zeros at the end; `sizes` rise.
    """
    lengths = np.count_nonzero(sentences, axis=1)
    order = np.argsort(lengths, kind="stable")
    rows = batch_size // num_shards
    for begin in range(0, len(order), batch_size):
        batch = order[begin : begin + batch_size]
        size = next(size for size in sizes if size >= lengths[batch[-1]])
        share = batch[shard * rows : (shard + 1) * rows]
        arrays = {"inputs": sentences[share, :size], "id": share.astype(np.int32)}
        yield decoding.pad_batch(arrays, len(share), rows)


def find_text(data_dir: str, names: str, key: str) -> list[str]:
    """The existing files among the `names` in config.`key`, which commas separate.

    Names are relative to `data_dir`, local or gs://, or absolute. A single file must exist; of
    several files none has to.
    """
    candidates, paths = [name.strip() for name in names.split(",") if name.strip()], []
    for name in candidates:
        is_absolute = "://" in name or name.startswith("/")
        path = name if is_absolute else f"{data_dir.rstrip('/')}/{name}"
        try:
            if tensorflow().io.gfile.exists(path):
                paths.append(path)
        except read_errors() as error:
            raise DataError(f"cannot read {path}: {one_line(error)}") from error
    if len(candidates) == 1 and not paths:
        raise DataError(
            f"config.{key}={names!r}: there is no such file in {data_dir}; '' takes what the "
            "records have"
        )
    return paths


def read_lines(path: str) -> list[str]:
    """The lines of a text file, or the segments of an .sgm, without the white space around each."""
    try:
        with tensorflow().io.gfile.GFile(path, "rb") as file:
            data = b"\n".join(sgm_sentences(file, path)) if is_sgm(path) else file.read()
    except read_errors() as error:
        raise DataError(f"cannot read the text {path}: {one_line(error)}") from error
    # Only "\n" ends a line: texts of the web hold other ends of lines inside.
    return [line.strip() for line in decoded(data, path).removesuffix("\n").split("\n")]


def tokenizer(references: Sequence[str]) -> str:
    """The name of sacrebleu's words for some texts, which their script tells.

    Texts with blanks between words have "intl". Chinese has "zh", others without blanks, such as
    Japanese and Thai, and Korean have "char": each letter is a word.
    """
    text = " ".join(references)
    scripts = {c: re.split("[ -]", unicodedata.name(c, ""))[0] for c in {*text} if c.isalpha()}
    words = {c: _WORDS[script] for c, script in scripts.items() if script in _WORDS}
    counts = collections.Counter(map(words.__getitem__, filter(words.__contains__, text)))
    remaining = text.translate(dict.fromkeys(map(ord, words), " "))
    if counts.total() <= len(re.findall(r"[^\W\d_]+", remaining)):  # their words, of any length
        return BLANKS
    # Japanese has kana beside Chinese letters, Chinese next to none.
    return "char" if 10 * counts["char"] > counts["zh"] else "zh"


def bleu(hypotheses: Sequence[str], references: Sequence[str], words: str = "") -> dict[str, float]:
    """Scores translations without case, with the words of `tokenizer`; MLPerf has those of WMT.

    `words` names the tokenizer of all texts, if these are a part of them.

    sacrebleu computes it; docs/transformer.md says where others' scores differ.

    Returns:
      "BLEU", a fraction of 0 to 1; "exact", the share of translations that equal their reference,
      with case; "length_ratio", the words of the translations over the words of the references;
      "precision_1" ... "precision_4", the shares of n-grams that the references have, smoothed like
      BLEU. All are 0 where there is nothing to score.

    Source: Papineni et al. 2002; Post 2018, arXiv:1804.08771 (sacrebleu).
    """
    pairs = list(zip(hypotheses, references, strict=True)) or [("", "")]
    result = metric("BLEU", words or tokenizer(references)).corpus_score(
        [pair[0] for pair in pairs], [[pair[1] for pair in pairs]]
    )
    exact = sum(hypothesis == reference for hypothesis, reference in pairs) / len(pairs)
    return {
        "BLEU": result.score / 100,
        "exact": exact if references else 0.0,
        "length_ratio": result.sys_len / max(result.ref_len, 1),
        **{f"precision_{n}": share / 100 for n, share in enumerate(result.precisions, 1)},
    }


def logged_bleu(scores: Mapping[str, float], form: str) -> float:
    """BLEU as MLPerf's log of a form wants it: a fraction, but per cent in 'v0.5'."""
    return scores["BLEU"] * (100 if form == "v0.5" else 1)


def chrf_and_ter(
    hypotheses: Sequence[str], references: Sequence[str], names: Sequence[str]
) -> dict[str, float]:
    """chrF and TER, which are reported beside BLEU, as fractions, with sacrebleu's defaults.

    "chrF" is chrF2, the F-score of n-grams of characters, with case. "TER" counts the edits and
    shifts of words for each word of the references, without case: lower is better, and it may
    exceed 1; letters of Chinese and Japanese are words.

    Source: Popovic 2015 (chrF); Snover et al. 2006 (TER).
    """
    texts = [*hypotheses] or [""], [[*references] or [""]]
    words = tokenizer(references)
    return {name: metric(name, words).corpus_score(*texts).score / 100 for name in names}


def signature(name: str, words: str = BLANKS) -> str:
    """sacrebleu's settings and version, which belong to a score: "nrefs:1|case:lc|..."."""
    scorer = metric(name, words)
    scorer.corpus_score([""], [[""]])  # before a score, sacrebleu does not know `nrefs`
    return str(scorer.get_signature())


def metric(name: str, words: str, **settings: Any):
    """sacrebleu's "BLEU", "chrF" or "TER" for texts with the words of `tokenizer`."""
    # Only where a score is computed.
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER

    if name == "BLEU":  # `force`: it does not warn about text that looks tokenized
        return BLEU(lowercase=True, tokenize=words, force=True, **settings)
    if name == "chrF":
        return CHRF()
    return TER() if words == BLANKS else TER(normalized=True, asian_support=True)
