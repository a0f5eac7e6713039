"""--mode=probe: what a model's features are worth on other data, before anything is trained.

Every image passes the model of `config.init_from` once. A logistic regression on the features of
the training images then classifies those of the evaluation. It takes seconds, and fine-tuning
should beat it.
"""

from __future__ import annotations

import json
import time

import jax
import numpy as np
from etils import epath
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax

import evaluate
import run as runs
from engine import step
from engine.cluster import processes, watchdog
from engine.report import history
from engine.report.history import writing
from engine.step import Compiled
from errors import ConfigError
from programs import evaluated_weights
from run import Settings
from start import Run, check_start, first_state

_STRENGTHS = tuple(10.0**k for k in range(-4, 4))  # of the L2 penalty
_HELD_OUT = 5  # one of so many training examples of a class judges the strengths

# By split: features f32[n, F] and labels int32[n].
Examples = dict[str, tuple[np.ndarray, np.ndarray]]


def probe(settings: Settings) -> None:
    """Prints the accuracy of a logistic regression on features, and writes it to `probe.json`.

    Raises:
      UserError: a mistake that the person can mend.
    """
    if not settings.init_from:
        raise ConfigError("--mode=probe needs a model: give --config.init_from=WORKDIR")
    started, run = time.monotonic(), Run.open(settings, trains=False)
    if not run.benchmark.uses.probes:
        raise ConfigError(
            f"--mode=probe needs labelled images, which benchmark {settings.benchmark!r} or its "
            "data set do not have"
        )
    with run.watched():
        examples, source = _embed(run)
        if jax.process_index():  # process 0 has the features
            return
        (features, labels), (held, truth) = examples["train"], examples["eval"]
        with watchdog.during("fitting the logistic regression"):
            strength, guesses = classify(features, labels, held)
        accuracy, seconds = float(np.mean(guesses == truth)), time.monotonic() - started
        unit, sure = run.benchmark.unit, history.interval(accuracy, len(truth))
        run.say(
            f"probe of {source}: top 1 accuracy {100 * accuracy:.2f} %{sure}: logistic regression "
            f"on {features.shape[1]:,} features of {len(labels):,} {unit}, L2 {strength:g}, "
            f"judged by {len(truth):,} in {seconds:.1f} s"
        )
        result = {"top_1_accuracy": accuracy, "examples": len(truth), "l2": strength}
        result |= {"train_examples": len(labels), "init_from": source, "seconds": seconds}
        path = epath.Path(settings.workdir) / "probe.json"
        with writing(path):
            path.write_text(json.dumps(result, indent=2) + "\n")


def _embed(run: Run) -> tuple[Examples, str]:
    """The features of all examples, empty on processes other than 0; where the model is from."""
    benchmark, examples = run.benchmark, {}
    plan = runs.plan(run.settings, benchmark, benchmark.declared_examples("train") or 1)
    # A missing model is refused before the data are read and anything is compiled.
    weights = check_start(run, run.programs.abstract_state(plan.recipe))
    for split in ("train", "eval"):
        processes.first_process_first(lambda split=split: benchmark.num_examples(split))
    plan = runs.plan(run.settings, benchmark, benchmark.num_examples("train"))
    state, source = first_state(run, plan, weights)
    embed = step.make_predict_step(benchmark.uses.embed, run.mesh)
    specs = run.programs.batch_specs("eval")
    predict = Compiled(step.lower(embed, evaluated_weights(state), specs))
    for split in ("train", "eval"):
        rows = [row for row in evaluate.predict_all(run, predict, state, split) if row]
        if rows:
            names = ("features", "label")
            examples[split] = tuple(np.concatenate([row[name] for row in rows]) for name in names)
    return examples, source


def classify(
    features: np.ndarray, labels: np.ndarray, others: np.ndarray
) -> tuple[float, np.ndarray]:
    """Multinomial logistic regression; a fifth of the examples chooses the strength of its L2.

    Args:
      features: f32[n, F] of the training examples.
      labels: int32[n].
      others: f32[m, F] of the examples to classify.

    Returns:
      (strength of the penalty, labels int32[m] of the others).
    """
    scale = features.std(axis=0) + 1e-6
    x, others = ((rows - features.mean(axis=0)) / scale for rows in (features, others))
    x, others = (np.pad(rows, ((0, 0), (0, 1)), constant_values=1.0) for rows in (x, others))
    classes, targets = np.unique(labels, return_inverse=True)
    rank = np.zeros(len(labels), np.int64)  # of each example in its class
    for k in range(len(classes)):
        rank[targets == k] = np.arange(np.sum(targets == k))
    held = rank % _HELD_OUT == _HELD_OUT - 1

    def loss(strength: float) -> float:
        """The mean loss of the held-out examples."""
        weights = fit(x[~held], targets[~held], len(classes), strength)
        return -float(np.mean(log_softmax(x[held] @ weights, axis=1)[_each(targets[held])]))

    best = min(_STRENGTHS, key=loss) if held.any() else 1e-2
    weights = fit(x, targets, len(classes), best)
    return best, classes[np.argmax(others @ weights, axis=1)]


def fit(x: np.ndarray, targets: np.ndarray, classes: int, strength: float) -> np.ndarray:
    """Minimises mean cross-entropy + strength / 2 * |W|^2 without the last row of W, by L-BFGS.

    Args:
      x: f[n, F + 1], whose last column is 1.
      targets: int[n] from 0.
      classes: K.
      strength: of the penalty.

    Returns:
      W, f64[F + 1, K].
    """
    one_hot = np.eye(classes)[targets]
    penalty = np.full((x.shape[1], 1), strength)
    penalty[-1] = 0.0  # the bias

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = flat.reshape(-1, classes)
        logits = x @ weights
        value = -np.mean(log_softmax(logits, axis=1)[_each(targets)])
        gradient = x.T @ (softmax(logits, axis=1) - one_hot) / len(x) + penalty * weights
        return value + np.sum(penalty * weights**2) / 2, gradient.ravel()

    start = np.zeros(x.shape[1] * classes)
    solution = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": 500})
    return solution.x.reshape(-1, classes)


def _each(targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(len(targets)), targets
