"""Recommends items to users: what predict.py does with NCF.

Items become rows for programs and lines for the user.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from commands.predict import outputs, texts
from commands.predict.model import Predictor, Request, say
from commands.predict.outputs import FORMATS, format_rows, shortest, shown, text_cell
from common.errors import ConfigError, DataError
from engine import locations, model_source

COLUMNS = ("user", "rank", "item", "title", "score", "error")


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of predict.py for recommenders; "" is the run's own folder."""

    formats = FORMATS
    files = ()  # flags that name a file to write

    user: str = ""
    top: int = 10
    data_dir: str = ""


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
    uses, predictor = opened(model, options, request.batch_size)
    say(
        f"{model.source}: {len(uses.item_ids):,} items; loaded in "
        f"{time.monotonic() - started:.1f} s"
    )
    users = itertools.chain(
        user_ids([texts.Line(options.user)]), user_ids(texts.lines(request.sources, names))
    )
    tally = {"users": 0, "errors": 0}
    rows = _counted(best_items(users, options.top, uses, predictor), tally)
    text = (
        table(rows, shutil.get_terminal_size().columns)
        if request.form == "table"
        else format_rows(request.form, rows, COLUMNS)
    )
    outputs.write(request.out, text)
    if not tally["users"]:
        raise DataError("no user is named: an id is a number, one on each line")
    if tally["errors"]:
        say(f"{tally['errors']:,} of {tally['users']:,} users have no items; their rows say why")
    return 1 if tally["errors"] else 0


def opened(model: model_source.Model, options: Options, batch_size: int) -> tuple[Any, Predictor]:
    """The uses of a recommender, and its scores of all items; UserError as of `run`."""
    folder = locations.check_path(options.data_dir or model.config.data_dir, "--data_dir")
    model = model.changed(data_dir=folder)
    uses: Any = model.benchmark.uses
    uses.check_files(model.manifest, model.source)

    def predict(params: Any, model_state: Any, batch: Any) -> Any:
        del model_state
        return {"score": uses.scores(params, batch["user"])}

    return uses, Predictor(predict, model, batch_size, uses.at_once)


def user_ids(every: Iterable[texts.Line]) -> Iterator[int | Row]:
    """The ids of users on some lines; a row with the error for what is no id."""
    for line in every:
        if line.error:
            yield Row(line.text, error=line.error)
            continue
        for word in filter(None, re.split(r"[,;\s]+", line.text)):
            if re.fullmatch(r"[0-9]{1,18}", word):
                yield int(word)
            else:
                yield Row(word, error="no id of a user: give a whole number")


def best_items(
    users: Iterator[int | Row], top: int, uses: Any, predictor: Predictor
) -> Iterator[Row]:
    """The row of each user; those of a batch are scored at once."""
    titles = _titles(uses)
    while chunk := list(itertools.islice(users, predictor.batch_size)):
        known = [uses.row(each) if isinstance(each, int) else None for each in chunk]
        rows = [row for row in known if row is not None]
        scores = iter(())
        if rows:
            examples = [{"user": np.asarray(row, np.int32)} for row in rows]
            scores = iter(predictor(examples)["score"])
        for each, row in zip(chunk, known, strict=True):
            if isinstance(each, Row):
                yield each
            elif row is None:
                yield Row(each, error="the model does not have this user")
            else:
                yield _best(each, next(scores), uses.rated(row), top, uses.item_ids, titles)


def _best(
    user: int,
    scores: np.ndarray,
    rated: np.ndarray,
    top: int,
    item_ids: np.ndarray,
    titles: Mapping[int, str],
) -> Row:
    """The `top` items with the largest scores f32[items]; of equal ones the lower id first."""
    if not np.isfinite(scores).all():
        return Row(user, error="the model's scores are not finite: its run has diverged")
    order = np.argsort(-scores, kind="stable")
    best: Sequence[int] = order[~np.isin(order, rated)][:top].tolist()
    ids = [int(item_ids[i]) for i in best]
    items = [
        Item(number, titles.get(number, ""), float(scores[i]))
        for i, number in zip(best, ids, strict=True)
    ]
    return Row(user, tuple(items))


def _titles(uses: Any) -> Mapping[int, str]:
    try:
        return uses.titles
    except DataError as error:
        say(f"NOTE the items have no titles: {error}")
        return {}


def _counted(rows: Iterable[Row], tally: dict[str, int]) -> Iterator[Row]:
    for row in rows:
        tally["users"] += 1
        tally["errors"] += bool(row.error)
        yield row


# Rows and lines.


class Item(NamedTuple):
    """One item; `score` is the probability that the user rates it, `title` may be empty."""

    item: int
    title: str
    score: float


@dataclasses.dataclass(frozen=True)
class Row:
    """The best items for a user, the best first, or an error; `user` is an id or what stood there.

    The items that the user has rated are not among them.
    """

    user: int | str
    items: tuple[Item, ...] = ()
    error: str = ""

    def content(self) -> dict[str, Any]:
        """See `outputs.Row`."""
        content: dict[str, Any] = {"user": self.user}
        if self.error:
            return content | {"error": self.error}
        items = []
        for each in self.items:
            title = {"title": each.title} if each.title else {}
            items.append({"item": each.item, **title, "score": shortest(each.score)})
        return content | {"items": items}

    def cells(self) -> list[dict[str, Any]]:
        """See `outputs.Row`: a line for each item."""
        if self.error:
            return [{"user": self.user, "error": self.error}]
        return [
            {"user": self.user, "rank": rank, **each._asdict(), "score": shortest(each.score)}
            for rank, each in enumerate(self.items, 1)
        ]


def table(rows: Iterable[Row], width: int) -> Iterator[str]:
    """Lines for a terminal of `width` columns: one for each user, one for each item."""
    for row in rows:
        if row.error:
            yield f"user {shown(str(row.user))}  ERROR {row.error}\n"
            continue
        yield f"user {row.user}\n"
        for rank, each in enumerate(row.items, 1):
            title = text_cell(shown(each.title), max(width - 28, 20))
            yield f"{rank:5}  {each.score:6.1%}  item {each.item:<7}  {title}".rstrip() + "\n"
