"""What a run refuses at its start, once its length is known; --mode=doctor refuses the same."""

from collections.abc import Iterator
from typing import Any

from common.errors import ConfigError, DataError, some
from engine import mlperf, optim, schedules
from engine.cadence import MAX_STEPS, to_steps
from engine.plan import Plan, Programs, Settings, intervals
from engine.report.writers import Profiler
from engine.step import TrainState

_MOST_NAMES = 24  # of scores in a message


def check_schedule(settings: Settings) -> None:
    """Refuses durations, a schedule or an optimizer that work with no number of examples.

    So they are refused before the data are counted. `make_plan` refuses the others.
    """
    sizes: Any = {"batch_size": settings.train_batch_size, "num_examples": 1}  # the shortest epoch
    intervals(settings, sizes)
    to_steps(settings.train_steps, **sizes, name="train_steps")
    rate = schedules.make(settings, train_steps=MAX_STEPS, **sizes)  # the longest run
    optim.make(settings, rate, lambda params: params, lambda params: params)


def check_settings(programs: Programs, evaluating: bool) -> None:
    """Refuses values that no run on these devices could use; UserError names the key."""
    settings = programs.settings
    if settings.profile_steps:
        Profiler(settings.profile_steps, settings.workdir)
    if settings.check_devices_every and programs.mesh.size == 1:
        raise ConfigError(
            f"config.check_devices_every={settings.check_devices_every} compares devices, and this "
            "run has one: set it to 0"
        )
    if programs.benchmark.no_evaluation:  # the run says which keys have no effect
        return
    check_best_by(programs)
    if settings.patience and not evaluating:
        raise ConfigError(
            f"config.patience={settings.patience} needs evaluations, which --mode=train leaves "
            "to another process: use --mode=train_and_eval or --config.patience=0"
        )


def check_best_by(programs: Programs) -> None:
    """Raises ConfigError if `config.best_by` is no score of the evaluation."""
    by = programs.settings.best_by
    if by and by not in (names := programs.benchmark.score_names):
        raise ConfigError(
            f"config.best_by={by!r}: the evaluation has no such score; give one of "
            f"{some(names, _MOST_NAMES)}, or '' for {programs.benchmark.targets[0].metric}"
        )


def check_evaluates(programs: Programs) -> None:
    """Raises DataError if the config leaves nothing to evaluate."""
    if why := programs.benchmark.no_evaluation:
        other = programs.settings.steps_of or "a run that holds examples out"
        raise DataError(
            f"{why}: no example is held out, so there is nothing to evaluate; the score to expect "
            f"is about that of {other}"
        )


def check_plan(programs: Programs, plan: Plan, state: TrainState, evaluating: bool) -> None:
    """Refuses values that a run of this length could not use, before anything is compiled.

    `state` is the plan's initial state, or its shapes. UserError names the key.
    """
    check_settings(programs, evaluating)
    settings, total = programs.settings, plan.total_steps
    if settings.profile_steps:
        Profiler(settings.profile_steps, settings.workdir).check(total)
    first = plan.eval_every.next_after(0)
    is_late = first is None or first >= total
    waits = settings.patience and not programs.benchmark.no_evaluation
    if waits and is_late and not plan.eval_every.by_clock:
        raise ConfigError(_too_late_for_patience(programs, plan))
    if settings.mlperf.format and all((log := mlperf.Follower(programs)).examples.values()):
        log.facts(plan, state.params)


def _too_late_for_patience(programs: Programs, plan: Plan) -> str:
    """The message of a run whose patience would wait for evaluations that never come."""
    settings, total = programs.settings, plan.total_steps
    text = f"config.patience={settings.patience} needs evaluations before the last step, "
    if total == 1:
        return f"{text}and this run has one step: set it to 0, or train longer"
    period = "1 epoch"
    if round(plan.num_examples / settings.train_batch_size) >= total:
        period = str(max(1, total // (settings.patience + 2)))  # as many as it waits for
    offset = " --config.eval_offset=''" if settings.eval_offset else ""
    return (
        f"{text}and config.steps_per_eval={settings.steps_per_eval!r} has none in {total:,} steps: "
        f"give --config.steps_per_eval={period!r}{offset}, or --config.patience=0"
    )


def notes_of(plan: Plan) -> Iterator[str]:
    """Sentences about a plan that a user should know before training."""
    warmup = plan.learning_rate.warmup_steps
    if warmup > plan.total_steps:
        yield f"the warm-up of {warmup:,.0f} steps does not end within the run"
