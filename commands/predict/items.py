"""Recommends items to users, lists similar ones, writes vectors: what predict.py does with NCF."""

import dataclasses
import io
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from benchmarks.exhibits import csv_file
from benchmarks.uses import Items
from commands.predict import outputs
from commands.predict.model import Batch, Predictor, Request
from commands.predict.outputs import Row, say, shortest, text_cell
from commands.predict.sources import Line, read_lines
from common.errors import ConfigError, DataError
from common.text import shown
from engine import locations
from engine.checkpoint import model_source

FORMATS = outputs.FORMATS
COLUMNS = ("user", "rank", "item", "title", "score", "error")
_SIMILAR = ("similar_to", "rank", "item", "title", "similarity", "error")
_FILES = ("users.csv", "items.csv")  # of --vectors; folders of ratings may have them, too
_NOBODY = "the model was trained on nobody with"


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of predict.py for recommenders."""

    user: str = ""
    items: str = ""
    similar: str = ""
    vectors: str = ""
    top: int = 10
    data_dir: str = ""  # `prepare` sets it


class Query(NamedTuple):
    """A user for whom items are wanted."""

    user: int | str  # as typed
    name: str  # or ""
    vector: np.ndarray  # f32[w]
    rated: np.ndarray  # the columns of items to leave out


def run(request: Request, options: Options, model: model_source.Model) -> int:
    """Writes the best items for each user, or those like each item; returns the exit code."""
    started = time.monotonic()
    asked = options.user or options.items or request.sources, options.similar, options.vectors
    if not any(asked):
        raise ConfigError(
            "name the users: --user=1,2,3, a file with an id on each line, or `-` for ids on "
            "stdin; --items=1,2,3 names items of a user who is not in the model, --similar=1,2,3 "
            "items to find others like them"
        )
    if sum(map(bool, asked)) > 1:
        flag = f"--vectors={options.vectors}" if options.vectors else f"--similar={options.similar}"
        raise ConfigError(f"{flag}: users, --similar and --vectors are asked for one at a time")
    if options.vectors:
        if request.out or "top" in request.options:
            raise ConfigError("--vectors writes all into its folder, without --out and --top")
        _check_vectors(locations.check_path(options.vectors, "--vectors"))
    users = read_lines(request.sources, "", request.out)
    others = options.items or options.similar
    named = read_lines([others] if others else [], "a title", request.out)
    recommender = Recommender(model, options, request.batch_size)
    seconds = time.monotonic() - started
    say(f"{model.source}: {len(recommender.items.ids):,} items; loaded in {seconds:.1f} s")
    if options.vectors:
        recommender.write_vectors(options.vectors)
        return 0
    what, columns = ("item", _SIMILAR) if options.similar else ("user", COLUMNS)
    done = errors = 0

    def rows() -> Iterator[Row]:
        nonlocal done, errors
        known = recommender.users(itertools.chain([Line(options.user)], users))
        best = recommender.rows(itertools.chain(known, recommender.newcomers(named)))
        for row in recommender.similar(named) if options.similar else best:
            done += 1
            errors += bool(row.error)
            yield row

    outputs.write_rows(request.out, request.format, rows(), columns, _cells, table)
    if not done:
        raise DataError(f"no {what} is named: give an id or a name, one on each line")
    recommender.say_untrained()
    if errors:
        lack = "no similar ones" if options.similar else "no items"
        say(f"{errors:,} of {done:,} {what}s have {lack}; their rows say why")
    return 1 if errors else 0


def _check_vectors(folder: str) -> None:
    """Refuses a folder that cannot be written, or that has lists of ratings."""
    locations.check_folder(folder, "--vectors")
    here = [name for name in _FILES if epath.Path(folder, name).exists()]
    if here and not epath.Path(folder, "items.npy").exists():
        raise ConfigError(
            f"--vectors={folder} has a file {here[0]}, which would be overwritten; write to "
            "another folder"
        )


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
        self._untrained = 0  # users of the model whom it was not trained on

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
                user = _number(word)
                if isinstance(row, str):
                    yield Row({"user": user}, row)
                elif (vector := self._vector(row)) is None:
                    yield Row({"user": user}, f"{_NOBODY} an item of this user")
                else:
                    name = self._users.name(row)
                    name = "" if name == word else name
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
                yield Row({"user": line.text}, f"{_NOBODY} these items")

    def _vector(self, row: int) -> np.ndarray | None:
        """A user's vector; a newcomer's, by all the items, of users who were not trained on."""
        vector = self._uses.vector(self._params, row)
        if vector is None:
            self._untrained += 1
            vector = self._uses.newcomer(self._params, self._uses.rated(row).tolist())
        return vector

    def say_untrained(self) -> None:
        """Says how many users of the model were served as newcomers."""
        if self._untrained:
            say(
                f"NOTE the model was trained on no item of {self._untrained:,} of the users: they "
                "count as new users with the items that are held out"
            )

    def similar(self, lines: Iterable[Line]) -> Iterator[Row]:
        """A row for each item on some lines: the items whose vectors have the largest cosine."""
        vectors = self._uses.search_vectors(self._params)[0][:, :-1]
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
        trained = self._uses.is_trained()
        for line in lines:
            found = [(line.text, line.error)] if line.error else self.items.find(line.text)
            for word, row in found:
                source = {"similar_to": _number(word)}
                if isinstance(row, str):
                    yield Row(source, row)
                elif not trained[row]:
                    yield Row(source, f"{_NOBODY} this item")
                else:
                    title = self.items.name(row)
                    named = {"title": title} if title not in ("", word) else {}
                    left_out = np.append(np.flatnonzero(~trained), row)
                    items = self._listed(vectors @ vectors[row], left_out, "similarity")
                    yield Row(source, "", named | {"items": items})

    def write_vectors(self, folder: str) -> None:
        """Writes the vectors of all users and items, and lists of who and what they are."""
        items, matrix = self._uses.search_vectors(self._params)
        own = [self._vector(row) for row in range(len(self._users.ids))]
        mean = np.mean([vector for vector in own if vector is not None], axis=0)
        users = np.stack([mean if vector is None else vector for vector in own])
        self.say_untrained()
        if unknown := sum(vector is None for vector in own):
            say(f"NOTE {_NOBODY} an item of {unknown:,} users: they have the users' mean vector")
        if unknown := int((~self._uses.is_trained()).sum()):
            say(f"NOTE {_NOBODY} {unknown:,} of the items: their vectors say little")
        users = users @ matrix[:-1] + matrix[-1]
        for table, finder, title in ((users, self._users, "name"), (items, self.items, "title")):
            file = io.BytesIO()
            np.save(file, table)
            outputs.save(f"{folder}/{finder.noun}s.npy", [file.getvalue()])
            lines = ((number, finder.name(row)) for row, number in enumerate(finder.ids.tolist()))
            outputs.save(f"{folder}/{finder.noun}s.csv", [csv_file((finder.noun, title), lines)])

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
        named = {"name": query.name} if query.name else {}
        return Row(source, "", named | {"items": self._listed(scores, query.rated, "score")})

    def _listed(self, scores: np.ndarray, left_out: np.ndarray, name: str) -> list[dict[str, Any]]:
        """The items with the largest scores f32[items], without the columns `left_out`."""
        order = np.argsort(-scores, kind="stable")
        items = []
        for i in order[~np.isin(order, left_out)][: self._top].tolist():
            item: dict[str, Any] = {"item": int(self.items.ids[i])}
            if title := self.items.name(i):
                item["title"] = title
            items.append(item | {name: shortest(float(scores[i]))})
        return items


def _number(word: str) -> int | str:
    """What the user typed, as a number if it is one."""
    return int(word) if word.isdecimal() and str(int(word)) == word else word


def _cells(row: Row) -> list[dict[str, Any]]:
    """The lines of a CSV for a user, one for each item."""
    return [{"rank": rank, **item} for rank, item in enumerate(row.content["items"], 1)]


def table(rows: Iterable[Row], width: int) -> Iterator[str]:
    """Lines for a terminal of `width` columns: one for each user, one for each item."""
    for row in rows:
        ((kind, asked),) = row.source.items()
        head = f"{kind.replace('_', ' ')} {shown(str(asked))}"
        if row.error:
            yield f"{head}  ERROR {row.error}\n"
            continue
        name = row.content.get("name") or row.content.get("title", "")
        yield f"{head}{name and f': {text_cell(name, width)}'}\n"
        for rank, each in enumerate(row.content["items"], 1):
            title = text_cell(each.get("title", ""), max(width - 28, 20))
            value = f"{each['score']:6.1%}" if kind == "user" else f"{each['similarity']:6.3f}"
            line = f"{rank:5}  {value}  item {each['item']:<7}  {title}"
            yield line.rstrip() + "\n"
