"""Writes made-up ratings in the format of MovieLens' ml-20m, from a model whose ceiling is known.

    python -m scripts.prepare ratings --out data/ratings

Every user and item has a few latent factors and every item a popularity. A user's items are drawn
from softmax(popularity + taste) without replacement, and rated in a random order. Any item may
therefore be the latest, and no model can do better than to rank by that sum: the ceiling. The
program measures this ceiling, and ranking by popularity alone, with MLPerf's ranking of the latest
item among 999 others, and writes both to baselines.json. The same arguments give the same files.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence

import numpy as np

from common import console
from common.data import files
from common.preparation import arguments, writing

LEAST = 20  # ratings of a user, as in MovieLens
HEADER = "userId,movieId,rating,timestamp"
_USERS = 256  # in a block
_SAMPLE = 8192  # users of the baselines
_OTHERS, _TOP = 999, 10
_BEGIN, _END = 789_652_009, 1_427_784_002  # seconds since 1970: ml-20m's first and last rating


class World:
    """The model of the ratings; everything is a function of the arguments."""

    def __init__(self, users: int, items: int, ratings: int, factors: int, seed: int):
        draw = np.random.default_rng((seed, 0))
        self.users, self.items, self.seed = users, items, seed
        self._factors = factors
        self._taste = draw.normal(size=(items, factors)).astype(np.float32) * 3 / factors**0.5
        rank = draw.permutation(items)
        skewed = (rank + 8.0) ** -2
        # With the uniform part, somebody rates every item.
        self._popularity = np.log(skewed / skewed.sum() + 0.1 / items).astype(np.float32)
        self.counts = spread(ratings, draw.lognormal(0.0, 1.1, users), min(items // 3, 9000))
        # The ids of a catalogue rise and have gaps.
        self.item_ids = np.cumsum(draw.integers(1, 9, items))

    def scores(self, block: int) -> np.ndarray:
        """Returns float32[b, items]: a block's log-probabilities, up to a constant per user."""
        draw = np.random.default_rng((self.seed, 1, block))
        rows = len(self.counts[block * _USERS : (block + 1) * _USERS])
        users = draw.normal(size=(rows, self._factors)).astype(np.float32)
        return users @ self._taste.T + self._popularity

    def picks(self, block: int, scores: np.ndarray) -> list[np.ndarray]:
        """Draws the items of each user; the last one is the latest.

        The largest scores plus Gumbel noise are a draw without replacement (Yellott 1977).
        """
        draw = np.random.default_rng((self.seed, 2, block))
        waits = draw.standard_exponential(scores.shape, np.float32)
        noise = -np.log(np.maximum(waits, np.finfo(np.float32).tiny))
        items = []
        for noisy, count in zip(scores + noise, self.counts[block * _USERS :], strict=False):
            best = np.argpartition(-noisy, count - 1)[:count]
            items.append(draw.permutation(np.sort(best)))
        return items


