"""The base of both translators: settings, a vocabulary, sentences to evaluate, and their scores."""

import contextlib
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.base import Benchmark, HostBatch, Identity, Spec, Target, span
from benchmarks.exhibits import even_groups
from benchmarks.translation import beam_search, evaluation
from benchmarks.translation.schema import (
    check_vocabulary,
    load_text_manifest,
    read_pairs,
    vocabulary_error,
)
from benchmarks.translation.vocabulary import EOS, Vocabulary, load_vocabulary
from common.data import files
from common.errors import ConfigError, DataError
from common.keys import Count, Seed, Share
from common.placeholders import difference, find

_log = logging.getLogger("tpu_suite")

Length = Annotated[int, "[1, 65536]"]  # in tokens; also the widths of features
Lengths = Annotated[Sequence[Length], "[1, 100] rising"]  # each compiles another program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of the config that both translators have; the recipes in configs/ explain them."""

    seed: Seed
    data_dir: str
    dataset: Literal["", "fake"] = ""
    train_files: str
    eval_files: str
    vocabulary_file: str
    eval_references: str
    num_eval_sentences: Count
    vocabulary_size: Annotated[int, "[0, 1e6]"]
    eval_lengths: Lengths  # that sentences to evaluate are padded to
    width: Length
    dropout: Annotated[float, "[0, 1)"]
    label_smoothing: Annotated[float, "[0, 1)"]
    precision: Literal["bfloat16", "float32"]
    beam_size: Annotated[int, "[1, 100]"]
    length_penalty: Annotated[float, "[0, 5]"]  # lengths to this power stay finite
    target: Share
    stop_at_target: bool = False

    @property
    def dtype(self) -> Any:
        """The dtype of products and activations."""
        return jnp.dtype(self.precision)


