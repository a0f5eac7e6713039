"""The seam between MLPerf and the benchmarks: what logs and scripts need to know about each.

A benchmark that MLPerf knows has a module `mlperf.py` next to its `__init__.py` with

    ENTRY: Entry                        how MLPerf runs and checks the benchmark
    facts(run: Run) -> Facts            what the log says about one run

`engine.mlperf_formats` writes the log, `scripts/mlperf` starts the runs and checks them. Neither
names a benchmark.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import benchmarks
from common.errors import ConfigError

Row = tuple[str, Any, Mapping[str, Any]]  # key, value, further metadata


def row(key: str, value: Any = None, **metadata: Any) -> Row:
    """One line of a log."""
    return key, value, metadata


class Rate(Protocol):
    """The numbers of a run's learning rate, as `engine.schedules.Rate` has them."""

    @property
    def peak(self) -> float:
        """The highest rate."""
        ...

    @property
    def warmup_steps(self) -> float:
        """Steps until the peak; a fraction only with learning_rate_schedule='polynomial'."""
        ...

    @property
    def decay_steps(self) -> float:
        """Steps from the peak to the last rate of 'polynomial'; 0 with other schedules."""
        ...


@dataclasses.dataclass(frozen=True)
class Run:
    """The run that a log describes.

    Attributes:
      form: 'mllog' (MLPerf Training 0.7 to 4.0) or 'v0.5'.
      closed: whether the rules of the closed division apply.
      recipe: every value of the config.
      examples: {"train": n, "eval": n}.
      steps: the length of the run.
      learning_rate: its numbers.
      norm_examples: how many examples share the statistics of BatchNorm.
      params: the parameters as arrays or ShapeDtypeStructs.
    """

    form: str
    closed: bool
    recipe: Mapping[str, Any]
    examples: Mapping[str, int]
    steps: int
    learning_rate: Rate
    norm_examples: int
    params: Any


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the log of one run says about its benchmark, under the names of the reference.

    Attributes:
      rows: hyperparameters in the order of the log. The value of "eval_offset" is filled in.
      tensors: the parameters that are initialised.
      steps_per_epoch: what the log counts epochs by; 0: training examples / batch size.
    """

    rows: Sequence[Row]
    tensors: Sequence[str] = ()
    steps_per_epoch: float = 0.0


Rows = Callable[[Run], Mapping[str, Any]]  # the values by key, in the order of the log


def rows(
    run: Run, keys: Rows, tags: Rows, metadata: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Row]:
    """The hyperparameters: `keys` for 'mllog', whose `metadata` are by key; `tags` for 'v0.5'."""
    if run.form == "v0.5":
        return [row(key, value) for key, value in tags(run).items()]
    return [row(key, value, **(metadata or {}).get(key, {})) for key, value in keys(run).items()]


def check_optimizer(run: Run, name: str, *known: str) -> None:
    """Raises ConfigError if the optimizer is none of those that MLPerf's `name` has."""
    if (optimizer := run.recipe["optimizer"]) not in known:
        raise ConfigError(
            f"config.optimizer={optimizer!r}: MLPerf's {name} has "
            f"{', '.join(map(repr, known))} only"
        )


def check_closed(run: Run, breaches: Iterable[str]) -> None:
    """Raises ConfigError if the closed division applies and forbids values; a sentence for each."""
    if run.closed and (text := "; ".join(breaches)):
        raise ConfigError(f"{text} (or give --config.mlperf.division=open)")


