"""What a checkpoint holds besides its arrays, the `Manifest`, and notes on how a run differs."""

import itertools
import json
import re
import typing
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.base import Identity
from common.errors import DataError, DeviceError
from common.keys import flat
from common.trees import by_name
from engine import sharding
from engine.plan import Programs, targets_of

_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")  # a SHA-256; messages show 12 digits


class Manifest(TypedDict, total=False):
    """The JSON in STEP/manifest/metadata. A model that was imported lacks what training knows."""

    # What was asked for, by `describe_run`:
    data: dict[str, str]  # the files of each split, in words; their names, sizes and checksums
    benchmark: str  # its name
    config: dict[str, Any]  # every value, nested
    recipe: dict[str, Any]  # which file the config is from, and what was changed
    num_train_examples: int
    norm_examples: int  # that shared BatchNorm's statistics
    gradient_accumulation_steps: int  # the number, also where the config has "auto"
    target_metric: str  # the first of `target_metrics`, which chooses the best checkpoint
    target_metrics: list[str]
    # What the model's numbers mean, by `Benchmark.metadata`; other kinds of models have other keys:
    class_names: list[str]  # of classifiers
    labels: str  # of classifiers: how many labels a picture has, "one" or "several"
    input_spec: dict[str, Any]  # of classifiers: how an image becomes the model's input
    categories: list[Any]  # of detectors: [id, name] of each
    imported: dict[str, Any]  # the file that the weights are from, if another library wrote it
    # What the run has done, by `engine.checkpoint.saver.Saver`:
    init_from: str  # the checkpoint that the first weights are from; "" if they were random
    starts: list[dict[str, Any]]  # by `engine.report.starts.describe_start`
    accepted_data: list[str]  # differences of the data that the user has accepted
    saved: float  # when, in seconds since 1970
    evaluations: list[dict[str, Any]]  # their rows of metrics.jsonl
    # What the arrays are, by `engine.checkpoint.checkpointer.Checkpointer.save`:
    step: int
    tree: dict[str, dict[str, str]]  # by item, by name: "float32[7,7,3,64]"
    checksums: dict[str, dict[str, int | None]]  # CRC-32 of the bytes; see `checksums`
    versions: dict[str, str]  # of the libraries


def describe_run(
    programs: Programs,
    num_examples: int,
    metadata: Mapping[str, Any] | None = None,
    data: Sequence[Identity] = (),
) -> dict[str, Any]:
    """The part of a `Manifest` that stays the same during a run.

    Without `metadata` the benchmark gives them, which opens the data. `data` has the identities
    of the splits.
    """
    settings, benchmark = programs.settings, programs.benchmark
    metrics = [target.metric for target in targets_of(settings, benchmark)]
    metadata = benchmark.metadata if metadata is None else metadata
    return {
        "data": {name: text for split in data for name, text in split.content.items()},
        "benchmark": settings.benchmark,
        "config": dict(settings.config),
        "recipe": dict(settings.origin),
        "num_train_examples": num_examples,
        **describe_batches(programs),
        "target_metric": metrics[0],
        "target_metrics": metrics,
        **metadata,
    }


def describe_batches(programs: Programs) -> dict[str, int]:
    """The part of a `Manifest` that a fit to the memory decides."""
    return {
        "norm_examples": programs.norm_examples,
        "gradient_accumulation_steps": programs.micro_batches,
    }


def check_manifest(manifest: Any) -> None:
    """Raises ValueError if a manifest describes no arrays, or a value is of another type."""
    if not isinstance(manifest, dict) or not {"tree", "checksums"} <= manifest.keys():
        raise ValueError("its manifest describes no arrays")
    for name, annotation in typing.get_type_hints(Manifest).items():
        expected = typing.get_origin(annotation) or annotation
        value = manifest.get(name, expected())
        if expected is not float and not isinstance(value, expected):
            raise ValueError(f"its manifest has {name}: {str(value)[:40]}")


def describe_arrays(tree: Any) -> dict[str, str]:
    """Returns {"params/conv_stem/kernel": "float32[7,7,3,64]", ...}, also for their shapes."""
    return {
        name: f"{np.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"
        for name, x in by_name(tree).items()
    }


def placeholders(description: Mapping[str, str]) -> dict[str, Any]:
    """Returns nested dicts of NumPy arrays with the shapes and dtypes that `describe_arrays` wrote.

    Every array is a view of a single zero, so it takes no memory.
    """
    tree: dict[str, Any] = {}
    for name, text in description.items():
        dtype, _, shape = text.removesuffix("]").partition("[")
        sizes = tuple(map(int, filter(None, shape.split(","))))
        *parents, leaf = name.split("/")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = np.broadcast_to(np.zeros((), jnp.dtype(dtype)), sizes)
    return tree


def array_pieces(x: jax.Array) -> list[np.ndarray]:
    """Returns the bytes uint8[n] of an array's distinct pieces on this process's devices."""
    distinct: dict[str, jax.Array] = {}
    for shard in x.addressable_shards:
        distinct.setdefault(str(shard.index), shard.data)  # the first, which `host_copies` copied
    return [_bytes(data) for data in distinct.values()]


def host_copies(tree: Any) -> dict[str, Any]:
    """Returns {"params/conv_stem/kernel": its value as a NumPy array, ...}.

    The value is None where the array's pieces lie on several processes. On CPUs it is a view: as
    long as it lives, jax copies the array where it would donate it.
    """

    def whole(x: jax.Array | np.ndarray) -> jax.Array | np.ndarray | None:
        if not isinstance(x, jax.Array):
            return x
        # Orbax reads the same piece, whose copy jax keeps, unless each device writes a part.
        piece: jax.Array = x.addressable_shards[0].data if x.is_fully_replicated else x
        if not piece.is_fully_addressable:
            return None
        piece.copy_to_host_async()
        return piece

    arrays = {name: whole(x) for name, x in by_name(tree).items()}
    return {name: None if x is None else np.asarray(x) for name, x in arrays.items()}