class Translator(Benchmark):
    """A benchmark that translates sentences.

    `predict` returns id int32[b], the number of the sentence, and tokens int32[b, n], its
    translation up to EOS and then PAD.
    """

    scores_in_background = True

    settings: Any  # a `Settings` with the package's keys
    declared: Mapping[str, str]  # by split, the config key that declares the number of examples

    references: list[str]  # the true translations of the opened evaluation

    def __init__(self, settings: Settings, cache_dir: str):
        super().__init__()
        self.settings, self.cache_dir = settings, cache_dir
        self.targets = (Target("BLEU", settings.target),)

    # What a package adds.

    def read(self, split: str) -> None:
        """Opens the data of a split and counts them, for `open`."""
        raise NotImplementedError

    def record_files(self, split: str) -> Sequence[str]:
        """The files of records in the folder for a split; () if none exist, or text is read."""
        raise NotImplementedError

    def files_identity(self, split: str) -> Mapping[str, str]:
        """`Identity.content` of the files of a split."""
        raise NotImplementedError

    def train_rows(self) -> Sequence[Mapping[str, int]]:
        """For each kind of training batch, the lengths of the leaves of token ids, by name."""
        raise NotImplementedError

    @functools.cached_property
    def eval_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """The sentences to evaluate and their translations, int32[n, length], padded with zeros."""
        raise NotImplementedError

    def n_best(self, params: Any, inputs: jax.Array, top: int) -> tuple[jax.Array, jax.Array]:
        """The `top` best translations of sentences int32[b, size], at most `beam_size`.

        Returns:
          Ids int32[b, top, n], each up to EOS and then PAD, and the scores of the search
          float32[b, top], the best first; -inf for a translation that does not exist. A translation
          without EOS is as long as the search allows.
        """
        raise NotImplementedError

    @property
    def language(self) -> str:
        """The ISO 639-1 code of the language of the translations."""
        return self._manifest_languages[1] or "de"

    @property
    def languages(self) -> tuple[str, str]:
        """The tags of the languages of the sources and the translations; "" where unknown."""
        source, target = zip(self._manifest_languages, self.vocabulary.languages, strict=True)
        return source[0] or source[1], target[0] or target[1]

    @functools.cached_property
    def _manifest_languages(self) -> tuple[str, str]:
        folder = self.settings.data_dir
        manifest = load_text_manifest(folder) if folder else None
        return manifest.languages if manifest else ("", "")

    # Data.

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the data; if several files match, they must be equal."""
        settings = self.settings
        paths = files.find(settings.data_dir, settings.vocabulary_file, "vocabulary")
        path, loaded = paths[0], load_vocabulary(paths[0])
        for other in paths[1:]:
            if load_vocabulary(other).digest != loaded.digest:
                raise DataError(
                    f"config.vocabulary_file={settings.vocabulary_file!r} matches {len(paths)} "
                    f"files that differ, such as {path} and {other}: name one"
                )
        if settings.vocabulary_size not in (0, loaded.size):
            raise ConfigError(
                f"config.vocabulary_size={settings.vocabulary_size:,}, but {path} has "
                f"{loaded.size:,} entries: set it to that number, or to 0, which takes the "
                "number of the file"
            )
        check_vocabulary(settings.data_dir, loaded, path)
        loaded.language = self.language
        return loaded

    @property
    def vocabulary_size(self) -> int:
        """The config's number of entries, else the vocabulary file's, else the published one."""
        if self.settings.vocabulary_size or not self.settings.data_dir:
            return self.settings.vocabulary_size or self.nominal_sizes["vocabulary"]
        return self.vocabulary.size

    @property
    def metadata(self) -> dict[str, Any]:
        loaded = self.vocabulary
        return {"vocabulary": {"size": loaded.size, "digest": loaded.digest}}

    def identity(self, split: str) -> Identity:
        content = dict(self.files_identity(split))
        if split == "eval":
            path, lines = self.reference_file
            tokens = b"".join(side[side > 0].tobytes() for side in self.eval_pairs)
            content["eval sentences"] = f"SHA-256 {hashlib.sha256(tokens).hexdigest()[:16]}"
            digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
            content["references"] = f"SHA-256 {digest[:16]}" if path else "missing"
        return Identity(self.metadata, content)

    def open(self, split: str) -> int:
        """Also refuses references that do not fit, and records made with another vocabulary."""
        self.read(split)
        if split == "eval" and not hasattr(self, "references"):
            self.references = self._read_references()
        self._check_vocabulary(split)
        return self.num_examples(split)

    @functools.lru_cache(2)  # noqa: B019 (a run has one benchmark)
    def _check_vocabulary(self, split: str) -> str:
        """Warns, or raises DataError, if the records were made with another vocabulary."""
        paths = self.record_files(split)
        if not paths:
            return ""
        text, is_certain = vocabulary_error(self.vocabulary, paths)
        if is_certain:
            raise DataError(text)
        if text:
            _log.warning("%s", text)
        return text

    def data_warnings(self, split: str) -> list[tuple[str, str, str]]:
        fix = "compare a translation with its source before a long run"
        text = self._check_vocabulary(split)
        warnings = [("warn", text, fix)] if text else []
        if split == "train":
            return warnings
        with contextlib.suppress(DataError):  # of training records: their own check tells it
            sentences = {row[row > EOS].tobytes() for row in self.eval_pairs[0].astype(np.int64)}
            self.open("train")
            pairs = read_pairs(self.record_files("train"))
            if trained := sentences.intersection(ids.tobytes() for ids, _ in pairs):
                text = f"{len(trained):,} of {len(sentences):,} sentences to evaluate on are among "
                fix = "the score will be too good: prepare the data again with other text for it"
                warnings.append(("warn", f"{text}the training sentences", fix))
        return warnings

    def declared_examples(self, split: str) -> int:
        return getattr(self.settings, self.declared[split])

    def data_sizes(self) -> dict[str, int]:
        counts = {key: self.num_examples(split) for split, key in self.declared.items()}
        return counts | {"vocabulary_size": self.vocabulary_size}

    def batch_spec(self, split: str, batch_size: int) -> tuple[Spec, ...]:
        if split == "train":
            kinds, numbers = self.train_rows(), {"dropout": np.int32, "id": np.int32}
        else:
            kinds = [{"inputs": length} for length in self.settings.eval_lengths]
            numbers = {"id": np.int32, "mask": np.float32}
        array = jax.ShapeDtypeStruct
        return tuple(
            {name: array((batch_size, length), np.int32) for name, length in kind.items()}
            | {name: array((batch_size,), dtype) for name, dtype in numbers.items()}
            for kind in kinds
        )

    def eval_batches(self, batch_size: int, shard: int, num_shards: int) -> Iterator[HostBatch]:
        sources, lengths = self.eval_pairs[0], self.settings.eval_lengths
        return evaluation.batches(sources, lengths, batch_size, shard, num_shards)

    def fake_batch(self, spec: Spec, draw: np.random.Generator) -> HostBatch | None:
        """Rows that end in up to an eighth of padding; packed ones have four sentences."""
        if "targets" not in spec:
            return None
        batch: HostBatch = {}
        for side in ("inputs", "targets"):
            rows, length = spec[side].shape
            is_packed, position = f"{side}_position" in spec, np.arange(length)
            last = length - 1 - draw.integers(0, length // 8 + 1, (rows, 1))
            longest = max(length // 4, 1) if is_packed else length
            ids = draw.integers(EOS + 1, self.vocabulary_size, (rows, length))
            real = position <= last
            ends = (position % longest == longest - 1) | (position == last)
            batch[side] = np.where(ends, EOS, ids) * real
            batch[f"{side}_position"] = position % longest * real
            batch[f"{side}_segmentation"] = (position // longest + 1) * real
        return batch

    def search_rules(self, length: int, top: int) -> beam_search.Rules:
        """The rules of a beam search for `top` translations of at most `length` tokens."""
        settings, size = self.settings, self.vocabulary_size
        return beam_search.Rules(settings.beam_size, settings.length_penalty, length, size, top)

    def predict(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """The best translation of each sentence."""
        del model_state
        sequences, _ = self.n_best(params, batch["inputs"], 1)
        return {"id": batch["id"], "tokens": sequences[:, 0]}

    # Score.

    @functools.cached_property
    def reference_file(self) -> tuple[str, list[str]]:
        """The file of the true translations and its lines; ("", []) if there is none."""
        path = self.eval_text[1]
        return path, evaluation.read_lines(path) if path else []

    @functools.cached_property
    def eval_text(self) -> tuple[str, str]:
        """The file of the sentences to evaluate ("" for records), and the file of references."""
        settings = self.settings
        paths = evaluation.find_text(settings.data_dir, settings.eval_references, "eval_references")
        return "", paths[0] if paths else ""

    def _read_references(self) -> list[str]:
        """The true translations; without a file they are the decoded targets of the data."""
        (path, lines), count = self.reference_file, self.num_examples("eval")
        if path and len(lines) != count:
            raise DataError(
                f"{path} has {len(lines):,} lines, and there are {count:,} sentences to evaluate: "
                "each needs the line of its reference; see config.eval_references ('' takes the "
                "targets of the records) and config.eval_source"
            )
        sentences, source = self.eval_text[0] or "the data's", path or "the decoded targets"
        what = f"sentences to evaluate: {sentences}; references: {source}"
        lines = lines or [self.vocabulary.decode(ids) for ids in self.eval_pairs[1].tolist()]
        words = evaluation.tokenizer(lines)
        scores = (f"{name} {evaluation.signature(name, words)}" for name in ("BLEU", "chrF", "TER"))
        _log.info("%s; sacrebleu: %s", what, "; ".join(scores))
        return lines

    def run_notes(self, norm_examples: int, evaluating: bool) -> list[str]:
        del norm_examples
        if not evaluating or self.reference_file[0]:
            return []
        settings, paths = self.settings, self.record_files("eval")
        count = self.num_examples("eval")
        where = f" in {paths[0]}" if paths else ""
        if "/wmt32k-encoded-" in where:
            where += " (newstest2013, if MLPerf's reference wrote them)"
        return [
            f"BLEU is against the decoded targets of the {count:,} sentences{where}, "
            f"and not comparable with published scores; config.target={settings.target} of the "
            "recipe for WMT is one of newstest2014: put newstest2014.en and newstest2014.de into "
            f"{settings.data_dir}, or see config.eval_references"
        ]

    @functools.cached_property
    def sources(self) -> list[str]:
        """The sentences to evaluate as text; tokenized ones are joined."""
        if path := self.eval_text[0]:
            return evaluation.read_lines(path)
        return [self.vocabulary.decode(ids) for ids in self.eval_pairs[0].tolist()]

    @functools.cached_property
    def _with_placeholders(self) -> list[int]:
        """The sentences that have placeholders, and the same ones in the reference."""
        pairs = enumerate(zip(self.sources, self.references, strict=True))
        return [i for i, pair in pairs if find(pair[0]) and not difference(*pair)]

    @property
    def score_names(self) -> tuple[str, ...]:
        others = () if self.settings.stop_at_target else ("chrF",)
        may = not hasattr(self, "references") or self._with_placeholders  # a run has open data
        kept = ("placeholders_kept",) if may else ()
        return "BLEU", *others, "exact", *kept, *(f"precision_{n}" for n in range(1, 5))

    def score(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        """BLEU as a fraction; with chrF unless a target of text with blanks stops the run."""
        has_blanks = evaluation.tokenizer(self.references) == evaluation.BLANKS
        return self._scores(rows, () if self.settings.stop_at_target and has_blanks else ("chrF",))

    def all_scores(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        return self._scores(rows, ("chrF", "TER"))

    def _scores(self, rows: Any, others: Sequence[str]) -> dict[str, float]:
        lines = self.translations(rows), self.references
        scores = evaluation.bleu(*lines) | evaluation.chrf_and_ter(*lines, others)
        if numbers := self._with_placeholders:
            kept = sum(not difference(self.sources[i], lines[0][i]) for i in numbers)
            scores["placeholders_kept"] = kept / len(numbers)
        return scores

    def group_scores(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, tuple[float, int]]:
        """BLEU by the tokens of the source without EOS, in thirds of the sentences."""
        lengths = np.count_nonzero(self.eval_pairs[0] > EOS, axis=1)
        texts, words = self.translations(rows), evaluation.tokenizer(self.references)
        scores = {}
        for group in even_groups(lengths, 3):
            lines, truth = ([side[i] for i in group] for side in (texts, self.references))
            score = evaluation.bleu(lines, truth, words)["BLEU"]
            scores[f"sources of {span(lengths[group], 'token')}"] = score, len(group)
        return scores

    def headline(self, scores: Mapping[str, float]) -> Mapping[str, float]:
        shown = ("BLEU", "chrF", "TER", "placeholders_kept", "exact", "length_ratio")
        return {name: scores[name] for name in shown if name in scores}

    def translations(self, rows: Iterator[dict[str, np.ndarray]]) -> list[str]:
        """The translations in the order of the sentences, from the outputs of `predict`."""
        lines = [""] * len(self.references)
        for row in rows:
            for i, tokens in zip(row["id"].tolist(), row["tokens"].tolist(), strict=True):
                lines[i] = self.decode(tokens)
        return lines

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a translation, in one line."""
        return self.vocabulary.decode(tokens).replace("\n", " ")
