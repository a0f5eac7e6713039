"""A model's use of one of the four kinds, without a model."""

from typing import Any

from benchmarks.uses import Uses


def stub(kind: type[Uses], **members: Any) -> Any:
    """A use with these members; what else the kind owes is None."""
    owed = dict.fromkeys(getattr(kind, "__abstractmethods__", ()))
    return type(kind.__name__, (kind,), {**owed, **members})()