def other_values(run: Run, rules: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each config key whose value differs from that of the closed division."""
    for key, value in rules.items():
        # Recipes that are older than a key lack it, and mean what it has by default.
        if run.recipe.get(key, value) != value:
            yield f"config.{key}={run.recipe[key]!r}: the closed division has {value!r}"


def drop_steps(run: Run, name: str) -> list[int]:
    """The steps in config.learning_rate_decay_steps, at which the learning rate drops.

    Raises:
      ConfigError: the schedule is not 'step', or the drops are not steps.
    """
    schedule, text = (run.recipe[f"learning_rate_{key}"] for key in ("schedule", "decay_steps"))
    if schedule != "step" or not re.fullmatch(r"\d+( steps)?(, *\d+( steps)?)*", text):
        raise ConfigError(
            f"config.learning_rate_schedule={schedule!r} and learning_rate_decay_steps={text!r}: "
            f"MLPerf's log of {name} wants 'step' and the drops as steps, such as '9000, 12000'"
        )
    return [int(step) for step in re.findall(r"\d+", text)]


def only_score(scores: Mapping[str, float], form: str) -> Any:
    """How most benchmarks log a score: the one number."""
    del form
    (score,) = scores.values()
    return score


@dataclasses.dataclass(frozen=True)
class Entry:
    """How MLPerf runs and checks one benchmark.

    Attributes:
      name: MLPerf's name, which is also the folder in results/.
      recipe: the default --config of run_and_time.sh.
      targets: by form of the log, the scores that the rules ask for. run_and_time.sh writes the
        first form.
      declares: the config keys that declare the number of examples, with the rules' values; 0
        where the data decide.
      counts: by form, numbers that every log must have, by key.
      variable: the environment variable that names the data.
      meaning: what that variable is, for messages.
      files: groups of patterns, relative to the data; each group must match a file.
      runs: how many runs MLPerf wants.
      init_variable: the environment variable that names the checkpoint for config.init_from.
      init_meaning: what that variable is, for messages.
      init_default: the checkpoint where the variable is not set.
      init_yields: whether the variable is another benchmark's where both run one after the other.
      may_miss: how many of the runs may miss the target.
      period: epochs between evaluations by the rules; 0: not checked.
      evaluations: by form, the epochs of the evaluations by the rules where they have no period.
      ruleset: the newest one of mlperf-logging that knows the benchmark.
      evaluation: (scores of the targets, form) -> what is logged of an evaluation. In v0.5 a
        mapping stands next to "epoch", and any other value under "value".
      logs_eval_size: whether v0.5 has the tag eval_size.
      logs_seed: whether v0.5 has a tag for the seed.
      success_is_bool: whether run_stop of v0.5 has true instead of "true".
    """

    name: str
    recipe: str
    targets: Mapping[str, Mapping[str, float]]
    declares: Mapping[str, int]
    counts: Mapping[str, Mapping[str, int]]
    variable: str
    meaning: str
    files: Sequence[Sequence[str]]
    runs: int
    init_variable: str = ""
    init_meaning: str = ""
    init_default: str = ""
    init_yields: bool = False
    may_miss: int = 1
    period: float = 0.0
    evaluations: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    ruleset: str = ""
    evaluation: Callable[[Mapping[str, float], str], Any] = only_score
    logs_eval_size: bool = True
    logs_seed: bool = True
    success_is_bool: bool = False

    @property
    def form(self) -> str:
        """The form of the log that run_and_time.sh writes."""
        return next(iter(self.targets))


def entry(benchmark: str) -> Entry:
    """How MLPerf runs `benchmark`, a folder in benchmarks/.

    Raises:
      ConfigError: MLPerf does not know the benchmark.
    """
    return _module(benchmark).ENTRY


def entries() -> dict[str, Entry]:
    """The entries of all benchmarks that MLPerf knows, by the name of their folder."""
    return {name: entry(name) for name in benchmarks.names() if _has_module(name)}


def facts(benchmark: str, run: Run) -> Facts:
    """What the log of a run says about its benchmark.

    Raises:
      ConfigError: MLPerf does not know the benchmark, or the rules forbid a value of the recipe.
    """
    module = _module(benchmark)
    check_form(module.ENTRY, run.form)
    return module.facts(run)


def check_form(known: Entry, form: str) -> None:
    """Raises ConfigError if the benchmark has no log of this form."""
    if form not in known.targets:
        forms = " or ".join(map(repr, known.targets))
        raise ConfigError(
            f"config.mlperf.format={form!r}: MLPerf's {known.name} has no log of this form; use "
            f"{forms}"
        )


def _has_module(benchmark: str) -> bool:
    return importlib.util.find_spec(f"{benchmarks.modules()[benchmark]}.mlperf") is not None


def _module(benchmark: str) -> Any:
    if benchmark not in benchmarks.names() or not _has_module(benchmark):
        known = ", ".join(filter(_has_module, benchmarks.names()))
        raise ConfigError(
            f"config.benchmark={benchmark!r} has no MLPerf log; these have one: {known}"
        )
    return importlib.import_module(f"{benchmarks.modules()[benchmark]}.mlperf")
