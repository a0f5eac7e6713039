"""Recommends items to users: what predict.py does with NCF."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from commands.predict import outputs, texts
from commands.predict.model import Predictor, Request, data_dir_flag, flag, with_data
from commands.predict.outputs import FORMATS, Row, say, shortest, shown, text_cell
from common import console
from common.errors import ConfigError, DataError
from engine import model_source

COLUMNS = ("user", "rank", "item", "title", "score", "error")
_flag = functools.partial(flag, "recommenders")


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of predict.py for recommenders."""

    formats = FORMATS

    user: str = _flag("", "ids of users, with commas between; or give a file of them as SOURCE")
    top: int = _flag(10, "items for each user (10)", console.integer(1))
    data_dir: str = data_dir_flag()


class Item(NamedTuple):
    """One item; `score` is the probability that the user rates it, `title` may be empty."""

    item: int
    title: str
    score: float


def run(request: Request, options: Options, model: model_source.Model, stdin: Iterable[str]) -> int:
    """Writes the best items for each user; see `commands.predict.run`."""
    del stdin  # `texts` reads it
    started = time.monotonic()
    if not options.user and not request.sources:
        raise ConfigError(
            "name the users: --user=1,2,3, a file with an id on each line, or `-` for ids on stdin"
        )
    names = texts.files(request.sources, "")
    outputs.check_apart(names, [("out", request.out)])
    recommender = Recommender(model, options, request.batch_size)
    say(
        f"{model.source}: {len(recommender.uses.item_ids):,} items; loaded in "
        f"{time.monotonic() - started:.1f} s"
    )
    users = errors = 0

    def rows() -> Iterator[Row]:
        nonlocal users, errors
        lines = itertools.chain([texts.Line(options.user)], texts.lines(request.sources, names))
        for row in recommender.rows(user_ids(lines)):
            users += 1
            errors += bool(row.error)
            yield row

    outputs.write_rows(request.out, request.format, rows(), COLUMNS, table)
    if not users:
        raise DataError("no user is named: an id is a number, one on each line")
    if errors:
        say(f"{errors:,} of {users:,} users have no items; their rows say why")
    return 1 if errors else 0


def user_ids(every: Iterable[texts.Line]) -> Iterator[int | Row]:
    """The ids of users on some lines; a row with the error for what is no id."""
    for line in every:
        if line.error:
            yield Row({"user": line.text}, line.error)
            continue
        for word in filter(None, re.split(r"[,;\s]+", line.text)):
            if re.fullmatch(r"[0-9]{1,18}", word):
                yield int(word)
            else:
                yield Row({"user": word}, "no id of a user: give a whole number")


class Recommender:
    """Finds the items that users rate most probably.

    Attributes:
      uses: the model's `benchmarks.ncf.use.NcfUses`.
    """

    def __init__(self, model: model_source.Model, options: Options, batch_size: int):
        """Reads the weights; UserError if the ratings are missing or not the model's."""
        model = with_data(model, options.data_dir)
        self.uses: Any = model.benchmark.uses
        self._top = options.top

        def predict(params: Any, model_state: Any, batch: Any) -> Any:
            del model_state
            return {"score": self.uses.scores(params, batch["user"])}

        self._predictor = Predictor(predict, model, batch_size, self.uses.at_once)

    def rows(self, users: Iterator[int | Row]) -> Iterator[Row]:
        """The row of each user; those of a batch are scored at once."""
        titles: Mapping[int, str] = {}
        try:
            titles = self.uses.titles
        except DataError as error:
            say(f"NOTE the items have no titles: {error}")
        while chunk := list(itertools.islice(users, self._predictor.batch_size)):
            known = [self.uses.row(each) if isinstance(each, int) else None for each in chunk]
            examples = [{"user": np.asarray(row, np.int32)} for row in known if row is not None]
            scores = iter(self._predictor(examples)["score"] if examples else ())
            for each, row in zip(chunk, known, strict=True):
                if isinstance(each, Row):
                    yield each
                elif row is None:
                    yield Row({"user": each}, "the model does not have this user")
                else:
                    yield self._best(each, row, next(scores), titles)

    def _best(self, user: int, row: int, scores: np.ndarray, titles: Mapping[int, str]) -> Row:
        """The items with the largest scores f32[items]; of equal ones the lower id first.

        The items that the user has rated are not among them.
        """
        if not np.isfinite(scores).all():
            return Row({"user": user}, "the model's scores are not finite: its run has diverged")
        order = np.argsort(-scores, kind="stable")
        best = order[~np.isin(order, self.uses.rated(row))][: self._top].tolist()
        items, entries, lines = [], [], []
        for rank, i in enumerate(best, 1):
            number = int(self.uses.item_ids[i])
            item = Item(number, titles.get(number, ""), float(scores[i]))
            values = {**item._asdict(), "score": shortest(item.score)}
            items.append(item)
            entries.append({key: value for key, value in values.items() if value != ""})
            lines.append({"rank": rank, **values})
        return Row({"user": user}, "", {"items": entries}, lines, items)


def table(rows: Iterable[Row], width: int) -> Iterator[str]:
    """Lines for a terminal of `width` columns: one for each user, one for each item."""
    for row in rows:
        user = row.source["user"]
        if row.error:
            yield f"user {shown(str(user))}  ERROR {row.error}\n"
            continue
        yield f"user {user}\n"
        for rank, each in enumerate(row.answers, 1):
            title = text_cell(each.title, max(width - 28, 20))
            yield f"{rank:5}  {each.score:6.1%}  item {each.item:<7}  {title}".rstrip() + "\n"
