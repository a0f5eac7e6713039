"""The config's keys that NCF reads, and which target counts for which ratings."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from benchmarks.ncf.ratings import ML_20M, TARGET, Holdout
from common.errors import ConfigError
from common.keys import Count, Seed, Share

_PATIENCE = 3  # evaluations without a better score that end a run on other ratings than ml-20m


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config keys that this benchmark reads; configs/ncf.py explains them."""

    data_dir: str
    seed: Seed
    min_ratings: Annotated[int, "[2, 1e9]"]
    num_users: Annotated[int, "[0, 2147483647]"]  # rows of a table, as int32
    num_items: Annotated[int, "[0, 2147483647]"]
    num_ratings: Count
    train_negatives: Annotated[int, "[1, 10000]"]
    eval_negatives: Annotated[int, "[10, 1e6]"] | Literal["all"]
    gmf_dim: Annotated[int, "[1, 65536]"]
    mlp_layers: Annotated[tuple[Annotated[int, "[1, 65536]"], ...], "[1, 100]"]
    target: Share
    dataset: Literal["", "fake"] = ""
    eval_holdout: str = "latest"

    def __post_init__(self) -> None:
        """Raises ConfigError if values do not go together."""
        layers = self.mlp_layers
        if layers[0] % 2:
            raise ConfigError(
                f"config.mlp_layers={layers}: the first width must be even, because half of it is "
                "the user's"
            )
        if self.holdout.rule == "date" and self.eval_negatives != "all":
            raise ConfigError(
                f"config.eval_holdout={self.eval_holdout!r} holds out several items of a user, "
                f"and config.eval_negatives={self.eval_negatives} ranks one: give "
                "--config.eval_negatives=all"
            )
        if len({bool(vars(self)[key]) for key in ML_20M}) > 1:
            sizes = ", ".join(f"config.{key}={vars(self)[key]}" for key in ML_20M)
            raise ConfigError(
                f"{sizes}: set all three, or set all to 0 to use the sizes of the data"
            )
        if self.num_users and self.num_ratings <= self.num_users:
            raise ConfigError(
                f"config.num_ratings={self.num_ratings}: must be more than config.num_users="
                f"{self.num_users}, because one rating of each user is held out"
            )

    @property
    def holdout(self) -> Holdout:
        """Which ratings are held out."""
        return Holdout.parse(self.eval_holdout, self.seed)


def stopping(values: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[float, int]:
    """(target, patience) of a config on ratings of these sizes.

    MLPerf's target counts for its own rankings of ml-20m alone.
    """
    is_sampled = values["eval_negatives"] != "all"
    if values["target"] != TARGET or (sizes == ML_20M and is_sampled):
        return values["target"], 0
    return 0.0, _PATIENCE


def restored(values: dict[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a checkpoint, with the target and the patience that its ratings had."""
    if not (users := manifest.get("num_users")):  # trained on a random batch
        return values
    positives = manifest["num_train_examples"] // (1 + values["train_negatives"])
    counts = users, manifest["num_items"], positives + users
    target, patience = stopping(values, dict(zip(ML_20M, counts, strict=True)))
    patience = values["patience"] or patience * values["stop_at_target"]
    return {**values, "target": target, "patience": patience}
