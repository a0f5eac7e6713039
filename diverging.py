"""Says which step and which examples made the loss or the gradient not finite.

Only runs that diverge load this module.
"""

from __future__ import annotations

import json

import jax

from start import Run


def explain(run: Run, step: int, saved: int) -> str:
    """The error for a step that is not finite; `saved` is the newest checkpoint's step."""
    key = "warmup_steps" if run.settings.schedule.warmup_steps else "warmup_epochs"
    good = f"checkpoint {saved} is the last good one" if saved else "there is no checkpoint yet"
    return (
        f"the loss or the gradient of step {step} is not finite (nan or inf)"
        f"{_examples_of(run, step)}; {good}. A lower "
        f"--config.base_learning_rate or a longer --config.{key} often helps"
    )


def _examples_of(run: Run, step: int) -> str:
    """Which examples a step has seen, in words; a file next to host 0's log lists all of them."""
    if jax.process_index():
        return ""  # process 0 names those of all hosts
    try:
        ids = run.benchmark.train_ids(run.settings.train_batch_size, step - 1)
    except Exception:  # the message matters more than its details
        ids = []
    if not ids:
        return ""
    text = json.dumps({"step": step, "ids": ids, "places": run.benchmark.describe(ids)})
    path = run.log.note(f"step-{step}.json", text + "\n")
    return f", its examples are {', '.join(map(str, ids[:4]))} ... (all in {path})"
