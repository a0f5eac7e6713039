"""Which ratings are held out to evaluate: `config.eval_holdout`."""

import dataclasses
import datetime
import re
from typing import Literal, Self

import numpy as np

from common.errors import ConfigError, DataError


@dataclasses.dataclass(frozen=True)
class Holdout:
    """The rule by which rows are held out."""

    rule: Literal["latest", "random", "date", "none"] = "latest"
    seed: int = 0  # of "random"
    share: float = 0.0  # of "date": this share of the newest rows; 0: those since `since`
    since: int = 0  # seconds since 1970

    @classmethod
    def parse(cls, text: str, seed: int) -> Self:
        """Reads the value of `config.eval_holdout`; ConfigError if it is none."""
        if text == "latest" or text == "none":
            return cls(text)
        if text == "random":
            return cls("random", seed)
        if text == "date":
            return cls("date", share=0.1)
        try:
            if text.endswith("%") and 0 < (share := float(text[:-1]) / 100) < 1:
                return cls("date", share=share)
            if re.match(r"\d{4}-", text):
                date = datetime.datetime.fromisoformat(text)
                date = date if date.tzinfo else date.replace(tzinfo=datetime.UTC)
                return cls("date", since=int(date.timestamp()))
        except ValueError:
            pass
        raise ConfigError(
            f"config.eval_holdout={text!r}: must be latest, random, none, date (the newest 10 % of "
            "the rows), another share such as 20%, or a date such as 2018-05-31"
        )

    def first(self, times: np.ndarray, path: str) -> int:
        """The time of the first row that is held out by date, of rows with `times` uint32[n].

        DataError if all rows are held out, or none is.
        """
        first = self.since
        if self.share:
            place = len(times) - max(1, round(self.share * len(times)))
            first = int(np.partition(times, place)[place])
        oldest, newest = int(times.min()), int(times.max())
        if not oldest < first <= newest:
            raise DataError(
                f"config.eval_holdout: the rows of {path} are from {day(oldest)} to {day(newest)}, "
                f"so {'all' if first <= oldest else 'none'} of them would be held out from "
                f"{day(first)} on: give a day between them, or another share"
            )
        return first


def day(seconds: int) -> str:
    """A time since 1970 in UTC, such as 2018-05-31."""
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d}"


LATEST = Holdout()
