"""Runs one preparation of pairs: reads them, packs them into shards, and describes the result."""

import argparse
import collections
import dataclasses
import json
import os
import shutil
import tempfile
import threading
import unicodedata
from typing import Any

from benchmarks.translation.preparation import packing, shards, sources, vocabularies
from benchmarks.translation.vocabulary import EOS, Vocabulary
from common import console, pools
from common.data import files, records
from common.data.shards import tensorflow
from common.errors import UserError
from common.preparation import writing

SOURCES, REFERENCES = "sources.txt", "references.txt"  # raw lines of the evaluation
_VOCABULARY = 1000, 32768  # subwords, the least and the most, unless --vocabulary_size is given
_PER_SHARD = 4 << 20  # bytes of input, unless --shards is given
_LEAST, _MOST = 8, 100  # shards then
_PER_PROCESS = 2 << 20  # bytes of input that are worth the start of another process
_TRAIN, _EVAL = records.TEXT_SPLITS

Input = sources.TextInput | sources.RecordInput
Summaries = dict[str, dict[str, Any]]  # of the shards, by name; see `shards.make`


class Run:
    """One run of the program."""

    def __init__(self, args: argparse.Namespace, source: Input):
        self._args, self._source = args, source
        self._state = writing.State(args.out)
        self._size = source.size()
        number = args.shards or min(_MOST, max(_LEAST, self._size // _PER_SHARD))
        self._settings: dict[str, Any] = {
            "length": args.length,
            "max_tokens": args.max_tokens,
            "shards": number,
            "seed": args.seed,
            "vocabulary_size": 0 if source.vocabulary else self._vocabulary_size(),
            "tools": {"unicode": unicodedata.unidata_version},
        }
        self._names = [records.shard_name(_TRAIN, k, number) for k in range(number)]
        self._plan = {"settings": self._settings, "input": source.stamps("train")}
        self._key = json.dumps(self._plan, sort_keys=True)
        # Other text to evaluate on leaves the shards of training as they are.
        self._eval_key = json.dumps([self._plan, source.stamps("eval")], sort_keys=True)

    def run(self) -> tuple[dict[str, Any], int]:
        """Writes what is not finished yet, except the manifest.

        Returns:
            The manifest's content, a function of the input, the seed and the settings; and the
            number of pairs in the shards that this run has made.
        """
        state, names = self._state, self._names
        state.claim(self._plan, self._args.overwrite)
        vocabulary = vocabularies.find(state, self._plan, self._source.vocabulary)
        if vocabulary:
            self._source.use(vocabulary)
        pairs, empty = self._read_eval()  # a fault in them ends the program before the long part
        train = state.finished(names, self._key)
        wanted = [k for k, name in enumerate(names) if name not in train]
        facts = state.read("reading.json")
        if wanted or not vocabulary or not facts or facts["key"] != self._key:
            with self._folder() as folder:
                vocabulary, reading, rows = self._make(folder, wanted, vocabulary)
            train |= rows
        else:
            reading = sources.Reading(facts["pairs"], facts["empty"])
        if not any(row["pairs"] for row in train.values()):
            raise UserError(
                f"all training pairs have more than --max_tokens={self._args.max_tokens} tokens"
            )
        packed = sum(train[names[k]]["pairs"] for k in wanted)
        splits = {"train": _train_row(train, reading.empty)}
        splits["eval"] = self._write_eval(vocabulary, pairs, empty)
        return self._content(vocabulary, splits), packed

    def _vocabulary_size(self) -> int:
        """The size that the user names, or one that fits the text.

        It is that of WMT, but beside the different characters at most one for each 1,000 characters
        of text: a subword has about four, so that each occurs 250 times, enough to learn it.
        """
        if self._args.vocabulary_size or self._size >= 1000 * _VOCABULARY[1]:
            return self._args.vocabulary_size or _VOCABULARY[1]
        pairs = self._source.read("train", sources.Reading(), lambda size: None)
        counts: collections.Counter[str] = collections.Counter()
        for source, target, *_ in pairs:
            counts.update(source + target)
        size = counts.total() // 1000 + len(counts)
        return min(max(size, _VOCABULARY[0]), _VOCABULARY[1])

    def _folder(self) -> tempfile.TemporaryDirectory:
        """A local folder for the pairs; in the output folder if that is local."""
        above = None
        if "://" not in self._args.out:
            above = os.path.join(self._args.out, "prepare_state")
            for name in os.listdir(above):  # of a run that was killed
                if name.startswith("pairs."):
                    shutil.rmtree(os.path.join(above, name), ignore_errors=True)
        return tempfile.TemporaryDirectory(prefix="pairs.", dir=above)

    def _make(
        self, folder: str, wanted: list[int], vocabulary: Vocabulary | None
    ) -> tuple[Vocabulary, sources.Reading, Summaries]:
        """Reads the training pairs, builds the vocabulary if there is none, makes the shards."""
        self._state.remove_manifest()
        spool = shards.Spool(folder, len(self._names), self._args.seed, wanted)
        sample = None if vocabulary else vocabularies.Sample(self._args.seed)
        reading = self._read(spool, sample)
        if sample:
            size = self._settings["vocabulary_size"]
            vocabulary = vocabularies.build(self._state, self._plan, sample, size)
            self._source.use(vocabulary)
        assert vocabulary is not None
        facts = {"key": self._key, **dataclasses.asdict(reading)}
        self._state.write("reading.json", facts)
        path = ""
        if not self._source.is_ids:
            path = os.path.join(folder, "vocabulary")
            saved = vocabularies.path_of(self._args.out, vocabulary)
            tensorflow().io.gfile.copy(saved, path)
        pairs = (reading.pairs - reading.empty) * len(wanted) // len(self._names)
        return vocabulary, reading, self._write_shards(spool, wanted, path, pairs)

    def _read(self, spool: shards.Spool, sample: vocabularies.Sample | None) -> sources.Reading:
        """Reads the training pairs once: deals them to the shards, and samples them."""
        reading = sources.Reading()
        progress = console.ProgressBar("reading", 0, "pairs", self._size)
        pairs = self._source.read("train", reading, lambda size: progress.add(0, size))
        for source, target, left, right in pairs:
            progress.add(1)
            spool.add(left, right)
            if sample:
                sample.add(source, target)
        spool.flush()
        progress.close()
        if self._source.stamps("train") != self._plan["input"]:
            raise UserError("the training files changed while they were read: start again")
        if reading.pairs == reading.empty:
            raise UserError("the training files hold no pair with text on both sides")
        return reading

    def _write_shards(
        self, spool: shards.Spool, wanted: list[int], vocabulary: str, pairs: int
    ) -> Summaries:
        """Makes the unfinished shards; returns their summaries by name."""
        args, stop = self._args, threading.Event()
        progress = console.ProgressBar("packing", pairs, "pairs")
        workers = max(1, min(args.workers, len(wanted), self._size // _PER_PROCESS))

        def write(number: int) -> dict:
            if stop.is_set():
                raise InterruptedError("another shard failed")
            job = shards.Job(
                spool.path(number), vocabulary, args.length, args.max_tokens, args.seed, number
            )
            result = {"key": self._key, **pool.make(job)}
            name = self._names[number]
            with open(job.records, "rb") as file:
                blocks = iter(lambda: file.read(1 << 20), b"")
                files.write(os.path.join(args.out, name), blocks)
            self._state.write(f"{name}.json", result)
            os.remove(job.pairs)
            os.remove(job.records)
            progress.add(result["pairs"] + result["long"], result["bytes"])
            return result

        with shards.Pool(workers) as pool, pools.Threads(2 * workers) as threads:
            tasks = [threads.submit(write, number) for number in wanted]
            pools.all_done(tasks, stop)
        progress.close()
        return {self._names[k]: task.result() for k, task in zip(wanted, tasks, strict=True)}

    def _read_eval(self) -> tuple[list[tuple[str, str, bytes, bytes]], int]:
        """The evaluation pairs, as `Input.read` yields them, and how many had an empty side."""
        reading = sources.Reading()
        pairs = list(self._source.read("eval", reading, lambda size: None))
        if not pairs:
            raise UserError("the evaluation files hold no pair with text on both sides")
        print(f"eval: {len(pairs):,} pairs", flush=True)
        return pairs, reading.empty

    def _write_eval(
        self, vocabulary: Vocabulary, pairs: list[tuple[str, str, bytes, bytes]], empty: int
    ) -> dict[str, Any]:
        """Writes the records and the raw lines of the evaluation; returns the manifest's row."""
        out = self._args.out
        ids: list[list[list[int]]] = []
        raw: dict[str, list[bytes]] = {SOURCES: [], REFERENCES: []}
        for *texts, left, right in pairs:
            stored = (left, right)
            if self._source.is_ids:
                ids.append([shards.encoder("")(side) for side in stored])
                stored = [text.encode() for text in texts]
            else:
                ids.append([[*vocabulary.encode(text), EOS] for text in texts])
            for file, line in zip(raw, stored, strict=True):
                raw[file].append(line.replace(b"\n", b" ") + b"\n")
        name = records.shard_name(_EVAL, 0, 1)
        result = self._state.summary(name, self._eval_key)
        if not result:
            self._state.remove_manifest()
            rows = (packing.serialize_example({"inputs": a, "targets": b}) for a, b in ids)
            written = records.write_shard(os.path.join(out, name), rows)
            result = {"key": self._eval_key, **written}
            self._state.write(f"{name}.json", result)
        for file, lines in raw.items():
            writing.save(out, file, b"".join(lines))
        tokens = [sum(len(pair[side]) for pair in ids) for side in (0, 1)]
        facts = {
            "pairs": len(ids),
            "tokens": tokens,
            "longest_inputs": max(len(pair[0]) for pair in ids),
        }
        shard = {"name": name, **{key: result[key] for key in writing.FACTS}}
        total = {key: result[key] for key in ("examples", "bytes")}
        left_out = {"empty": empty}
        return {**total, **facts, "left_out": left_out, "shards": [{**shard, **facts}]}

    def _content(self, vocabulary: Vocabulary, splits: dict[str, Any]) -> dict[str, Any]:
        """The content of manifest.json."""
        return {
            "format": 1,
            "kind": "translation",
            "length": self._settings["length"],
            "vocabulary": {
                "file": vocabularies.FILES[vocabulary.kind],
                "kind": vocabulary.kind,
                "size": vocabulary.size,
                "sha256": vocabulary.digest,
            },
            "settings": self._settings,
            "splits": splits,
        }


def _train_row(summaries: Summaries, empty: int) -> dict[str, Any]:
    """The manifest's row of the training split; `empty` pairs were left out."""
    rows = [{"name": name, **row} for name, row in sorted(summaries.items())]
    keys = ("name", *writing.FACTS, "pairs", "tokens", "longest")
    return {
        **{key: sum(row[key] for row in rows) for key in ("examples", "bytes", "pairs")},
        "tokens": [sum(row["tokens"][side] for row in rows) for side in (0, 1)],
        "longest": max(row["longest"] for row in rows),
        "left_out": {"empty": empty, "long": sum(row["long"] for row in rows)},
        "shards": [{key: row[key] for key in keys} for row in rows],
    }
