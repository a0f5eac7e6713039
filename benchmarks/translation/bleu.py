"""The BLEU score of translations, as MLPerf measures it: without case, with words as in WMT.

sacrebleu computes it. Its "intl" words, its counts and its smoothing are those of tensor2tensor and
of MLPerf's references. The scores differ in rare cases: next to a backslash or to a numeral that is
no decimal digit, such as a superscript; and where no word is right or no translation has 4 words:
then sacrebleu's is 0 and theirs is not.
"""

from __future__ import annotations

from collections.abc import Sequence

_SETTINGS = {"lowercase": True, "tokenize": "intl"}


def score(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Scores translations without case; line i is compared with reference i.

    Args:
      hypotheses: the translations, as plain text.
      references: as many, as plain text.

    Returns:
      "BLEU", a fraction of 0 to 1; "exact", the share of translations that equal their reference,
      with case; "length_ratio", of all words of the translations to those of the references;
      "precision_1" ... "precision_4", the shares of n-grams that the references have, smoothed as
      BLEU is. All are 0 where there is nothing to score.

    Raises:
      ValueError: the lists differ in length.

    Source: Papineni et al. 2002; Post 2018, arXiv:1804.08771 (sacrebleu).
    """
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} translations for {len(references)} references")
    pairs = list(zip(hypotheses, references, strict=True)) or [("", "")]
    result = _metric().corpus_score([pair[0] for pair in pairs], [[pair[1] for pair in pairs]])
    exact = sum(hypothesis == reference for hypothesis, reference in pairs) / len(pairs)
    return {
        "BLEU": result.score / 100,
        "exact": exact if references else 0.0,
        "length_ratio": result.sys_len / max(result.ref_len, 1),
        **{f"precision_{n}": share / 100 for n, share in enumerate(result.precisions, 1)},
    }


def signature() -> str:
    """The settings and version, to be shown beside the score: "nrefs:1|case:lc|...|version:..."."""
    metric = _metric()
    metric.corpus_score([""], [[""]])  # before a score, sacrebleu does not know `nrefs`
    return str(metric.get_signature())


def _metric():
    """sacrebleu's BLEU; it does not warn about text that looks tokenized."""
    from sacrebleu.metrics.bleu import BLEU  # only where a score is computed

    return BLEU(**_SETTINGS, force=True)
