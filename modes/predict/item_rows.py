"""The items for a user: rows for programs, lines for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from modes.predict.rows import cut, shortest
from modes.predict.sources import shown

COLUMNS = ("user", "rank", "item", "title", "score", "error")


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
        """See `rows.Row`."""
        content: dict[str, Any] = {"user": self.user}
        if self.error:
            return content | {"error": self.error}
        items = []
        for each in self.items:
            title = {"title": each.title} if each.title else {}
            items.append({"item": each.item, **title, "score": shortest(each.score)})
        return content | {"items": items}

    def cells(self) -> list[dict[str, Any]]:
        """See `rows.Row`: a line for each item."""
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
            title = cut(shown(each.title), max(width - 28, 20))
            yield f"{rank:5}  {each.score:6.1%}  item {each.item:<7}  {title}".rstrip() + "\n"
