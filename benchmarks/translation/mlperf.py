"""The values that both translators have in MLPerf's logs; the module `mlperf` of each adds more."""

import functools
from collections.abc import Mapping
from typing import Any

from benchmarks.mlperf import Entry, Run, only_score

# The key of 'mllog' that says how sentences with more tokens are treated.
DISCARD = {"max_sequence_length": {"method": "discard"}}


def evaluation(scores: Mapping[str, float], form: str) -> Any:
    """BLEU as the log wants it: a fraction, but per cent in 'v0.5'."""
    return only_score(scores, form) * (100 if form == "v0.5" else 1)


# What the entries of both have in common.
entry = functools.partial(Entry, runs=10, ruleset="0.7.0", evaluation=evaluation)


def adam_tags(run: Run) -> dict[str, Any]:
    """The constants of Adam under the tags of 'v0.5'."""
    names = ("beta1", "beta2", "epsilon")
    return {f"opt_hp_Adam_{name}": run.recipe[f"adam_{name}"] for name in names}
