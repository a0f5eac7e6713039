"""Makes the shards of a preparation of pairs, and the content of its manifest.

All pairs are read into memory, about 2 GB for WMT. Then processes encode, shuffle and pack the
pairs of one shard each, and this process writes the rows, one shard after the other.
"""

import argparse
import collections
import functools
import itertools
import multiprocessing
import os
import signal
import threading
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import process
from typing import Any

import numpy as np

from benchmarks.translation.preparation import languages, vocabularies
from benchmarks.translation.preparation.pairs import Pair, Pairs, TextInput
from benchmarks.translation.schema import FEATURES, SIDES
from benchmarks.translation.vocabulary import EOS, Vocabulary, parse_vocabulary
from common import pools
from common.data import records
from common.data.order import hash64
from common.errors import UserError
from common.preparation import writing
from common.progress import ProgressBar
from common.tensorflow import tensorflow

_FULL = 0.01  # a row with no more free positions than this share is full: no pair could use them
_AGAIN = 8  # one in so many rows is packed again with the next pairs

Ids = tuple[Sequence[int], Sequence[int]]


def pack(pairs: Iterable[Ids], length: int, open_rows: int = 256) -> Iterator[list[Ids]]:
    """Deals pairs of (source ids, target ids), with EOS, to rows; yields the pairs of each row.

    Pairs for `open_rows` rows are placed together, the longest first, each into the row in which it
    leaves the fewest positions free. The pairs of the emptiest rows are packed again with the next
    pairs. The order of the rows is not random. Each side has 1 to `length` ids, and a row `length`
    positions. More rows at a time fill better; 1,000 pairs take about 50 ms.
    """
    pool: list[Ids] = []
    size = 0  # the sum of the longer sides in the pool
    for pair in pairs:
        pool.append(pair)
        size += max(map(len, pair))
        if size >= open_rows * length:
            rows, pool = _split(pool, length, open_rows // _AGAIN)
            size = sum(max(map(len, pair)) for pair in pool)
            yield from rows
    yield from _split(pool, length, 0)[0]


def row(pairs: Sequence[Ids], length: int) -> dict[str, np.ndarray]:
    """One row of these pairs in this order.

    Returns:
      {"inputs", "inputs_segmentation", "inputs_position", and the same of "targets"}: int64[length]
      each. Segments count from 1, positions from 0 in each segment; 0 is padding.
    """
    features = {name: np.zeros(length, np.int64) for name in FEATURES}
    for which, side in enumerate(SIDES):
        begin = 0
        for segment, pair in enumerate(pairs, 1):
            ids = pair[which]
            end = begin + len(ids)
            features[side][begin:end] = ids
            features[f"{side}_segmentation"][begin:end] = segment
            features[f"{side}_position"][begin:end] = np.arange(len(ids))
            begin = end
    return features


def _split(pairs: list[Ids], length: int, most_again: int) -> tuple[list[list[Ids]], list[Ids]]:
    """The pairs of each finished row; the pairs of at most `most_again` rows to pack again."""
    sizes = np.array([[len(side) for side in pair] for pair in pairs]).reshape(-1, 2)
    where, free = _place(sizes, length)
    least = free.min(axis=1)
    emptiest = np.argsort(-least, kind="stable")[:most_again]
    again = set(emptiest[least[emptiest] > _FULL * length].tolist())
    rows: list[list[Ids]] = [[] for _ in free]
    for pair, number in zip(pairs, where.tolist(), strict=True):
        rows[number].append(pair)
    done = [members for number, members in enumerate(rows) if number not in again]
    return done, [pair for number in sorted(again) for pair in rows[number]]


def _place(sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The row int64[n] of each pair of sizes int64[n, 2], and the free positions int64[rows, 2]."""
    where, count = np.zeros(len(sizes), np.int64), 0
    free = np.zeros((2, len(sizes)), np.int64)
    for pair in np.argsort(-sizes.max(axis=1), kind="stable"):
        rest = free[:, :count] - sizes[pair, :, None]
        # The side with more free positions decides, so that both sides of a row fill alike.
        waste = np.where(rest.min(axis=0) >= 0, rest.max(axis=0), 2 * length)
        best = int(waste.argmin()) if count else 0
        if not count or waste[best] == 2 * length:
            best, count = count, count + 1
            free[:, best] = length
        free[:, best] -= sizes[pair]
        where[pair] = best
    return where, free[:, :count].T


def serialize_example(features: Mapping[str, Sequence[int] | np.ndarray]) -> bytes:
    """The serialized tf.train.Example of lists of integers, in the order of their names.

    The order of protobuf's maps changes with its version.
    """
    train, entries = tensorflow().train, []
    for name in sorted(features):
        feature = train.Feature(int64_list=train.Int64List(value=features[name]))
        entries.append(train.Features(feature={name: feature}).SerializeToString())
    # An Example is one field of bytes, stored as that of a BytesList.
    return train.BytesList(value=[b"".join(entries)]).SerializeToString()


SOURCES, REFERENCES = "sources.txt", "references.txt"  # raw lines of the evaluation
_VOCABULARY = 1000, 32768  # subwords, the least and the most, unless --vocabulary_size is given
_SAMPLE = 8_000_000  # characters to build it from; tensor2tensor takes 6 million of WMT
_PER_SHARD = 4 << 20  # bytes of input, unless --shards is given
_LEAST, _MOST = 8, 100  # shards then
_PER_PROCESS = 2 << 20  # bytes of input that are worth the start of another process
_OPEN_ROWS = 512
_EQUAL = 0.1  # more pairs with equal sides are worth a warning
_TRAIN, _EVAL = records.TEXT_SPLITS

_parse = functools.lru_cache(1)(parse_vocabulary)  # once in each process

Job = tuple[int, list[Pair]]  # the number of a shard, and its pairs


def make(args: argparse.Namespace, source: TextInput) -> dict[str, Any]:
    """Writes the files that are not finished yet, except the manifest.

    Returns:
        The manifest's content, a function of the input, the seed and the settings.
    """
    state, vocabulary = writing.State(args.out), source.vocabulary
    if vocabulary:
        _check_languages(source, vocabulary)
    stamps, pairs = source.stamps(), source.read()
    if source.stamps() != stamps:
        raise UserError("the training files changed while they were read: start again")
    print(f"train: {len(pairs.train):,} pairs; eval: {len(pairs.eval):,}", flush=True)
    _warn(pairs)
    count = args.shards or min(_MOST, max(_LEAST, source.size // _PER_SHARD))
    size = 0 if vocabulary else args.vocabulary_size or _vocabulary_size(source.size, pairs.train)
    settings: dict[str, Any] = {
        "length": args.length,
        "max_tokens": args.max_tokens,
        "shards": count,
        "seed": args.seed,
        "vocabulary_size": size,
        "tools": {"unicode": unicodedata.unidata_version},
        **source.settings,
    }
    state.claim({"settings": settings, "input": stamps}, args.overwrite)
    state.remove_data_manifest()  # it describes a complete set
    if vocabulary:
        vocabularies.save(args.out, vocabulary)
    else:
        vocabulary = vocabularies.load_saved(state)
        vocabulary = vocabulary or vocabularies.build(state, sample(pairs.train, args.seed), size)

    names = [records.shard_name(_TRAIN, k, count) for k in range(count)]
    summaries = state.finished(names)
    wanted = [k for k, name in enumerate(names) if name not in summaries]
    workers = max(1, min(args.workers, len(wanted), source.size // _PER_PROCESS))
    summaries |= write_shards(args, pairs.train, vocabulary, names, wanted, workers)
    if not any(row["pairs"] for row in summaries.values()):
        raise UserError(f"all training pairs have more than --max_tokens={args.max_tokens} tokens")
    return {
        "format": 1,
        "kind": "translation",
        "length": args.length,
        "languages": source.languages if any(source.languages) else vocabulary.languages,
        "vocabulary": {
            "file": vocabularies.FILES[vocabulary.kind],
            "kind": vocabulary.kind,
            "size": vocabulary.size,
            "sha256": vocabulary.digest,
        },
        "settings": settings,
        "splits": {
            "train": _describe_train(summaries, pairs.left_out["train"]),
            "eval": _write_eval(args.out, vocabulary, pairs.eval, pairs.left_out["eval"]),
        },
    }


def _check_languages(source: TextInput, vocabulary: Vocabulary) -> None:
    """Raises UserError if a vocabulary is for other languages than those of the text."""
    known = [languages.code(tag).partition("-")[0] for tag in vocabulary.languages]
    asked = [tag.partition("-")[0] for tag in source.languages]
    if any(a and b and a != b for a, b in zip(known, asked, strict=True)):
        raise UserError(
            f"the text is {' to '.join(source.languages)}, and {vocabulary.path} is for "
            f"{' to '.join(vocabulary.languages)}: take another model, or turn the text with "
            "--source_language or by the order of its files"
        )


def _warn(pairs: Pairs) -> None:
    """Warns of pairs with equal sides, and of sentences that are in both splits."""
    left_out = pairs.left_out["train"].get("equal", 0)
    total = len(pairs.train) + left_out
    equal = left_out + sum(source == target for source, target in pairs.train)
    if equal > _EQUAL * total:
        print(
            f"warning: {equal / total:.0%} of the training pairs have equal sides: is one of the "
            "files in the wrong language? --clean leaves such pairs out"
        )
    sentences = {source.strip().casefold() for source, _ in pairs.eval}
    if seen := sentences.intersection(source.casefold() for source, _ in pairs.train):
        print(
            f"warning: {len(seen):,} of {len(sentences):,} sentences to evaluate on are among the "
            "training sentences: the score will be too good; take other text for the evaluation"
        )


def _vocabulary_size(size: int, pairs: Sequence[Pair]) -> int:
    """The size of the vocabulary that fits the text, of which the files have `size` bytes.

    It is the size for WMT, but at most the number of different characters plus one subword for each
    1,000 characters of text: a subword has about four, so that it occurs 250 times, enough to learn
    it.
    """
    if size >= 1000 * _VOCABULARY[1]:
        return _VOCABULARY[1]
    counts = collections.Counter[str]()
    for side in itertools.chain.from_iterable(pairs):
        counts.update(side)
    return min(max(counts.total() // 1000 + len(counts), _VOCABULARY[0]), _VOCABULARY[1])


def sample(pairs: list[Pair], seed: int) -> list[str]:
    """The texts of a part of the pairs, drawn by a hash of their numbers, of bounded size."""
    sizes, most = np.array([len(a) + len(b) for a, b in pairs]), 1 << 64
    draws = hash64(seed, 4, np.arange(len(sizes)))
    chosen = np.arange(len(sizes))
    while sizes[chosen].sum() > _SAMPLE and len(chosen) > 1:
        most = most * 9 // 10
        chosen = np.flatnonzero(draws < most)
    return [text for i in chosen for text in pairs[i]]


def deal(count: int, shards: int, seed: int) -> np.ndarray:
    """The shard int64[count] of each pair, so that the shards are equally large.

    Every shard gets one of each `shards` consecutive pairs, in an order drawn from the seed.
    """
    groups = np.arange(-(-count // shards))[:, None]
    draws = hash64(seed, 1, groups, np.arange(shards))
    return draws.argsort(axis=1).ravel()[:count]


def write_shards(
    args: argparse.Namespace,
    pairs: list[Pair],
    vocabulary: Vocabulary,
    names: Sequence[str],
    wanted: Sequence[int],
    workers: int,
) -> dict[str, dict[str, Any]]:
    """Makes the shards with the numbers `wanted`; returns their summaries by name."""
    state, summaries = writing.State(args.out), {}
    owners = deal(len(pairs), len(names), args.seed)
    jobs = ((k, [pairs[i] for i in np.flatnonzero(owners == k)]) for k in wanted)
    work = functools.partial(make_shard, vocabulary.data, args.length, args.max_tokens, args.seed)
    progress = ProgressBar("packing", int(np.isin(owners, wanted).sum()), "pairs")
    for k, (facts, rows) in zip(wanted, _made(work, jobs, workers), strict=True):
        features = (row(members, args.length) for members in rows)
        path = os.path.join(args.out, names[k])
        written = records.write_shard(path, map(serialize_example, features))
        summaries[names[k]] = written | facts
        state.write(f"{names[k]}.json", summaries[names[k]])
        progress.add(facts["pairs"] + facts["long"], written["bytes"])
    if wanted:
        progress.close()
    return summaries


def _made(work: Any, jobs: Iterator[Job], workers: int) -> Iterator[Any]:
    """`map(work, jobs)`, in processes if there are to be several workers."""
    if workers == 1:
        yield from map(work, jobs)
        return
    spawn = multiprocessing.get_context("spawn")  # a fork would not have TensorFlow's threads
    try:
        with futures.ProcessPoolExecutor(workers, spawn, _start) as pool:
            yield from pools.ordered(pool, work, jobs, 2 * workers)
    except process.BrokenProcessPool as error:
        raise UserError(
            f"one of --workers={workers} processes was killed, perhaps for lack of memory: take "
            "fewer, and the same command continues"
        ) from error


def _start() -> None:
    """Ends a worker with the main process; Ctrl-C is the main process's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def make_shard(
    vocabulary: bytes, length: int, max_tokens: int, seed: int, job: Job
) -> tuple[dict[str, Any], list[list[Ids]]]:
    """Encodes, shuffles and packs the pairs of a shard into rows of `length` positions.

    Pairs with more than `max_tokens` on a side, EOS included, are left out. `vocabulary` is the
    content of its file. Returns {"pairs", "tokens": [inputs, targets], "long": left out, "longest":
    tokens of the longest side that was seen}; and the pairs of each row.
    """
    number, texts = job
    pairs, longest, loaded = [], 0, _parse(vocabulary, "the vocabulary")
    for pair in texts:
        ids = encode(pair, loaded)
        most = max(map(len, ids))
        longest = max(longest, most)
        if most <= max_tokens:
            pairs.append(ids)
    facts = {
        "pairs": len(pairs),
        "tokens": [sum(len(pair[side]) for pair in pairs) for side in (0, 1)],
        "long": len(texts) - len(pairs),
        "longest": longest,
    }
    shuffled = (pairs[i] for i in _permutation(len(pairs), seed, 2, number))
    rows = [*pack(shuffled, length, _OPEN_ROWS)]
    return facts, [rows[i] for i in _permutation(len(rows), seed, 3, number)]


def encode(pair: Pair, vocabulary: Vocabulary) -> list[list[int]]:
    """The ids of both sides of a pair, with EOS."""
    source, target = map(str.strip, pair)
    return [[*vocabulary.encode(source), EOS], [*vocabulary.encode_target(target), EOS]]


def _permutation(size: int, *key: int) -> list[int]:
    return hash64(*key, np.arange(size)).argsort(kind="stable").tolist()


def _write_eval(
    out: str, vocabulary: Vocabulary, pairs: Sequence[Pair], left_out: dict[str, int]
) -> dict[str, Any]:
    """Writes the records and the raw lines of the evaluation; returns the manifest's row."""
    for name, texts in zip((SOURCES, REFERENCES), zip(*pairs, strict=True), strict=True):
        writing.save(out, name, "".join(f"{text}\n" for text in texts).encode())
    ids = [encode(pair, vocabulary) for pair in pairs]
    examples = (serialize_example(dict(zip(SIDES, pair, strict=True))) for pair in ids)
    name = records.shard_name(_EVAL, 0, 1)
    written = records.write_shard(os.path.join(out, name), examples)
    facts = {
        "pairs": len(ids),
        "tokens": [sum(len(pair[side]) for pair in ids) for side in (0, 1)],
        "longest_inputs": max(len(pair[0]) for pair in ids),
    }
    return {
        "examples": written["examples"],
        "bytes": written["bytes"],
        **facts,
        "left_out": left_out,
        "shards": [{"name": name, **written, **facts}],
    }


def _describe_train(
    summaries: dict[str, dict[str, Any]], left_out: dict[str, int]
) -> dict[str, Any]:
    """The manifest's row of the training split; `left_out` are pairs by reason."""
    rows = [{"name": name, **row} for name, row in sorted(summaries.items())]
    keys = ("name", *writing.FACTS, "pairs", "tokens", "longest")
    return {
        **{key: sum(row[key] for row in rows) for key in ("examples", "bytes", "pairs")},
        "tokens": [sum(row["tokens"][side] for row in rows) for side in (0, 1)],
        "longest": max(row["longest"] for row in rows),
        "left_out": {**left_out, "long": sum(row["long"] for row in rows)},
        "shards": [{key: row[key] for key in keys} for row in rows],
    }
