"""Makes the shards of a preparation of pairs, and the content of its manifest.

The training pairs are read once and wait in a temporary file until the vocabulary is known. Then
processes encode, shuffle and pack the pairs of one shard each, and this process writes the rows,
one shard after the other. Memory holds the pairs of a few shards, and 20 bytes of each other pair.
"""

import argparse
import array
import collections
import functools
import itertools
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import unicodedata
from collections.abc import Iterable, Sequence
from concurrent import futures
from concurrent.futures import process
from typing import IO, Any

import numpy as np

from benchmarks.translation.preparation import packing, sources, vocabularies
from benchmarks.translation.rows import SIDES
from benchmarks.translation.vocabulary import EOS, Vocabulary, parse_vocabulary
from common import console, pools
from common.data import records
from common.data.order import hash64
from common.errors import UserError
from common.preparation import writing

SOURCES, REFERENCES = "sources.txt", "references.txt"  # raw lines of the evaluation
_VOCABULARY = 1000, 32768  # subwords, the least and the most, unless --vocabulary_size is given
_SAMPLE = 8_000_000  # characters to build it from; tensor2tensor takes 6 million of WMT
_PER_SHARD = 4 << 20  # bytes of input, unless --shards is given
_LEAST, _MOST = 8, 100  # shards then
_PER_PROCESS = 2 << 20  # bytes of input that are worth the start of another process
_OPEN_ROWS = 512
_FORMER = ("key", "pairs")  # what reading.json of older folders has besides the pairs left out
_EQUAL = 0.1  # more pairs with equal sides are worth a warning
_TRAIN, _EVAL = records.TEXT_SPLITS

_parse = functools.lru_cache(1)(parse_vocabulary)  # once in each process

Input = sources.TextInput | sources.RecordInput
Job = tuple[int, list[bytes]]  # the number of a shard, and its pairs, pickled


