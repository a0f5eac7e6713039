"""Recommends items to users: what predict.py does with NCF."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
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

    user: str = _flag("", "users, with commas between; or give a file of ids or names as SOURCE")
    items: str = _flag("", "items of a user who is not in the model; or a file, a user on a line")
    top: int = _flag(10, "items for each user (10)", console.integer(1))
    data_dir: str = data_dir_flag()


class Query(NamedTuple):
    """One user: as typed, the user's name or "", a vector f32[w], and the columns to leave out."""

    user: int | str
    name: str
    vector: np.ndarray
    rated: np.ndarray


class Item(NamedTuple):
    """One item; `score` is the probability that the user rates it, `title` may be empty."""

    item: int
    title: str
    score: float


def run(request: Request, options: Options, model: model_source.Model, stdin: Iterable[str]) -> int:
    """Writes the best items for each user; see `commands.predict.run`."""
    del stdin  # `texts` reads it
    started = time.monotonic()
    if not (options.user or options.items or request.sources):
        raise ConfigError(
            "name the users: --user=1,2,3, a file with an id on each line, or `-` for ids on "
            "stdin; --items=1,2,3 names items of a user who is not in the model"
        )
    names = texts.files(request.sources, "")
    items = [options.items] if options.items else []
    names += (histories := texts.files(items, "a title"))
    outputs.check_apart(names, [("out", request.out)])
    recommender = Recommender(model, options, request.batch_size)
    say(
        f"{model.source}: {len(recommender.items.ids):,} items; loaded in "
        f"{time.monotonic() - started:.1f} s"
    )
    users = errors = 0

    def rows() -> Iterator[Row]:
        nonlocal users, errors
        lines = itertools.chain([texts.Line(options.user)], texts.lines(request.sources, names))
        queries = recommender.users(lines), recommender.newcomers(texts.lines(items, histories))
        for row in recommender.rows(itertools.chain(*queries)):
            users += 1
            errors += bool(row.error)
            yield row

    outputs.write_rows(request.out, request.format, rows(), COLUMNS, table)
    if not users:
        raise DataError("no user is named: give an id or a name, one on each line")
    if errors:
        say(f"{errors:,} of {users:,} users have no items; their rows say why")
    return 1 if errors else 0


class Recommender:
    """Finds the items that users rate most probably.

    Attributes:
      uses: the model's `benchmarks.ncf.use.NcfUses`.
      items: its `benchmarks.ncf.names.Finder`.
    """

    def __init__(self, model: model_source.Model, options: Options, batch_size: int):
        """Reads the weights; UserError if the ratings are missing or not the model's."""
        model = with_data(model, options.data_dir)
        self.uses: Any = model.benchmark.uses
        self.items, self._users = (self.uses.finder(kind, say) for kind in ("item", "user"))
        self._params = jax.tree.map(np.asarray, model.params)
        self._top = options.top

        def predict(params: Any, model_state: Any, batch: Any) -> Any:
            del model_state
            return {"score": self.uses.scores(params, batch["vector"])}

        self._predictor = Predictor(predict, model, batch_size, self.uses.at_once)

    def users(self, lines: Iterable[texts.Line]) -> Iterator[Query | Row]:
        """The users on some lines; a row with the error for what is no user."""
        for line in lines:
            if line.error:
                yield Row({"user": line.text}, line.error)
                continue
            for word, row in self._users.find(line.text):
                user = int(word) if word.isdecimal() and str(int(word)) == word else word
                if isinstance(row, str):
                    yield Row({"user": user}, row)
                    continue
                name = self._users.name(row)
                name = "" if name == word else name
                yield Query(
                    user, name, self._params["users"]["embedding"][row], self.uses.rated(row)
                )

    def newcomers(self, lines: Iterable[texts.Line]) -> Iterator[Query | Row]:
        """Users who are not in the model but have the items on a line; a row with its error."""
        for line in lines:
            found = [] if line.error else [*self.items.find(line.text)]
            errors = [f"{shown(word)}: {row}" for word, row in found if isinstance(row, str)]
            rows = [row for _, row in found if isinstance(row, int)]
            if line.error or errors:
                yield Row({"user": line.text}, line.error or errors[0])
            elif (vector := self.uses.newcomer(self._params, rows)) is not None:
                yield Query(line.text, "", vector, np.array(rows))
            elif rows:
                yield Row({"user": line.text}, "the model was trained on nobody with these items")

    def rows(self, users: Iterator[Query | Row]) -> Iterator[Row]:
        """The row of each user; those of a batch are scored at once."""
        while chunk := list(itertools.islice(users, self._predictor.batch_size)):
            examples = [{"vector": each.vector} for each in chunk if isinstance(each, Query)]
            scores = iter(self._predictor(examples)["score"] if examples else ())
            for each in chunk:
                yield each if isinstance(each, Row) else self._best(each, next(scores))

    def _best(self, query: Query, scores: np.ndarray) -> Row:
        """The items with the largest scores f32[items]; of equal ones the lower id first.

        The items that the user has rated are not among them.
        """
        source = {"user": query.user}
        if not np.isfinite(scores).all():
            return Row(source, "the model's scores are not finite: its run has diverged")
        order = np.argsort(-scores, kind="stable")
        best = order[~np.isin(order, query.rated)][: self._top].tolist()
        items, entries, lines = [], [], []
        for rank, i in enumerate(best, 1):
            item = Item(int(self.items.ids[i]), self.items.name(i), float(scores[i]))
            values = {**item._asdict(), "score": shortest(item.score)}
            items.append(item)
            entries.append({key: value for key, value in values.items() if value != ""})
            lines.append({"rank": rank, **values})
        content = {"name": query.name, "items": entries}
        content = {key: value for key, value in content.items() if value != ""}
        return Row(source, "", content, lines, items)


def table(rows: Iterable[Row], width: int) -> Iterator[str]:
    """Lines for a terminal of `width` columns: one for each user, one for each item."""
    for row in rows:
        user = shown(str(row.source["user"]))
        if row.error:
            yield f"user {user}  ERROR {row.error}\n"
            continue
        name = row.content.get("name", "")
        yield f"user {user}{name and f': {text_cell(name, width)}'}\n"
        for rank, each in enumerate(row.answers, 1):
            title = text_cell(each.title, max(width - 28, 20))
            yield f"{rank:5}  {each.score:6.1%}  item {each.item:<7}  {title}".rstrip() + "\n"