def checksums(copies: dict[str, Any]) -> dict[str, int | None]:
    """Returns {"params/conv_stem/kernel": CRC-32 of its bytes, ...} of `host_copies`.

    Takes them out of `copies` one by one, so that jax need not copy an array to donate it. The
    checksum is None where the copy is.
    """
    taken = ((name, copies.pop(name)) for name in [*copies])
    return {name: None if x is None else zlib.crc32(_bytes(x)) for name, x in taken}


def _bytes(x: Any) -> Any:
    """The bytes uint8[n] of an array in the memory of a host or device; a view where it can be."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def array_differences(saved: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each array that differs between two results of `describe_arrays`."""
    for name in sorted(saved.keys() | wanted.keys()):
        have, want = saved.get(name, "nothing"), wanted.get(name, "nothing")
        if have != want:
            yield f"{name}: the checkpoint has {have}, the config wants {want}"


class OtherData(DataError):
    """The data have other classes, or another vocabulary, than the model knows."""


def compare_data(
    programs: Programs, manifest: Mapping[str, Any], source: str, data: Sequence[Identity]
) -> tuple[list[str], list[str]]:
    """Compares a run's data, the identities of the splits that it needs, with a checkpoint's.

    `source` is the checkpoint's folder. Returns (a line for each value that means something else,
    notes, also on files that have changed); OtherData unless `config.accept_other_data` is set.
    """
    lines = [line for split in data for line in other_meaning(manifest, split.meaning)]
    lines = [*dict.fromkeys(lines)]
    # Other libraries name the classes otherwise: "tench" where the records have "n01440764".
    accepted = programs.settings.accept_other_data or "imported" in manifest
    recipe = "" if programs.settings.origin else "--config=RECIPE "  # a report needs none
    flag = f"{recipe}--config.accept_other_data=True{data[0].hint if data else ''}"
    notes = refuse_other_data(lines, source, "" if accepted else flag)
    saved = manifest.get("data", {})
    for what, text in ((k, v) for split in data for k, v in split.content.items()):
        if saved.get(what, text) != text:
            change = f"{what} before: {saved[what]}; now: {text}"
            notes.append(f"the data have changed since {source}: {change}")
    return lines, notes


def refuse_other_data(lines: Sequence[str], source: str, flag: str) -> list[str]:
    """Returns the `lines` of `other_meaning` as notes; OtherData if there are any and a `flag`.

    `flag` is what the user may give to accept them; "" where it was given.
    """
    if lines and flag:
        raise OtherData(
            f"{source} was trained on other data: {'; '.join(lines)}. Its numbers would mean "
            "something else: give the data that it was trained on, or go on knowingly with " + flag
        )
    return [f"{source} was trained on other data: {line}" for line in lines]


def other_meaning(manifest: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each value of `now`, an `Identity.meaning`, that differs from the manifest's.

    Of lists, such as the names of classes, the line shows the first entry that differs.
    """

    def shown(value: Any) -> str:
        return "nothing" if value is None else _DIGEST.sub(r"\1...", repr(value))

    def named(value: Any) -> Any:
        """A list without the empty names at its end."""
        if not isinstance(value, list):
            return value
        return value[: max((i + 1 for i, name in enumerate(value) if name != ""), default=0)]

    lines = []
    for key, value in json.loads(json.dumps(now)).items():
        old, value = named(manifest.get(key)), named(value)
        if not old or not value or old == value:  # imported models know no names
            continue
        if isinstance(old, list) and isinstance(value, list):
            pairs = [*itertools.zip_longest(old, value)]
            other = [i for i, (before, after) in enumerate(pairs) if before != after]
            sizes = "" if len(old) == len(value) else f"; {len(old):,} then, {len(value):,} now"
            key = f"entry {other[0]} of {key} ({len(other)} differ{sizes})"
            old, value = pairs[other[0]]
        lines.append(f"{key}: {shown(old)} in the checkpoint, {shown(value)} in the data")
    return lines


def changed_settings(
    programs: Programs, manifest: Mapping[str, Any], num_examples: int, model_state: Any
) -> list[str]:
    """Notes about what was asked for otherwise when the checkpoint of a `manifest` was written."""
    now = {"config": programs.settings.config, "num_train_examples": num_examples}
    notes = changes({key: manifest[key] for key in now}, now)
    if programs.settings.gradient_accumulation_steps == "auto":  # not found yet
        return notes
    note = norm_change(programs, manifest.get("norm_examples"), model_state)
    return notes + [note] * bool(note)


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each key that differs between two trees of JSON values."""
    old, new = flat(then), flat(json.loads(json.dumps(now)))
    return [
        f"{key} was {old.get(key)!r}, is now {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def norm_change(programs: Programs, then: int | None, model_state: Any) -> str:
    """How BatchNorm's batches differ from batches of `then` examples; "" if they do not."""
    statistics = [x for x in jax.tree.leaves(model_state) if x.dtype != jnp.int32]
    if then in (None, programs.norm_examples) or not statistics:
        return ""
    unit, per_pass = programs.benchmark.unit, programs.examples_per_pass
    try:
        sharding.group_size(f"{then}/{per_pass}", programs.mesh.size)
        fix = f"--config.bn_span={then}/{per_pass} keeps {then}"
    except DeviceError as error:
        fix = str(error)
    return (
        f"BatchNorm averaged over {then} {unit} before and averages over {programs.norm_examples} "
        f"now, which changes the loss a little: {fix}"
    )
