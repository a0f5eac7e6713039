"""Ranks items and scores the rankings: HR, NDCG, Recall, MRR and MAP.

With sampled negatives the one held-out item is ranked among a few items (He et al. 2017, section
4.1; MLPerf). Full ranking has all items that the user does not train on.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

TOP = 10  # of the target: an item ranked among the first 10 is a hit
CUTS = (5, 10, 20)  # of full ranking
_POPULAR = 0.2  # the share of the items that counts as popular


def ranks(scores: jax.Array, items: jax.Array) -> jax.Array:
    """i32[b]: the rank of the first item of each row by score, from 0, as MLPerf's NCF counts.

    `scores` are f32[b, n] of `items` i32[b, n]. An item that a row has several times counts once.
    Items with the same score as the first, and nan, rank before the first, so that a model that
    gives all items one score hits nothing.
    """
    others, other_scores = jax.lax.sort((items[:, 1:], scores[:, 1:]), num_keys=1)
    is_repeated = jnp.pad(others[:, 1:] == others[:, :-1], ((0, 0), (1, 0)))
    counts = ~is_repeated & (others != items[:, :1])
    is_before = ~(other_scores < scores[:, :1])
    return jnp.sum(counts & is_before, axis=1, dtype=jnp.int32)


def hr_and_ndcg(rank: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The terms (hit, gain) f32[b] of HR@10 and NDCG@10 for ranks i32[b] from 0.

    hit is 1 for ranks below 10, else 0. gain is ln 2 / ln(rank + 2) there, the NDCG of a single
    relevant item.
    """
    hit = (rank < TOP).astype(jnp.float32)
    return hit, hit * math.log(2) / jnp.log(rank.astype(jnp.float32) + 2)


def sampled_ranking(scores: jax.Array, items: jax.Array) -> dict[str, jax.Array]:
    """{"hr_at_10": f32[b], "ndcg_at_10": f32[b]} of the first of items i32[b, n] by f32[b, n]."""
    hit, gain = hr_and_ndcg(ranks(scores, items))
    return {f"hr_at_{TOP}": hit, f"ndcg_at_{TOP}": gain}


def full_ranking(scores: jax.Array, chosen: jax.Array, relevant: jax.Array) -> dict[str, jax.Array]:
    """Ranks all items for one user, and scores the ranking at each of `CUTS`.

    With R relevant items, of which h_j in {0, 1} says whether one has rank j from 1 on:

        HR = max h_j    Recall = sum h_j / R    MRR = max h_j / j    (j up to the cut)
        NDCG = sum h_j / log2(j + 1) / the most that it can be with R relevant items
        MAP = sum h_j (h_1 + ... + h_j) / j / min(R, cut)

    as RecBole 1.2 and pytrec_eval count them. Items with the same score as a relevant one, and nan,
    rank before it.

    Args:
      scores: f32[items].
      chosen, relevant: uint8[ceil(items / 8)], np.packbits of the items that the user trains on,
        which are not ranked, and of those that are held out.

    Returns:
      {"hr_at_5": f32[], ...}, and "top" i32[20], the items with the highest scores; -1 for none.
    """
    count = len(scores)
    is_chosen, is_relevant = (
        jnp.unpackbits(bits, count=count).astype(jnp.bool_) for bits in (chosen, relevant)
    )
    scores = jnp.where(jnp.isnan(scores), jnp.where(is_relevant, -jnp.inf, jnp.inf), scores)
    scores = jnp.where(is_chosen, -jnp.inf, scores)
    best, top = jax.lax.top_k(scores, min(CUTS[-1], count))
    is_hit, places = is_relevant[top] & (best > -jnp.inf), jnp.arange(len(best))
    # Before each of the best: other items with at least its score, and relevant ones that come
    # first. Only of items with the last one's score, some may not be among the best.
    last = jnp.min(best)  # not best[-1], a slice, for which XLA's CPU would sort all scores
    is_last = best == last
    ties = jnp.sum((scores == last) & ~is_relevant)
    others = jnp.sum(~is_hit & ~is_last & (best >= best[:, None]), 1) + is_last * ties
    first = (best > best[:, None]) | ((best == best[:, None]) & (places < places[:, None]))
    rank = jnp.where(is_hit, others + jnp.sum(is_hit & first, 1), len(best))
    hits = jnp.zeros(len(best)).at[rank].set(1, mode="drop")
    total = jnp.maximum(jnp.sum(is_relevant), 1)
    gains = 1 / jnp.log2(places + 2.0)
    outputs = {"top": jnp.where(best > -jnp.inf, top, -1)}
    for cut in CUTS:
        found, place, possible = hits[:cut], places[:cut] + 1, jnp.minimum(total, cut)
        most = jnp.sum(gains[:cut] * (place <= possible))
        precision = jnp.cumsum(found) / place
        outputs |= {
            f"hr_at_{cut}": jnp.max(found),
            f"ndcg_at_{cut}": jnp.sum(found * gains[:cut]) / most,
            f"recall_at_{cut}": jnp.sum(found) / total,
            f"mrr_at_{cut}": jnp.max(found / place),
            f"map_at_{cut}": jnp.sum(found * precision) / possible,
        }
    return outputs


def breadth(top: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    """How many of the items are recommended, and how many recommendations are of popular items.

    `top` is int[users, 20], their best items, -1 for none; `counts` int[items] says how often
    each item was chosen. "coverage_at_10" is the share of the items that somebody has among the
    first 10. "popular_share_at_10" is the share of these recommendations that are of the most
    chosen fifth of the items.
    """
    popular = np.zeros(len(counts), np.bool_)
    popular[np.argsort(-counts, kind="stable")[: math.ceil(_POPULAR * len(counts))]] = True
    outputs = {}
    for cut in CUTS:
        items = top[:, :cut][top[:, :cut] >= 0]
        outputs[f"coverage_at_{cut}"] = len(np.unique(items)) / len(counts)
        outputs[f"popular_share_at_{cut}"] = float(popular[items].mean()) if len(items) else 0.0
    return outputs
