"""Recommends items to users: what predict.py does with NCF."""

import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.uses import Items
from commands.predict import outputs
from commands.predict.model import Batch, Predictor, Request
from commands.predict.outputs import Row, say, shortest, text_cell
from commands.predict.sources import Line, read_lines
from common.errors import ConfigError, DataError
from common.text import shown
from engine.checkpoint import model_source

FORMATS = outputs.FORMATS
COLUMNS = ("user", "rank", "item", "title", "score", "error")


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of predict.py for recommenders."""

    user: str = ""
    items: str = ""
    top: int = 10
    data_dir: str = ""  # `prepare` sets it


class Query(NamedTuple):
    """A user for whom items are wanted."""

    user: int | str  # as typed
    name: str  # or ""
    vector: np.ndarray  # f32[w]
    rated: np.ndarray  # the columns of items to leave out


def run(request: Request, options: Options, model: model_source.Model) -> int:
    """Writes the best items for each user; returns the exit code."""
    started = time.monotonic()
    if not (options.user or options.items or request.sources):
        raise ConfigError(
            "name the users: --user=1,2,3, a file with an id on each line, or `-` for ids on "
            "stdin; --items=1,2,3 names items of a user who is not in the model"
        )
    users = read_lines(request.sources, "", request.out)
    histories = read_lines([options.items] if options.items else [], "a title", request.out)
    recommender = Recommender(model, options, request.batch_size)
    seconds = time.monotonic() - started
    say(f"{model.source}: {len(recommender.items.ids):,} items; loaded in {seconds:.1f} s")
    done = errors = 0

    def rows() -> Iterator[Row]:
        nonlocal done, errors
        known = recommender.users(itertools.chain([Line(options.user)], users))
        for row in recommender.rows(itertools.chain(known, recommender.newcomers(histories))):
            done += 1
            errors += bool(row.error)
            yield row

    outputs.write_rows(request.out, request.format, rows(), COLUMNS, _cells, table)
    if not done:
        raise DataError("no user is named: give an id or a name, one on each line")
    if errors:
        say(f"{errors:,} of {done:,} users have no items; their rows say why")
    return 1 if errors else 0


class Recommender:
    """Finds the items that users rate most probably."""

    def __init__(self, model: model_source.Model, options: Options, batch_size: int):
        """Reads the weights; UserError if the ratings are missing or not the model's."""
        uses = model.benchmark.uses
        assert isinstance(uses, Items)
        self._uses = uses
        uses.check_files(model.manifest, model.source)
        self.items, self._users = uses.finder("item"), uses.finder("user")
        self._params = jax.tree.map(np.asarray, model.params)
        self._top = options.top

        def predict(params: Any, model_state: Any, batch: Batch) -> Batch:
            del model_state
            return {"score": uses.scores(params, batch["vector"])}

        self._predictor = Predictor(predict, model, batch_size, uses.at_once)

    def users(self, lines: Iterable[Line]) -> Iterator[Query | Row]:
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
                vector = self._uses.vector(self._params, row)
                yield Query(user, name, vector, self._uses.rated(row))

    def newcomers(self, lines: Iterable[Line]) -> Iterator[Query | Row]:
        """Users who are not in the model but have the items on a line; a row with its error."""
        for line in lines:
            parts = [] if line.error else [*self.items.find(line.text)]
            errors = [f"{shown(word)}: {row}" for word, row in parts if isinstance(row, str)]
            rows = [row for _, row in parts if isinstance(row, int)]
            if line.error or errors:
                yield Row({"user": line.text}, line.error or errors[0])
            elif (vector := self._uses.newcomer(self._params, rows)) is not None:
                yield Query(line.text, "", vector, np.array(rows))
            elif rows:
                yield Row({"user": line.text}, "the model was trained on nobody with these items")

    def rows(self, users: Iterator[Query | Row]) -> Iterator[Row]:
        """The row of each user; the users of a batch are scored at once."""
        while chunk := list(itertools.islice(users, self._predictor.batch_size)):
            examples = [{"vector": each.vector} for each in chunk if isinstance(each, Query)]
            results = iter(self._predictor(examples))
            for each in chunk:
                yield each if isinstance(each, Row) else self._best(each, next(results)["score"])

    def _best(self, query: Query, scores: np.ndarray) -> Row:
        """The row with the best items by scores f32[items]; of equal scores the lower id is first.

        The items that the user has rated are left out.
        """
        source = {"user": query.user}
        if not np.isfinite(scores).all():
            return Row(source, "the model's scores are not finite: its run has diverged")
        order = np.argsort(-scores, kind="stable")
        best = order[~np.isin(order, query.rated)][: self._top].tolist()
        items = []
        for i in best:
            item: dict[str, Any] = {"item": int(self.items.ids[i])}
            if title := self.items.name(i):
                item["title"] = title
            items.append(item | {"score": shortest(float(scores[i]))})
        named = {"name": query.name} if query.name else {}
        return Row(source, "", named | {"items": items})


def _cells(row: Row) -> list[dict[str, Any]]:
    """The lines of a CSV for a user, one for each item."""
    return [{"rank": rank, **item} for rank, item in enumerate(row.content["items"], 1)]


def table(rows: Iterable[Row], width: int) -> Iterator[str]:
    """Lines for a terminal of `width` columns: one for each user, one for each item."""
    for row in rows:
        user = shown(str(row.source["user"]))
        if row.error:
            yield f"user {user}  ERROR {row.error}\n"
            continue
        name = row.content.get("name", "")
        yield f"user {user}{name and f': {text_cell(name, width)}'}\n"
        for rank, each in enumerate(row.content["items"], 1):
            title = text_cell(each.get("title", ""), max(width - 28, 20))
            line = f"{rank:5}  {each['score']:6.1%}  item {each['item']:<7}  {title}"
            yield line.rstrip() + "\n"
