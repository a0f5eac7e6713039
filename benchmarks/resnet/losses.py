"""Losses with label smoothing and mixed labels (mixup, CutMix), and accuracies of classes."""

import jax
import jax.numpy as jnp
import optax

_PRESENT = 0.2  # a label with a larger share than this is in the image


@jax.named_scope("loss")
def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    second_labels: jax.Array | None,
    share: jax.Array | None,
    smoothing: float,
    loss: str,
) -> jax.Array:
    """f32[b]: the cross-entropy of each row.

    The targets are `share` for the label and 1 - share for the other one, or 1 for the label alone.
    Smoothing makes them (1 - smoothing) * target + smoothing / K, for binary losses too, and of
    several labels per row, whose questions have two answers each, + smoothing / 2.

    Sources: Wightman et al. 2021 (arXiv:2110.00476) for the binary loss, where the classes are
    independent questions; Composer for its sum over the classes; timm for their mean, which is
    smaller by K. timm's runs of that paper then set targets above 0.2 to 1 and others to 0, so that
    smoothing does nothing: "bce_binary".

    Args:
      logits: f32[b, K].
      labels: int32[b], or several for each row: bool[b, K].
      second_labels: as `labels`, of the row that was mixed in; None: nothing was.
      share: f32[b] in [0, 1], of the first label; None if `second_labels` are.
      smoothing: in [0, 1).
      loss: "softmax", "bce_sum", "bce_mean" or "bce_binary".
    """
    classes = logits.shape[-1]
    targets = _k_hot(labels, classes)
    if second_labels is not None and share is not None:
        targets *= share[:, None]
        targets += (1 - share)[:, None] * _k_hot(second_labels, classes)
    answers = classes if labels.ndim == 1 else 2
    targets = (1 - smoothing) * targets + smoothing / answers
    if loss == "softmax":
        return optax.softmax_cross_entropy(logits, targets)
    if loss == "bce_binary":
        targets = (targets > _PRESENT).astype(targets.dtype)
    losses = optax.sigmoid_binary_cross_entropy(logits, targets)
    return jnp.sum(losses, -1) if loss == "bce_sum" else jnp.mean(losses, -1)


def _k_hot(labels: jax.Array, classes: int) -> jax.Array:
    """f32[b, K] of int32[b] or bool[b, K]."""
    return jax.nn.one_hot(labels, classes) if labels.ndim == 1 else labels.astype(jnp.float32)


def accuracies(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """f32[b] each: 1 where the label is the best class of f32[b, K], or among the five best."""
    _, best = jax.lax.top_k(logits, min(5, logits.shape[-1]))
    hit = best == labels[:, None]
    return {
        "top_1_accuracy": hit[:, 0].astype(jnp.float32),
        "top_5_accuracy": jnp.any(hit, axis=1).astype(jnp.float32),
    }


def best_classes(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """The five best classes int32[b, 5], their probabilities f32[b, 5], and the label's f32[b]."""
    best, top = jax.lax.top_k(logits, min(5, logits.shape[-1]))
    of_label = jnp.take_along_axis(logits, labels[:, None], axis=-1)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return {
        "top": top,
        "probability": jnp.exp(best - total),
        "label_probability": jnp.exp(of_label - total)[:, 0],
    }