def spread(total: int, weights: np.ndarray, most: int) -> np.ndarray:
    """Returns int64[users] with the sum `total`: LEAST each, the rest by weight, up to `most`."""
    rest = total - LEAST * len(weights)
    counts = LEAST + np.floor(rest * weights / weights.sum()).astype(np.int64)
    counts = np.minimum(counts, most)
    while left := total - int(counts.sum()):
        below = np.flatnonzero(counts < most)
        counts[below[:left]] += -(-left // len(below)) if left > len(below) else 1
        counts = np.minimum(counts, most)
        over = int(counts.sum()) - total
        if over > 0:  # the last share was rounded up
            counts[np.flatnonzero(counts > LEAST)[:over]] -= 1
    return counts


def lines(world: World, block: int, picks: list[np.ndarray]) -> str:
    """Returns the lines of a block in ml-20m's order: by user, then by item."""
    draw = np.random.default_rng((world.seed, 3, block))
    text = []
    for user, items in enumerate(picks, block * _USERS + 1):
        count = len(items)
        first = draw.integers(_BEGIN, _END - 100 * count)
        times = first + np.cumsum(draw.integers(1, 100, count))
        stars = draw.integers(1, 11, count) / 2
        columns = np.stack([world.item_ids[items], stars, times])[:, np.argsort(items)]
        text += [f"{user},{item:.0f},{star},{time:.0f}\n" for item, star, time in columns.T]
    return "".join(text)


def baselines(world: World, popularity: np.ndarray) -> dict[str, float]:
    """Measures HR@10 and NDCG@10 of the model itself and of `popularity` int64[items].

    An item that is drawn several times counts once. Of equal scores, the latest item ranks last.
    """
    # Of the latest item, from 0.
    ranks: dict[str, list[int]] = {"ceiling": [], "popularity": []}
    for block in range(-(-min(world.users, _SAMPLE) // _USERS)):
        scores = world.scores(block)
        draw = np.random.default_rng((world.seed, 4, block))
        for scores_of_user, items in zip(scores, world.picks(block, scores), strict=True):
            free = np.setdiff1d(np.arange(world.items), items)
            others = np.unique(draw.choice(free, _OTHERS))
            for name, ranking in (("ceiling", scores_of_user), ("popularity", popularity)):
                ranks[name].append(int(np.sum(ranking[others] >= ranking[items[-1]])))
    metrics = {}
    for name, rank in ranks.items():
        rank = np.array(rank)
        hit = rank < _TOP
        metrics[f"{name}_hr_at_10"] = float(hit.mean())
        metrics[f"{name}_ndcg_at_10"] = float((hit * np.log(2) / np.log(rank + 2)).mean())
    return metrics


def prepare(args: argparse.Namespace) -> str:
    """Writes ratings.csv and baselines.json; returns the last line to print."""
    started = time.monotonic()
    writing.State(args.out).refuse_others(False)
    world = World(args.users, args.items, args.ratings, args.factors, args.seed)
    popularity, rated = np.zeros(world.items, np.int64), np.zeros(world.items, bool)
    progress = console.ProgressBar("writing", world.users, "users")

    def blocks() -> Iterator[bytes]:
        yield f"{HEADER}\n".encode()
        for block in range(-(-world.users // _USERS)):
            picks = world.picks(block, world.scores(block))
            yield lines(world, block, picks).encode()
            rated[np.concatenate(picks)] = True
            np.add.at(popularity, np.concatenate([items[:-1] for items in picks]), 1)
            progress.add(len(picks))

    files.write(os.path.join(args.out, "ratings.csv"), blocks())
    progress.close()
    metrics = baselines(world, popularity)
    text = json.dumps(metrics, indent=2) + "\n"
    files.write(os.path.join(args.out, "baselines.json"), [text.encode()])
    counts = {"users": args.users, "items": np.count_nonzero(rated), "ratings": args.ratings}
    keys = arguments.keys(**{f"num_{name}": count for name, count in counts.items()})
    return (
        f"wrote {args.ratings:,} ratings by {args.users:,} users of {counts['items']:,} items "
        f"({time.monotonic() - started:.0f} s). HR@10 is {metrics['popularity_hr_at_10']:.3f} by "
        f"popularity, {metrics['ceiling_hr_at_10']:.3f} at best; train on them: "
        f"{arguments.train_command('ncf_synthetic', args.out, *keys)}"
    )


def parse(parser: console.Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Reads the arguments; exits with status 2 and one line if one is invalid."""
    add, total = parser.add_argument, console.integer(1, 10**9)
    arguments.add_out(parser)
    add("--users", type=console.integer(1, 10**7), default=4000, metavar="N", help="users (4000)")
    add("--items", type=console.integer(1, 10**7), default=1500, metavar="N", help="items (1500)")
    add("--ratings", type=total, default=240_000, metavar="N", help="ratings in total (240000)")
    add("--factors", type=console.integer(1, 1000), default=4, help="latent factors (4)")
    add("--seed", type=console.integer(0), default=0, help="another seed, other ratings (0)")
    args = parser.parse_args(argv)
    most = args.users * min(args.items // 3, 9000)
    if not LEAST * args.users <= args.ratings <= most:
        parser.error(
            f"argument --ratings: {args.ratings} must be from {LEAST} for each user "
            f"({LEAST * args.users}) to a third of the items ({most})"
        )
    return args
