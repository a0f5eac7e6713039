"""Opens the log that `config.mlperf` asks for: hands the run to `engine.mlperf_formats`."""

from __future__ import annotations

from benchmarks import mlperf as rules
from engine import mlperf_formats
from engine.mlperf import Log
from start import Run


def begin(run: Run, evaluating: bool, started: float) -> Log:
    """The log of a run; `started` is in seconds since 1970.

    Raises:
      ConfigError: a run with this config and workdir cannot be MLPerf's.
    """
    settings, form = run.settings, run.settings.mlperf.format
    entry, recipe = rules.entry(settings.benchmark), settings.recipe
    rules.check_form(entry, form)
    examples = {split: run.benchmark.declared_examples(split) for split in ("train", "eval")}
    closed = settings.mlperf.division == "closed"
    subject = mlperf_formats.Subject(
        settings=settings.mlperf,
        workdir=settings.workdir,
        seed=settings.seed,
        batch_size=settings.train_batch_size,
        accumulation=settings.gradient_accumulation_steps,
        examples=examples,
        undeclared=tuple(key for key in entry.declares if not recipe[key]),
        targets={target.metric: target.value for target in run.benchmark.targets},
        stops_at_target=settings.stop_at_target,
        evaluates=evaluating,
        entry=entry,
        facts=lambda **known: rules.facts(
            settings.benchmark, rules.Run(form, closed, recipe, examples, **known)
        ),
    )
    return mlperf_formats.begin(subject, started)
