"""One label per picture, or several: batches, losses and scores of each kind of data.

`OneLabel` and `SeveralLabels` have the same methods; `ImageClassifier.labels` is one of them.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.base import distinct, mean_scores
from benchmarks.resnet import losses, scores
from benchmarks.resnet.records import class_name
from benchmarks.resnet.settings import Objective
from benchmarks.resnet.use import exhibits
from benchmarks.uses import Exhibit
from common.errors import ConfigError

Row = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class OneLabel:
    """Each picture has one of K classes."""

    classes: int  # K
    objective: Objective
    name = "one"  # the value of config.labels
    metric = "top_1_accuracy"  # of the target
    proportions = ("top_1_accuracy", "top_5_accuracy")

    @property
    def loss(self) -> str:
        """The kind of cross-entropy in training."""
        return self.objective.loss

    def leaf(self, batch: int) -> jax.ShapeDtypeStruct:
        """The leaf "label": int32[batch], the classes from 0."""
        return jax.ShapeDtypeStruct((batch,), np.int32)

    def draw(self, batch: int, draw: np.random.Generator) -> np.ndarray:
        """A leaf at random."""
        return draw.integers(0, self.classes, batch, np.int32)

    def metrics(self, logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        """f32[b] each, of logits f32[b, K]: what training reports the means of."""
        return losses.accuracies(logits, labels)

    def predicted(self, logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        """The loss and the best classes of each example, and whether its label is among them."""
        smoothing = self.objective.label_smoothing
        return {
            "loss": losses.cross_entropy(logits, labels, None, None, smoothing, "softmax"),
            **losses.accuracies(logits, labels),
            **losses.best_classes(logits, labels),
        }

    @property
    def headline(self) -> tuple[str, ...]:
        """The scores that a line of the log has."""
        return ("loss", *self.proportions)

    def score(self, rows: Iterator[Row], shown: Sequence[str]) -> dict[str, float]:
        """The means over all examples, and the scores of classes; each class's own if `shown`."""
        kept = [*rows]
        found = scores.of_rows(kept, self.classes)
        means = {name: mean(found) for name, mean in scores.MEANS.items()}
        own = mean_scores({name: row[name] for name in self.headline} for row in kept)
        return own | means | found.of_each(shown)

    def score_names(self, shown: Sequence[str]) -> tuple[str, ...]:
        """The names of the scores."""
        return (*self.headline, *scores.MEANS, *scores.names_of_each(shown))

    def group_scores(
        self, rows: Iterator[Row], names: tuple[str, ...]
    ) -> dict[str, tuple[float, int]]:
        """The accuracy of each class that has an evaluated image."""
        parts = [(row["label"], row["top_1_accuracy"]) for row in rows]
        labels, correct = map(np.concatenate, zip(*parts, strict=True))
        counts, right = np.bincount(labels), np.bincount(labels, correct)
        return _named(
            {i: right[i] / counts[i] for i in np.flatnonzero(counts).tolist()}, counts, names
        )

    def exhibits(self, rows: Iterator[Row], photos: exhibits.Photos) -> list[Exhibit]:
        """The classes, the worst mistakes and the best hits."""
        names = ("id", "label", "top", "probability", "label_probability")
        parts = [[row[name] for name in names] for row in rows]
        columns = map(np.concatenate, zip(*parts, strict=True))
        return exhibits.make(exhibits.Predictions(*columns), photos)


