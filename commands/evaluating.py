"""--mode=eval: evaluates checkpoints of a workdir; with --watch, new ones as they appear."""

import contextlib
import time

from engine.evaluate import Scores, begin_evaluation, examining, exhibits, report_scores
from engine.plan import Settings
from engine.report.writers import Reporter


def evaluate(settings: Settings, checkpoint: str, watch_seconds: float) -> Scores:
    """Evaluates a checkpoint of the workdir; results go to its folder `eval`.

    Where the run keeps an average of the weights (EMA), that is evaluated. `checkpoint` is
    "latest", "best" (in the evaluations of the run) or a step. With `watch_seconds` it goes on with
    new checkpoints as they appear, until the run's last step is evaluated or no checkpoint came for
    so long. Returns the scores of the last checkpoint.
    """
    with examining(settings, checkpoint, watch_seconds) as examination:
        run, plan = examination.run, examination.plan
        title = f"{run.title}, evaluation"
        reporter = Reporter(settings.workdir, subdir="eval", title=title, **run.shown_metrics)
        with contextlib.closing(reporter):
            started, scores, restored = time.monotonic(), {}, examination.restore()
            while restored is not None:
                step, state = restored
                evaluation = begin_evaluation(run, examination.predict, state, step, True)
                del restored, state  # else the next one would need as much memory again
                scores, seconds = evaluation.scores(), time.monotonic() - started
                report_scores(run, reporter, step, plan.num_examples, scores, seconds)
                for exhibit in exhibits(run, evaluation):
                    for name, data in exhibit.files.items():
                        reporter.say(f"wrote {reporter.write(name, data)}")
                if not watch_seconds or step >= plan.total_steps:
                    for note in run.benchmark.score_notes(scores):
                        reporter.say(f"NOTE {note}")
                    return scores
                restored = examination.restore(step, watch_seconds)
                started = time.monotonic()
            reporter.say(f"no new checkpoint for {watch_seconds:.0f} s: stopped watching")
            return scores
