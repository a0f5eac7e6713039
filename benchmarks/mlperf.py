"""The seam between MLPerf and the benchmarks: what logs and scripts need to know about each.

A benchmark that MLPerf knows has a module `mlperf.py` next to its `__init__.py` with

    ENTRY: Entry                        how MLPerf runs and checks the benchmark
    facts(run: Run) -> Facts            what the log says about one run

`engine.mlperf` writes the log, `scripts/mlperf` starts the runs and checks them. Neither names a
benchmark.
"""

import dataclasses
import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import benchmarks
from common.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Run:
    """The run that a log describes."""

    form: str  # 'mllog' (MLPerf Training 0.7 to 4.0) or 'v0.5'
    recipe: Mapping[str, Any]  # every value of the config
    examples: Mapping[str, int]  # {"train": n, "eval": n}
    steps: int  # the length of the run
    learning_rate: Any  # `engine.optim.Rate`: `peak`, `warmup_steps` and `decay_steps`
    norm_examples: int  # how many examples share the statistics of BatchNorm
    params: Any  # the parameters as arrays or ShapeDtypeStructs


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the log of one run says about its benchmark, under the names of the reference."""

    # Hyperparameters by key, in the order of the log, which fills in "eval_offset".
    values: Mapping[str, Any]
    # The metadata that 'mllog' has beside a value, by key.
    metadata: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    tensors: Sequence[str] = ()  # the parameters that are initialised
    steps_per_epoch: float = 0.0  # what the log counts epochs by; 0: training examples / batch size


def check_optimizer(run: Run, name: str, *optimizers: str) -> None:
    """Raises ConfigError if MLPerf's benchmark `name` does not have the recipe's optimizer."""
    if (optimizer := run.recipe["optimizer"]) not in optimizers:
        raise ConfigError(
            f"config.optimizer={optimizer!r}: MLPerf's {name} has "
            f"{', '.join(map(repr, optimizers))} only"
        )


def drop_steps(run: Run, name: str) -> list[int]:
    """The steps in config.learning_rate_decay_steps, at which the learning rate drops.

    ConfigError: the schedule is not 'step', or the drops are not steps.
    """
    schedule = run.recipe["learning_rate_schedule"]
    text = run.recipe["learning_rate_decay_steps"]
    if schedule != "step" or not re.fullmatch(r"\d+( steps)?(, *\d+( steps)?)*", text):
        raise ConfigError(
            f"config.learning_rate_schedule={schedule!r} and learning_rate_decay_steps={text!r}: "
            f"MLPerf's log of {name} wants 'step' and the drops as steps, such as '9000, 12000'"
        )
    return [int(step) for step in re.findall(r"\d+", text)]


def adam_tags(run: Run) -> dict[str, Any]:
    """The constants of Adam under the tags of 'v0.5'."""
    names = ("beta1", "beta2", "epsilon")
    return {f"opt_hp_Adam_{name}": run.recipe[f"adam_{name}"] for name in names}


def only_score(scores: Mapping[str, float], form: str) -> Any:
    """How most benchmarks log a score: the one number."""
    (score,) = scores.values()
    return score


@dataclasses.dataclass(frozen=True)
class Entry:
    """How MLPerf runs and checks one benchmark."""

    name: str  # MLPerf's name, which is also the folder in results/
    recipe: str  # the default --config of run_and_time.sh, which writes the first form of `targets`
    targets: Mapping[str, Mapping[str, float]]  # by form, the scores that the rules ask for
    # The config keys that declare the number of examples, with the rules' values; 0 where the data
    # decide.
    declares: Mapping[str, int]
    variable: str  # the environment variable that names the data
    meaning: str  # what `variable` holds, for messages
    files: Sequence[Sequence[str]]  # groups of patterns in the data; each group must match a file
    runs: int  # how many runs MLPerf wants
    init_variable: str = ""  # the environment variable of the checkpoint for config.init_from
    init_meaning: str = ""  # what `init_variable` holds, for messages
    init_default: str = ""  # the checkpoint where the variable is not set
    # Whether the variable belongs to another benchmark that has it too, where both run one after
    # the other.
    init_yields: bool = False
    ruleset: str = ""  # the newest ruleset of mlperf-logging that knows the benchmark
    # (scores of the targets, form) -> what an evaluation logs. In v0.5 the entries of a mapping
    # stand next to "epoch", and any other value under "value".
    evaluation: Callable[[Mapping[str, float], str], Any] = only_score
    logs_eval_size: bool = True  # whether v0.5 has the tag eval_size
    success_is_bool: bool = False  # whether run_stop of v0.5 has true instead of "true"

    @property
    def form(self) -> str:
        """The form of the log that run_and_time.sh writes."""
        return next(iter(self.targets))


def entry(benchmark: str, form: str = "") -> Entry:
    """How MLPerf runs `benchmark`; ConfigError if it does not know it, or has no such log."""
    rules = _module(benchmark).ENTRY
    if form and form not in rules.targets:
        raise ConfigError(
            f"config.mlperf.format={form!r}: MLPerf's {rules.name} has no log of this form; use "
            f"{' or '.join(map(repr, rules.targets))}"
        )
    return rules


def entries() -> dict[str, Entry]:
    """The entries of all benchmarks that MLPerf knows, by the name of their folder."""
    return {name: entry(name) for name in benchmarks.names() if _has_module(name)}


def facts(benchmark: str, run: Run) -> Facts:
    """What the log of a run says about its benchmark; ConfigError if it cannot describe it."""
    return _module(benchmark).facts(run)


def _has_module(benchmark: str) -> bool:
    return importlib.util.find_spec(f"{benchmarks.modules()[benchmark]}.mlperf") is not None


def _module(benchmark: str) -> Any:
    if benchmark not in benchmarks.names() or not _has_module(benchmark):
        known = ", ".join(filter(_has_module, benchmarks.names()))
        raise ConfigError(
            f"config.benchmark={benchmark!r} has no MLPerf log; these have one: {known}"
        )
    return importlib.import_module(f"{benchmarks.modules()[benchmark]}.mlperf")