@dataclasses.dataclass(frozen=True)
class SeveralLabels:
    """Each picture has any of K labels, or none: K independent questions.

    ConfigError if classes are to be weighed. The loss of `softmax` is the sum of the questions'.
    """

    classes: int  # K
    objective: Objective
    name = "several"
    metric = "mAP"
    proportions = ("exact_match",)
    headline = ("mAP", "macro_f1", "loss", "exact_match")

    def __post_init__(self):
        if self.objective.class_weights:
            raise ConfigError(
                f"config.class_weights={self.objective.class_weights!r} is for one label per "
                "picture, and the data have several: set --config.class_weights=''"
            )

    @property
    def loss(self) -> str:
        """The kind of cross-entropy, as `losses.cross_entropy` takes it."""
        return "bce_sum" if self.objective.loss == "softmax" else self.objective.loss

    def leaf(self, batch: int) -> jax.ShapeDtypeStruct:
        """The leaf "label": bool[batch, K]."""
        return jax.ShapeDtypeStruct((batch, self.classes), np.bool_)

    def draw(self, batch: int, draw: np.random.Generator) -> np.ndarray:
        """A leaf at random."""
        return draw.integers(0, 2, (batch, self.classes)).astype(bool)

    def metrics(self, logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        """Whether all K answers are right: f32[b]."""
        return {"exact_match": jnp.all((logits > 0) == labels, axis=1).astype(jnp.float32)}

    def predicted(self, logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        """The loss of each example, whether all answers are right, and its logits."""
        smoothing = self.objective.label_smoothing
        loss = losses.cross_entropy(logits, labels, None, None, smoothing, self.loss)
        return {"loss": loss, **self.metrics(logits, labels), "logits": logits}

    def score(self, rows: Iterator[Row], shown: Sequence[str]) -> dict[str, float]:
        """mAP, the mean of the labels' average precisions, and scores at a probability of 0.5.

        A label that no evaluated picture has is in no mean. Each label's own scores if `shown`.
        """
        kept = [*rows]
        logits, labels = _joined(kept)
        found = scores.of_labels(logits > 0, labels)
        means = mean_scores({name: row[name] for name in ("loss", "exact_match")} for row in kept)
        precisions = average_precisions(logits, labels)
        own = {"mAP": scores.mean(precisions), "macro_f1": scores.macro_f1(found)}
        return own | means | found.of_each(shown)

    def score_names(self, shown: Sequence[str]) -> tuple[str, ...]:
        """The names of the scores."""
        return (*self.headline, *scores.names_of_each(shown))

    def group_scores(
        self, rows: Iterator[Row], names: tuple[str, ...]
    ) -> dict[str, tuple[float, int]]:
        """The average precision of each label that an evaluated picture has."""
        logits, labels = _joined([*rows])
        precisions, counts = average_precisions(logits, labels), labels.sum(axis=0)
        return _named({i: precisions[i] for i in np.flatnonzero(counts).tolist()}, counts, names)

    def exhibits(self, rows: Iterator[Row], photos: exhibits.Photos) -> list[Exhibit]:
        """The labels, and the pictures that miss one or have one too many."""
        kept = [*rows]
        ids = np.concatenate([row["id"] for row in kept])
        logits, labels = _joined(kept)
        return exhibits.make_of_labels(
            ids, logits, labels, average_precisions(logits, labels), photos
        )


Labels = OneLabel | SeveralLabels


def average_precisions(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """float64[K]: of each label the mean, over the pictures that have it, of the precision there.

    That is the share of pictures with the label among those with as large a value or a larger one,
    as sklearn's average_precision_score has it. nan for a label that no picture has.

    Args:
      values: float[n, K], such as logits; larger means likelier.
      labels: bool[n, K].
    """
    result = np.full(labels.shape[1], np.nan)
    for k in np.flatnonzero(labels.any(axis=0)):
        order = np.argsort(-values[:, k], kind="stable")
        ordered, hits = values[order, k], np.cumsum(labels[order, k])
        lasts = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))  # of equal values
        found = hits[lasts]
        result[k] = np.sum(np.diff(found, prepend=0) * found / (lasts + 1)) / found[-1]
    return result


def _joined(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """(f32[n, K] the logits, bool[n, K] the labels) of all rows."""
    logits, labels = (np.concatenate([row[name] for row in rows]) for name in ("logits", "label"))
    return logits, labels.astype(bool)


def _named(
    values: dict[int, float], counts: np.ndarray, names: tuple[str, ...]
) -> dict[str, tuple[float, int]]:
    """(value, count) by the name of the class."""
    keys = distinct([(i, class_name(names, i)) for i in values])
    pairs = [(float(value), int(counts[i])) for i, value in values.items()]
    return dict(zip(keys, pairs, strict=True))
