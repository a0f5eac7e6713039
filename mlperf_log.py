"""Opens the log that `config.mlperf` asks for: hands the run to `engine.mlperf_formats`."""

from __future__ import annotations

import dataclasses

from ml_collections import ConfigDict

import run as runs
from benchmarks import mlperf as rules
from engine import mlperf_formats
from engine.mlperf import Log
from start import Run


def count(run: Run, evaluating: bool) -> Run:
    """Opens the data before the clock starts, and returns the run with their numbers declared.

    What a run without a log refuses before it compiles is refused here. Nothing of the data stays
    in memory: the run opens them again when its clock runs. `data_index` spares it the counting.

    Raises:
      UserError: the data cannot be used, or a run with this config and workdir cannot be MLPerf's.
    """
    begin(run, evaluating, 0.0)  # writes nothing yet
    settings, subject = run.settings, _subject(run, evaluating)
    recipe = runs.plan(settings, run.benchmark, subject.examples["train"] or 1).recipe
    if all(subject.examples.values()):  # forbidden values are found before it reads the data
        subject.facts(
            steps=recipe.total_steps,
            learning_rate=recipe.learning_rate,
            norm_examples=run.programs.norm_examples,
            params=run.programs.abstract_state(recipe).params,
        )
    run.count_examples(evaluating)
    config = ConfigDict(settings.recipe)
    config.update({key: n for key, n in run.benchmark.data_sizes().items() if not config[key]})
    settings = runs.read(config.lock(), settings.workdir, settings.origin)
    unopened = settings.load_benchmark(f"{settings.workdir}/data_index")
    programs = dataclasses.replace(run.programs, settings=settings, benchmark=unopened)
    return dataclasses.replace(run, settings=settings, programs=programs)


def begin(run: Run, evaluating: bool, started: float) -> Log:
    """The log of a run; `started` is in seconds since 1970.

    Raises:
      ConfigError: a run with this config and workdir cannot be MLPerf's.
    """
    return mlperf_formats.begin(_subject(run, evaluating), started)


def _subject(run: Run, evaluating: bool) -> mlperf_formats.Subject:
    settings, form = run.settings, run.settings.mlperf.format
    entry, recipe = rules.entry(settings.benchmark), settings.recipe
    rules.check_form(entry, form)
    examples = {split: run.benchmark.declared_examples(split) for split in ("train", "eval")}
    closed = settings.mlperf.division == "closed"
    return mlperf_formats.Subject(
        settings=settings.mlperf,
        workdir=settings.workdir,
        seed=settings.seed,
        batch_size=settings.train_batch_size,
        accumulation=settings.gradient_accumulation_steps,
        examples=examples,
        targets={target.metric: target.value for target in run.benchmark.targets},
        stops_at_target=settings.stop_at_target,
        evaluates=evaluating,
        entry=entry,
        facts=lambda **known: rules.facts(
            settings.benchmark, rules.Run(form, closed, recipe, examples, **known)
        ),
    )
