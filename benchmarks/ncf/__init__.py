"""NCF, neural collaborative filtering on MovieLens (He et al. 2017, arXiv:1708.05031).

This file joins the other files of this folder into a benchmark: `settings` are its keys, `ratings`
reads MovieLens' files and indexes them, `holdout` says which ratings are held out, `names` finds
users and items by name, `input_pipeline` draws batches, `models` is NeuMF, `ranking` scores
rankings, `baselines` are what NeuMF should beat, `use` recommends and exports, `growth` begins with
a model of an earlier table, `mlperf` has the rules of MLPerf.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.base import Benchmark, HostBatch, Identity, Model, Spec, Target, Terms, mean_scores
from benchmarks.ncf import baselines, growth, models, ranking
from benchmarks.ncf.input_pipeline import NegativeSampler
from benchmarks.ncf.ratings import ML_20M, TARGET, Interactions, day, load_interactions
from benchmarks.ncf.settings import Settings, restored, stopping
from benchmarks.ncf.use import NcfUses, activity_scores, fit_vectors
from benchmarks.uses import Uses
from common.data import caches
from common.errors import CheckpointError, DataError
from common.keys import read_config

_log = logging.getLogger("tpu_suite")


def make(config: Any, cache_dir: str) -> Ncf:
    """Makes the benchmark of a config; `cache_dir` keeps the index of the ratings."""
    settings = read_config(Settings, config)
    # MLPerf's clock runs while it scores, and random batches have nothing to compare with.
    compares = not (settings.dataset or config.get("mlperf", {}).get("format"))
    return Ncf(settings, cache_dir, compares)


MODEL = Model(body_keys=("gmf_dim", "mlp_layers"), restored=restored)


class Ncf(Benchmark):
    """NeuMF trained on pairs of a user and an item, rated or not; evaluated on rankings of items.

    An epoch has each positive once, and `train_negatives` items that this epoch draws for it.
    """

    data: Interactions  # who rated what, once that is opened: both splits
    complete: Interactions  # the same without `config.train_fraction`, for the evaluation

    def __init__(self, settings: Settings, cache_dir: str, compares: bool):
        """`compares` is whether popularity and an item-kNN are scored besides the model."""
        self.targets = (Target(f"hr_at_{ranking.TOP}", settings.target),)
        self.settings, self._cache_dir, self._compares = settings, cache_dir, compares
        self._matches: dict[str, dict[str, growth.Match]] = {}  # with the model of a folder
        self.holdout = settings.holdout
        if self.holdout.rule == "none":
            self.no_evaluation = "config.eval_holdout='none'"

    @property
    def model(self) -> models.NeuMF:
        """The network; ml-20m's where neither the config nor opened ratings say how large it is."""
        settings = self.settings
        sizes = _sizes(self.data) if hasattr(self, "data") else ML_20M
        users, items = (getattr(settings, key) or sizes[key] for key in ("num_users", "num_items"))
        return models.NeuMF(users, items, settings.gmf_dim, tuple(settings.mlp_layers))

    # Data.

    def open(self, split: str) -> int:
        """Also refuses other sizes than declared, and sets the target for these ratings."""
        settings = self.settings
        if hasattr(self, "data"):
            return self.num_examples(split)
        cache = f"{self._cache_dir}/interactions" if self._cache_dir else ""
        data = load_interactions(settings.data_dir, settings.min_ratings, cache, self.holdout)
        sizes = _sizes(data)
        for key, size in sizes.items():
            if getattr(settings, key) not in (0, size):
                flags = " ".join(f"--config.{k}={v}" for k, v in sizes.items())
                raise DataError(
                    f"config.{key}={getattr(settings, key)}, but {settings.data_dir} holds {size}: "
                    f"is it the right data set? If so, use {flags}, or 0 for each"
                )
        self.complete = data
        if self.part:
            data = data.only(self.part.choose(data.num_positives, strata=data.users))
        epoch = data.num_positives * (1 + settings.train_negatives)
        if epoch > np.iinfo(np.int32).max:
            raise DataError(
                f"{settings.data_dir} makes {epoch:,} examples per epoch, more than 2^31: set a "
                "smaller --config.train_negatives"
            )
        target, self.default_patience = stopping(vars(settings), sizes)
        self.targets, self.data = (Target(self.targets[0].metric, target),), data
        if self._cache_dir:
            growth.keep(self._row_names, self._cache_dir)
        return self.num_examples(split)

    @functools.cached_property
    def _row_names(self) -> bytes:
        return growth.row_names(self.settings.data_dir, self.data)

    @functools.cached_property
    def _samplers(self) -> dict[str, NegativeSampler]:
        """By split; a model of a part of the ratings ranks the same items as one of all."""
        keys = self.settings
        ranked = 0 if keys.eval_negatives == "all" else keys.eval_negatives
        rules = keys.seed, keys.train_negatives, ranked
        train = NegativeSampler(self.data, *rules)
        return {
            "train": train,
            "eval": NegativeSampler(self.complete, *rules) if self.part else train,
        }

    def num_examples(self, split: str) -> int:
        if split == "eval":
            return len(self.complete.evaluated)
        return self.data.num_positives * (1 + self.settings.train_negatives)

    def declared_examples(self, split: str) -> int:
        return 0 if self.holdout.rule == "date" else self._count(split, vars(self.settings))

    def collected(self, count: int) -> tuple[float, str]:
        return count / (1 + self.settings.train_negatives), "ratings"

    def data_sizes(self) -> dict[str, int]:
        return _sizes(self.data)

    def nominal_examples(self, split: str) -> int:
        return self._count(split, vars(self.settings) if self.settings.num_users else ML_20M)

    def _count(self, split: str, sizes: Mapping[str, int]) -> int:
        """Examples in `split` of ratings, of which one of each user is held out, or none is."""
        held = 0 if self.holdout.rule == "none" else sizes["num_users"]
        rest = sizes["num_ratings"] - held
        return held if split == "eval" else rest * (1 + self.settings.train_negatives)

    @property
    def metadata(self) -> dict[str, Any]:
        rule, settings = self.holdout.rule, self.settings
        details = {"random": f", config.seed={settings.seed}", "date": f", {settings.eval_holdout}"}
        return {
            "num_users": self.model.num_users,
            "num_items": self.model.num_items,
            "rows_of_tables": "users with enough ratings, and the items they rated, by id",
            "rows_digest": self.data.rows_digest,
            "names_digest": growth.digest(self._row_names),
            "held_out": rule + details.get(rule, ""),
        }

    def identity(self, split: str) -> Identity:
        data = self.complete
        sizes = f"{data.num_positives:,} ratings to train on of {data.num_users:,} users"
        content = {"ratings": f"{sizes}, {data.num_items:,} items, CRC-32 {data.checksum:08x}"}
        if self._matches:  # by name, whatever the numbers of the rows are
            return Identity(content=content)
        # Other held-out items were trained on.
        names = ("num_users", "num_items", "rows_digest", "names_digest", "held_out")
        metadata = self.metadata
        hint = "; a log that has grown continues from it with config.init_from in a new --workdir"
        return Identity({name: metadata[name] for name in names}, content, hint)

    def batch_spec(self, split: str, batch_size: int) -> tuple[Spec, ...]:
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {"user": ((), np.int32)}
        if split == "train":
            shapes |= {"item": ((), np.int32), "label": ((), np.bool_), "id": ((), np.int32)}
        elif self.settings.eval_negatives == "all":
            bits: Any = (-(-self.model.num_items // 8),), np.uint8
            shapes |= {"chosen": bits, "relevant": bits, "mask": ((), np.float32)}
        else:
            candidates = 1 + self.settings.eval_negatives
            shapes |= {"items": ((candidates,), np.int32), "mask": ((), np.float32)}
        return ({k: jax.ShapeDtypeStruct((batch_size, *s), d) for k, (s, d) in shapes.items()},)

    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        return self._samplers["train"].train_batches(batch_size, shard, num_shards, start_step)

    def eval_batches(self, batch_size: int, shard: int, num_shards: int) -> Iterator[HostBatch]:
        return self._samplers["eval"].eval_batches(batch_size, shard, num_shards)

    def train_ids(self, batch_size: int, step: int) -> list[int]:
        positions = np.arange(step * batch_size, (step + 1) * batch_size)
        return self._samplers["train"].examples(positions)[1].tolist()

    def describe_examples(self, ids: list[int]) -> list[str]:
        return [self._samplers["train"].describe(i) for i in ids]

    def run_notes(self, norm_examples: int, evaluating: bool) -> list[str]:
        notes, data = [], self.complete
        if self.holdout.rule == "date":
            held, past = np.diff(data.held_starts) > 0, np.diff(data.starts) > 0
            new = np.isin(data.held_out, data.items, invert=True)
            notes = [
                f"config.eval_holdout={self.settings.eval_holdout}: {len(data.held_out):,} rows "
                f"are held out, those from {day(int(data.held_from))} on; {(held & past).sum():,} "
                f"users are ranked, {(held & ~past).sum():,} have no rows before and are not; "
                f"{new.sum():,} rows are of items that nobody chose before"
            ]
        if not (self.default_patience and evaluating):
            return notes
        return [
            *notes,
            f"the target of {TARGET} is for ml-20m, and these are other ratings: with "
            f"config.stop_at_target the run ends when {self.default_patience} evaluations brought "
            "no better score; --config.patience and --config.target change that",
        ]

    def host_bytes(
        self, split: str, batch_size: int, num_shards: int
    ) -> dict[tuple[str, ...], int]:
        keys = ("train_batch_size",) if split == "train" else ("eval_batch_size", "eval_negatives")
        index, batches = self._samplers[split].host_bytes(split, batch_size // num_shards)
        return {(): index, keys: batches}

    def fake_batch(self, spec: Spec, draw: np.random.Generator) -> HostBatch:
        users, items = self.model.num_users, self.model.num_items
        shapes = {name: x.shape for name, x in spec.items()}
        batch = {"user": draw.integers(0, users, shapes["user"])}
        if "items" in spec:  # to rank, the first of them held out
            return batch | {"items": draw.integers(0, items, shapes["items"])}
        if "chosen" in spec:
            relevant = np.zeros(shapes["relevant"], np.uint8)
            relevant[:, 0] = 128  # the first item
            return batch | {"chosen": np.zeros_like(relevant), "relevant": relevant}
        rated = draw.random(shapes["label"]) < 1 / (1 + self.settings.train_negatives)
        return batch | {"item": draw.integers(0, items, shapes["item"]), "label": rated}

    # Forward pass, loss and score.

    def init(self, rng: jax.Array) -> tuple[Any, Any]:
        indices = np.zeros((1, 1), np.int32)
        return self.model.init(rng, indices, indices)["params"], {}

    def adopt(self, params: Any, model_state: Any, loaded: Any) -> tuple[Any, Any]:
        """Also puts the rows of an earlier table's users and items where they are now."""
        mixed, model_state = super().adopt(params, model_state, loaded)
        source, manifest = loaded["source"], loaded["manifest"]
        # MLPerf's clock runs before the data are opened; models of images have no tables.
        if not hasattr(self, "data") or not {"users", "items"} <= loaded["params"].keys():
            return mixed, model_state
        tables = {side: loaded["params"][side]["embedding"] for side in ("users", "items")}
        same = all(mixed[side]["embedding"] is table for side, table in tables.items())
        if same and "names_digest" not in manifest:  # the digest of the ids is compared
            return mixed, model_state
        width, own = (of["users"]["embedding"].shape[1] for of in (loaded["params"], params))
        if width != own:
            raise CheckpointError(
                f"its vectors have {width} numbers, config.gmf_dim and half of "
                f"config.mlp_layers[0] make {own}: leave them out, so that the model's own count"
            )
        if source not in self._matches:
            found = growth.match(source, manifest, self._row_names, self.data)
            growth.compare_ratings(source, manifest, found, self.complete)
            self._matches[source] = found
        for side, match in self._matches[source].items():
            initial = params[side]["embedding"]
            mixed = {**mixed, side: {"embedding": match.grow(initial, tables[side])}}
        new = self._matches[source]["users"].means
        if len(new) and isinstance(mixed["users"]["embedding"], np.ndarray):  # not its shape alone
            users = fit_vectors(self.logits, mixed, new, self.data)
            mixed = {**mixed, "users": {"embedding": users}}
        return mixed, model_state

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], rng: jax.Array
    ) -> tuple[Terms, Terms, Any]:
        """Binary cross-entropy of "this user has rated this item"; `rng` is not used."""
        logits = self.logits(params, batch["user"], batch["item"][:, None]).ravel()
        entropy = optax.sigmoid_binary_cross_entropy(logits, batch["label"].astype(logits.dtype))
        return {"cross_entropy": (entropy.sum(), jnp.float32(len(entropy)))}, {}, model_state

    def logits(self, params: Any, users: jax.Array, items: jax.Array) -> jax.Array:
        """f32[b, n] for users i32[b], rows of the table in `params`, and items i32[b, n]."""
        users_of, items_of = (len(params[side]["embedding"]) for side in ("users", "items"))
        model = self.model.clone(num_users=users_of, num_items=items_of)
        logits: Any = model.apply({"params": params}, users[:, None], items)
        return logits

    def predict(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Each user, and the scores of the ranking: see `ranking`."""
        users = batch["user"]
        if "items" in batch:
            scores = self.logits(params, users, batch["items"])
            return {"user": users, **ranking.sampled_ranking(scores, batch["items"])}
        logits = self.model.of_all_items(params)

        def rank(row: tuple[jax.Array, ...]) -> dict[str, jax.Array]:
            vector, chosen, relevant = row
            return ranking.full_ranking(logits(vector), chosen, relevant)

        rows = params["users"]["embedding"][users], batch["chosen"], batch["relevant"]
        return {"user": users, **jax.lax.map(rank, rows, batch_size=self.model.users_at_once)}

    @property
    def score_names(self) -> tuple[str, ...]:
        first = f"hr_at_{ranking.TOP}", f"ndcg_at_{ranking.TOP}"
        if self.settings.eval_negatives != "all":
            return first
        kinds = "hr", "ndcg", "recall", "mrr", "map", "coverage", "popular_share"
        names = [f"{kind}_at_{cut}" for cut in ranking.CUTS for kind in kinds]
        return (*first, *(name for name in names if name not in first))

    @functools.cached_property
    def baselines(self) -> dict[str, dict[str, float]]:
        """`own_scores` of the baselines, by their names; {} in a run that compares nothing.

        They are computed once, and kept in a file for the next run on the same data.
        """
        if not self._compares:
            return {}
        settings, names, total = self.settings, self.score_names, len(self.complete.evaluated)

        def compute() -> baselines.Scores:
            _log.info("NOTE popularity and an item-kNN are scored for comparison, once per workdir")
            size = min(total, baselines.batch_size(self.complete))
            batches = self.eval_batches(size, 0, 1)
            rows = baselines.predictions(self.data, batches, total).values()
            scores = [self.own_scores(iter(of_one)) for of_one in rows]
            return baselines.Scores(np.array([[x[name] for name in names] for x in scores]))

        facts = self.data.checksum, self.complete.checksum, settings.eval_negatives, settings.seed
        path = f"{self._cache_dir}/baselines-{settings.eval_negatives}" if self._cache_dir else ""
        key = json.dumps([*facts, names, baselines.NEIGHBOURS, baselines.SHRINKAGE])
        values = caches.cached_arrays(baselines.Scores, path, key, compute).values.tolist()
        return {
            baseline: dict(zip(names, scores, strict=True))
            for baseline, scores in zip(baselines.LABELS, values, strict=True)
        }

    def score(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        """Also HR@10 and NDCG@10 of the baselines, such as "item_knn_hr_at_10"."""
        others = {
            f"{name}_{metric}": scores[metric]
            for name, scores in self.baselines.items()
            for metric in self.score_names[:2]
        }
        return self.own_scores(rows) | others

    def own_scores(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        """The scores of the model whose rows these are, or of a baseline."""
        every = list(rows)
        shares = ({k: x for k, x in row.items() if k not in ("user", "top")} for row in every)
        scores = mean_scores(shares)
        if self.settings.eval_negatives == "all":
            top = np.concatenate([row["top"] for row in every])
            items = self.complete.items if hasattr(self, "complete") else []  # of a random batch
            counts = np.bincount(items, minlength=self.model.num_items)
            scores |= ranking.breadth(top, counts)
        return scores

    def headline(self, scores: Mapping[str, float]) -> Mapping[str, float]:
        """HR and NDCG, and of full rankings the coverage, at 10; HR of the better baseline."""
        shown = [f"{kind}_at_{ranking.TOP}" for kind in ("hr", "ndcg", "recall", "coverage")]
        others = {name: scores.get(f"{name}_{shown[0]}", -1.0) for name in baselines.LABELS}
        shown.append(f"{max(others, key=others.__getitem__)}_{shown[0]}")
        return {name: scores[name] for name in shown if name in scores}

    def score_notes(self, scores: Mapping[str, float]) -> list[str]:
        notes = []
        for name, label in baselines.LABELS.items():
            lost = [
                f"{metric.replace('_', ' ')} {scores[metric]:.4f} against {other:.4f}"
                for metric in self.score_names[:2]
                if scores.get(metric, math.inf) <= (other := scores.get(f"{name}_{metric}", -1.0))
            ]
            if lost:
                notes.append(f"the model does not beat {label}: {', '.join(lost)}")
        return notes

    def group_scores(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, tuple[float, int]]:
        """The hit rate by the users' number of training ratings, in quarters of the users."""
        return activity_scores(np.diff(self.complete.starts), rows)

    @property
    def uses(self) -> Uses:
        return NcfUses(self)


def _sizes(data: Interactions) -> dict[str, int]:
    """The config keys that declare how large the data are, with their numbers."""
    users, items = data.num_users, data.num_items
    return {"num_users": users, "num_items": items, "num_ratings": data.num_ratings}
