"""--mode=eval: evaluates checkpoints of a workdir; with --watch, new ones as they appear."""

import contextlib
import time

from engine import mesh as meshes
from engine.evaluate import Scores, begin_evaluation, examining, exhibits, next_step, report_scores
from engine.report.writers import Reporter
from engine.run import Settings


def evaluate(settings: Settings, checkpoint: str, watch_seconds: float) -> Scores:
    """Evaluates a checkpoint of the workdir; results go to its folder `eval`.

    `checkpoint` is "latest", "best" (in the evaluations of the run) or a step. With `watch_seconds`
    it goes on with new checkpoints as they appear, until the run's last step is evaluated or no
    checkpoint came for so long. Returns the scores of the last checkpoint.
    """
    with examining(settings, checkpoint, watch_seconds) as examination:
        run, plan, step = examination.run, examination.plan, examination.step
        title = f"{run.title}, evaluation"
        reporter = Reporter(settings.workdir, subdir="eval", title=title, **run.shown_metrics)
        with contextlib.closing(reporter):
            while True:
                started, scores = time.monotonic(), {}
                state = examination.restore(step, watching=bool(watch_seconds))
                if state is not None:
                    evaluation = begin_evaluation(run, examination.predict, state, step, True)
                    del state  # else the next one would need as much memory again
                    scores, seconds = evaluation.scores(), time.monotonic() - started
                    report_scores(run, reporter, step, plan.num_examples, scores, seconds)
                    for exhibit in exhibits(run, evaluation):
                        for name, data in exhibit.files.items():
                            run.say(f"wrote {reporter.write(name, data)}")
                if not watch_seconds or step >= plan.recipe.total_steps:
                    return scores
                newer = next_step(examination.checkpoints, step, watch_seconds)
                newer = meshes.broadcast(newer)  # hosts look at different times
                if newer is None:
                    run.say(f"no new checkpoint for {watch_seconds:.0f} s: stopped watching")
                    return scores
                step = newer