def make(args: argparse.Namespace, source: Input) -> tuple[dict[str, Any], int]:
    """Writes what is not finished yet, except the manifest.

    Returns:
        The manifest's content, a function of the input, the seed and the settings; and the number
        of pairs in the shards that this run has made.
    """
    state, vocabulary = writing.State(args.out), source.vocabulary
    count = args.shards or min(_MOST, max(_LEAST, source.size // _PER_SHARD))
    settings: dict[str, Any] = {
        "length": args.length,
        "max_tokens": args.max_tokens,
        "shards": count,
        "seed": args.seed,
        "vocabulary_size": 0 if vocabulary else args.vocabulary_size or _vocabulary_size(source),
        "tools": {"unicode": unicodedata.unidata_version},
        **source.settings,
    }
    stamps = source.stamps()
    state.claim({"settings": settings, "input": stamps}, args.overwrite)
    evaluation = [*source.read("eval")]  # a fault in it ends the program before the long part
    if not any(evaluation):
        raise UserError("the evaluation files hold no pair with text on both sides")
    print(f"eval: {sum(map(bool, evaluation)):,} pairs", flush=True)
    state.remove_manifest()  # it describes a complete set

    names = [records.shard_name(_TRAIN, k, count) for k in range(count)]
    summaries, reading = state.finished(names), state.read("reading.json")
    wanted = [k for k, name in enumerate(names) if name not in summaries]
    if vocabulary:
        vocabularies.save(args.out, vocabulary)
    else:
        vocabulary = vocabularies.load_saved(state)
    if wanted or not vocabulary or not reading:
        with tempfile.TemporaryFile(dir=None if "://" in args.out else args.out) as file:
            spool = Spool(file)
            reading = _read(source, spool, evaluation)
            if source.stamps() != stamps:
                raise UserError("the training files changed while they were read: start again")
            if not vocabulary:
                texts = spool.sample(args.seed)
                vocabulary = vocabularies.build(state, texts, settings["vocabulary_size"])
            state.write("reading.json", reading)
            workers = max(1, min(args.workers, len(wanted), source.size // _PER_PROCESS))
            summaries |= _write_shards(args, spool, vocabulary, names, wanted, workers)
    left_out = {key: reading[key] for key in reading if key not in _FORMER}
    if not any(row["pairs"] for row in summaries.values()):
        raise UserError(f"all training pairs have more than --max_tokens={args.max_tokens} tokens")
    splits = {
        "train": _describe_train(summaries, left_out),
        "eval": _write_eval(args.out, vocabulary, evaluation),
    }
    content = {
        "format": 1,
        "kind": "translation",
        "length": args.length,
        "vocabulary": {
            "file": vocabularies.FILES[vocabulary.kind],
            "kind": vocabulary.kind,
            "size": vocabulary.size,
            "sha256": vocabulary.digest,
        },
        "settings": settings,
        "splits": splits,
    }
    return content, sum(summaries[names[k]]["pairs"] for k in wanted)


def _vocabulary_size(source: Input) -> int:
    """The size of the vocabulary that fits the text.

    It is that of WMT, but beside the different characters at most one for each 1,000 characters
    of text: a subword has about four, so that each occurs 250 times, enough to learn it.
    """
    if source.size >= 1000 * _VOCABULARY[1]:
        return _VOCABULARY[1]
    counts: collections.Counter[Any] = collections.Counter()
    for side in itertools.chain.from_iterable(filter(None, source.read("train"))):
        counts.update(side)
    size = counts.total() // 1000 + len(counts)
    return min(max(size, _VOCABULARY[0]), _VOCABULARY[1])


class Spool:
    """Pairs in a temporary file, numbered in the order in which they came."""

    def __init__(self, file: IO[bytes]):
        """`file` is empty. The system deletes a `tempfile.TemporaryFile` of a killed program."""
        self._file = file
        self._starts, self._sizes = array.array("Q", [0]), array.array("I")  # bytes; characters

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, pair: Sequence[sources.Side]) -> None:
        """Adds the next pair."""
        size = self._file.write(pickle.dumps(pair))
        self._starts.append(self._starts[-1] + size)
        self._sizes.append(sum(map(len, pair)))

    def read(self, numbers: Iterable[int]) -> list[bytes]:
        """The pairs with these numbers, pickled."""
        self._file.flush()
        file, starts = self._file.fileno(), self._starts
        return [os.pread(file, starts[i + 1] - starts[i], starts[i]) for i in numbers]

    def sample(self, seed: int) -> list[str]:
        """The texts of a part of the pairs, drawn by a hash of their numbers, of bounded size."""
        sizes, most = np.array(self._sizes), 1 << 64
        draws = hash64(seed, 4, np.arange(len(sizes)))
        chosen = np.arange(len(sizes))
        while sizes[chosen].sum() > _SAMPLE and len(chosen) > 1:
            most = most * 9 // 10
            chosen = np.flatnonzero(draws < most)
        return [text for data in self.read(chosen) for text in pickle.loads(data)]

    def deal(self, shards: int, seed: int) -> np.ndarray:
        """The shard int64[n] of each pair, so that the shards are equally large.

        Of each `shards` consecutive pairs every shard gets one, in an order drawn from the seed.
        """
        groups = np.arange(-(-len(self) // shards))[:, None]
        draws = hash64(seed, 1, groups, np.arange(shards))
        return draws.argsort(axis=1).ravel()[: len(self)]


def _read(source: Input, spool: Spool, evaluation: Sequence[Any]) -> dict[str, int]:
    """Takes the training pairs into the spool; returns how many were left out, by reason.

    Warns of equal sides, and of sources that the pairs for the evaluation have as well.
    """
    sources_of = (pair[0] for pair in evaluation if pair)
    sentences = {side.strip() for side in sources_of if isinstance(side, str)}
    progress = console.ProgressBar("reading", 0, "pairs", source.size)
    equal, known = 0, set()
    for pair in filter(None, source.read("train", lambda size: progress.add(0, size))):
        progress.add(1)
        spool.add(pair)
        equal += pair[0] == pair[1]
        if isinstance(pair[0], str) and pair[0] in sentences:
            known.add(pair[0])
    progress.close()
    if not len(spool):
        raise UserError("the training files hold no pair with text on both sides")
    left_out = {"empty": 0, **source.left_out}
    total, equal = len(spool) + left_out.get("equal", 0), equal + left_out.get("equal", 0)
    if equal > _EQUAL * total:
        print(
            f"warning: train: {equal / total:.0%} of the pairs have equal sides: is one of the "
            "files in the wrong language? --clean leaves such pairs out"
        )
    if known:
        print(
            f"warning: {len(known):,} of {len(sentences):,} sentences to evaluate on are in the "
            "training text too: the score will be too good; take other text"
        )
    return left_out


def _write_shards(
    args: argparse.Namespace,
    spool: Spool,
    vocabulary: Vocabulary,
    names: Sequence[str],
    wanted: Sequence[int],
    workers: int,
) -> dict[str, dict[str, Any]]:
    """Makes the shards with the numbers `wanted`; returns their summaries by name."""
    state, summaries = writing.State(args.out), {}
    owners = spool.deal(len(names), args.seed)
    jobs = ((k, spool.read(np.flatnonzero(owners == k))) for k in wanted)
    work = functools.partial(make_shard, vocabulary.data, args.length, args.max_tokens, args.seed)
    progress = console.ProgressBar("packing", int(np.isin(owners, wanted).sum()), "pairs")
    pool = futures.ThreadPoolExecutor(1)
    if workers > 1:  # a fork would not have TensorFlow's threads
        spawn = multiprocessing.get_context("spawn")
        try:
            pool = futures.ProcessPoolExecutor(workers, spawn, _start)
        except OSError as error:  # processes share semaphores there
            raise UserError(
                f"--workers={workers}: several processes need /dev/shm ({error.strerror}): give "
                "the container one (docker run --shm-size=1g), or take --workers=1"
            ) from error
    try:
        made = pools.ordered(pool, work, jobs, 2 * workers)
        for k, (facts, rows) in zip(wanted, made, strict=True):
            features = (packing.row(pairs, args.length) for pairs in rows)
            path = os.path.join(args.out, names[k])
            written = records.write_shard(path, map(packing.serialize_example, features))
            summaries[names[k]] = written | facts
            state.write(f"{names[k]}.json", summaries[names[k]])
            progress.add(facts["pairs"] + facts["long"], written["bytes"])
    except process.BrokenProcessPool as error:
        raise UserError(
            f"one of --workers={workers} processes was killed, perhaps for lack of memory: take "
            "fewer, and the same command continues"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    progress.close()
    return summaries


def make_shard(
    vocabulary: bytes, length: int, max_tokens: int, seed: int, job: Job
) -> tuple[dict[str, Any], list[list[packing.Pair]]]:
    """Encodes, shuffles and packs the pairs of a shard.

    Args:
        vocabulary: the content of its file.
        length: positions of a row.
        max_tokens: pairs with more on a side are left out, EOS included.
        seed: of the order.
        job: see `Job`.

    Returns:
        {"pairs", "tokens": [inputs, targets], "long": left out, "longest": tokens of the longest
        side that was seen}; and the pairs of each row.
    """
    number, data = job
    pairs, longest, loaded = [], 0, _parse(vocabulary, "the vocabulary")
    for pair in map(pickle.loads, data):
        ids = [encode(side, loaded) for side in pair]
        most = max(map(len, ids))
        longest = max(longest, most)
        if most <= max_tokens:
            pairs.append(ids)
    facts = {
        "pairs": len(pairs),
        "tokens": [sum(len(pair[side]) for pair in pairs) for side in (0, 1)],
        "long": len(data) - len(pairs),
        "longest": longest,
    }
    shuffled = (pairs[i] for i in _permutation(len(pairs), seed, 2, number))
    rows = [*packing.pack(shuffled, length, _OPEN_ROWS)]
    return facts, [rows[i] for i in _permutation(len(rows), seed, 3, number)]


def encode(side: sources.Side, vocabulary: Vocabulary) -> list[int]:
    """The ids of a side of a pair, with EOS."""
    return [*vocabulary.encode(side.strip()), EOS] if isinstance(side, str) else side


def _permutation(size: int, *key: int) -> list[int]:
    return hash64(*key, np.arange(size)).argsort(kind="stable").tolist()


def _start() -> None:
    """Ends a worker with the main process; Ctrl-C is the main process's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _write_eval(out: str, vocabulary: Vocabulary, pairs: Sequence[Any]) -> dict[str, Any]:
    """Writes the records and the raw lines of the evaluation; returns the manifest's row."""
    full = [pair for pair in pairs if pair]
    for name, sides in zip((SOURCES, REFERENCES), zip(*full, strict=True), strict=True):
        texts = (side if isinstance(side, str) else vocabulary.decode(side) for side in sides)
        lines = [text.replace("\n", " ") + "\n" for text in texts]
        writing.save(out, name, "".join(lines).encode())
    ids = [[encode(side, vocabulary) for side in pair] for pair in full]
    examples = (packing.serialize_example(dict(zip(SIDES, pair, strict=True))) for pair in ids)
    name = records.shard_name(_EVAL, 0, 1)
    written = records.write_shard(os.path.join(out, name), examples)
    facts = {
        "pairs": len(ids),
        "tokens": [sum(len(pair[side]) for pair in ids) for side in (0, 1)],
        "longest_inputs": max(len(pair[0]) for pair in ids),
    }
    return {
        **{key: written[key] for key in ("examples", "bytes")},
        **facts,
        "left_out": {"empty": len(pairs) - len(full)},
        "shards": [{"name": name, **written, **facts}],
    }


def _describe_train(
    summaries: dict[str, dict[str, Any]], left_out: dict[str, int]
) -> dict[str, Any]:
    """The manifest's row of the training split; `left_out` before are pairs by reason."""
    rows = [{"name": name, **row} for name, row in sorted(summaries.items())]
    keys = ("name", *writing.FACTS, "pairs", "tokens", "longest")
    return {
        **{key: sum(row[key] for row in rows) for key in ("examples", "bytes", "pairs")},
        "tokens": [sum(row["tokens"][side] for row in rows) for side in (0, 1)],
        "longest": max(row["longest"] for row in rows),
        "left_out": {**left_out, "long": sum(row["long"] for row in rows)},
        "shards": [{key: row[key] for key in keys} for row in rows],
    }
