"""Writes synthetic ratings in the format of MovieLens' ml-20m, from a model whose ceiling is known.

    python -m scripts.prepare ratings --out data/ratings

Every user and item has a few latent factors and every item a popularity. A user's items are drawn
from softmax(popularity + taste) without replacement, and rated in a random order. Any item may
therefore be the latest, and no model can do better than to rank by that sum: the ceiling. The
program measures this ceiling, and ranking by popularity alone, as HR@10 of the latest item among
999 others, and writes both to baselines.json. The same arguments give the same files.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from common import cli
from common.data import storage
from common.preparation import arguments, writing
from common.progress import ProgressBar

LEAST = 20  # ratings of a user, as in MovieLens
HEADER = "userId,movieId,rating,timestamp"
_BLOCK = 256  # users that are drawn at once
_SAMPLE = 8192  # users of the baselines
_OTHERS, _TOP = 999, 10
_FACTORS = 4


class World:
    """The model of the ratings; everything is a function of the arguments."""

    def __init__(self, users: int, items: int, ratings: int):
        draw = np.random.default_rng(0)
        self.users, self.items = users, items
        self._taste = draw.normal(size=(items, _FACTORS)).astype(np.float32) * 3.3 / _FACTORS**0.5
        skewed = (draw.permutation(items) + 8.0) ** -2
        # With the uniform part, somebody rates every item.
        self._popularity = np.log(skewed / skewed.sum() + 0.1 / items).astype(np.float32)
        shares = draw.uniform(size=users)
        self.counts = LEAST + draw.multinomial(ratings - LEAST * users, shares / shares.sum())

    def block(self, number: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Of some users float32[b, items], log-probabilities up to a constant, and their items.

        The last item of a user is the latest.
        """
        draw = np.random.default_rng((1, number))
        counts = self.counts[number * _BLOCK : (number + 1) * _BLOCK]
        users = draw.normal(size=(len(counts), _FACTORS)).astype(np.float32)
        scores = users @ self._taste.T + self._popularity
        return scores, [pick(draw, row, n) for row, n in zip(scores, counts, strict=True)]

    def baselines(self, popularity: np.ndarray) -> dict[str, float]:
        """HR@10 of the model itself and of `popularity` int64[items]; ties are no hits.

        An item that is drawn several times counts once.
        """
        hits: dict[str, list[Any]] = {"popularity_hr_at_10": [], "ceiling_hr_at_10": []}
        for number in range(-(-min(self.users, _SAMPLE) // _BLOCK)):
            draw = np.random.default_rng((2, number))
            for scores, items in zip(*self.block(number), strict=True):
                others = np.unique(draw.choice(np.setdiff1d(np.arange(self.items), items), _OTHERS))
                for name, ranking in zip(hits, (popularity, scores), strict=True):
                    hits[name].append(np.sum(ranking[others] >= ranking[items[-1]]) < _TOP)
        return {name: float(np.mean(of_users)) for name, of_users in hits.items()}


def pick(draw: np.random.Generator, scores: np.ndarray, count: int) -> np.ndarray:
    """Draws `count` items without replacement, in a random order.

    The largest scores plus Gumbel noise are such a draw (Yellott 1977).
    """
    noisy = scores + draw.gumbel(size=scores.shape)
    return draw.permutation(np.argpartition(-noisy, count - 1)[:count])


def lines(first_user: int, picks: list[np.ndarray]) -> str:
    """The lines of some users in ml-20m's order: by user, then by item."""
    draw, text = np.random.default_rng((3, first_user)), []
    for user, items in enumerate(picks, first_user):
        times = 10**9 + np.cumsum(draw.integers(1, 100, len(items)))  # seconds since 1970
        stars = draw.integers(1, 11, len(items)) / 2
        order = np.argsort(items)
        rows = zip(items[order] + 1, stars[order], times[order], strict=True)
        text += [f"{user},{item},{star},{when}\n" for item, star, when in rows]
    return "".join(text)


def prepare(args: argparse.Namespace) -> str:
    """Writes ratings.csv and baselines.json; returns the last line to print."""
    started = time.monotonic()
    writing.State(args.out).refuse_others(False)
    world = World(args.users, args.items, args.ratings)
    popularity, rated = np.zeros(world.items, np.int64), np.zeros(world.items, bool)
    progress = ProgressBar("writing", world.users, "users")

    def blocks() -> Iterator[bytes]:
        yield f"{HEADER}\n".encode()
        for number in range(-(-world.users // _BLOCK)):
            _, picks = world.block(number)
            yield lines(number * _BLOCK + 1, picks).encode()
            rated[np.concatenate(picks)] = True
            np.add.at(popularity, np.concatenate([items[:-1] for items in picks]), 1)
            progress.add(len(picks))

    storage.write(os.path.join(args.out, "ratings.csv"), blocks())
    progress.close()
    metrics = world.baselines(popularity)
    text = json.dumps(metrics, indent=2) + "\n"
    storage.write(os.path.join(args.out, "baselines.json"), [text.encode()])
    counts = {"users": args.users, "items": np.count_nonzero(rated), "ratings": args.ratings}
    keys = arguments.keys(**{f"num_{name}": count for name, count in counts.items()})
    return (
        f"wrote {args.ratings:,} ratings by {args.users:,} users of {counts['items']:,} items "
        f"({time.monotonic() - started:.0f} s). HR@10 is {metrics['popularity_hr_at_10']:.3f} by "
        f"popularity, {metrics['ceiling_hr_at_10']:.3f} at best; train on them: "
        f"{arguments.train_command('ncf_synthetic', args.out, *keys)}"
    )


def parse(parser: cli.Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Reads the arguments; exits with status 2 and one line if one is invalid."""
    add, total = parser.add_argument, cli.integer(1, 10**9)
    arguments.add_out(parser)
    add("--users", type=cli.integer(1, 10**7), default=4000, metavar="N", help="users (4000)")
    add("--items", type=cli.integer(80, 10**7), default=1500, metavar="N", help="items (1500)")
    add("--ratings", type=total, default=240_000, metavar="N", help="ratings in total (240000)")
    args = parser.parse_args(argv)
    least, most = LEAST * args.users, args.users * args.items // 4
    if not least <= args.ratings <= most:
        parser.error(
            f"argument --ratings: {args.ratings} must be from {LEAST} for each user ({least}) to a "
            f"quarter of the items for each ({most})"
        )
    return args
