"""Arranges the devices as a mesh, shards arrays over it, and shares values between the hosts.

The second axis of the mesh is the group of cross-replica (synchronised) BatchNorm, which other
programs name by the `axis_index_groups` of `jax.lax.pmean`. Its size, config.bn_span, is a number
of devices, or '64/4096', as many devices as have 64 of the 4096 images of a forward pass.
"""

import collections
import functools
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from common.errors import DeviceError


def make(axes: tuple[str, str], span: int | str, devices: Sequence[Any] | None = None) -> Mesh:
    """Arranges devices as a mesh (devices / group, group); a group shares cross-replica BatchNorm.

    `span` gives the size of a group, see `group_size`. Without `devices` it takes all of the run.
    """
    count = jax.device_count() if devices is None else len(devices)
    group = group_size(span, count)
    types = (AxisType.Auto,) * 2
    return jax.make_mesh((count // group, group), axes, axis_types=types, devices=devices)


def group_size(span: int | str, count: int) -> int:
    """Converts a span of BatchNorm's statistics to a number of devices, of `count` in the run.

    The span is a number of devices (it may be text), 0 for all devices; or a part of the images of
    a forward pass, such as "64/4096".
    """
    if "/" in str(span):
        return _image_group_size(str(span), count)
    size = int(span) if re.fullmatch(r"-?[0-9]{1,9}", str(span)) else -1
    size = size or count
    if size < 0 or count % size:
        sizes = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise DeviceError(
            f"config.bn_span={span} does not divide the {count} devices of this run; use one of "
            f"{sizes}, or 0 for all devices"
        )
    return size


def _image_group_size(span: str, count: int) -> int:
    """Converts a span such as "64/4096" to a number of devices, of `count` in the run."""
    images, total = parse_image_span(span)
    groups = total // images
    if count % groups == 0:
        return count // groups
    fix = f"use a multiple of {groups} devices"
    parts = groups // math.gcd(groups, count)
    if total % (parts * count) == 0:
        fix += (
            f", or {parts} times as many micro-batches (config.gradient_accumulation_steps) with"
            f" config.bn_span={images}/{total // parts}"
        )
    raise DeviceError(
        f"config.bn_span={span}: {count} devices cannot be {groups} groups of equal size, of"
        f" {images} images each: {fix}"
    )


def check_image_span(span: str, batch_size: int, parts: int) -> None:
    """Raises DeviceError for a span such as "64/4096" if a forward pass does not have 4096 images.

    A global batch of `batch_size` has `parts` micro-batches, each of which is one forward pass.
    """
    images, total = parse_image_span(span)
    per_pass = batch_size // max(1, parts)
    if total != per_pass > 0 and per_pass * parts == batch_size:  # else `check_batch` refuses it
        micro = f" / {parts} micro-batches" if parts > 1 else ""
        nearest = max(n for n in range(1, min(images, per_pass) + 1) if per_pass % n == 0)
        raise DeviceError(
            f"config.bn_span={span} is a part of {total} images, but a forward pass has "
            f"{batch_size}{micro}: write {nearest}/{per_pass}"
        )


def parse_image_span(span: str) -> tuple[int, int]:
    """Parses "64/4096" into (64, 4096)."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", span)
    images, total = map(int, match.groups()) if match else (0, 0)
    if images < 1 or total < 1 or total % images:
        raise DeviceError(
            f"config.bn_span={span}: write a number of devices, 0 for all devices, or a part of the"
            " images of a forward pass such as 64/4096, where the first number divides the second"
        )
    return images, total


def check_batch(mesh: Mesh, key: str, batch_size: int, parts: int = 1) -> None:
    """Raises DeviceError if a global batch is not a positive multiple of devices * parts.

    `key` is the config key of the batch size, for the message. Each device's share is cut into
    `parts` micro-batches.
    """
    unit = mesh.size * parts
    if batch_size > 0 and batch_size % unit == 0:
        return
    near = max(unit, batch_size // unit * unit)
    micro = f" x {parts} micro-batches" if parts > 1 else ""
    hosts = len({device.process_index for device in mesh.devices.flat})
    raise DeviceError(
        f"config.{key}={batch_size} cannot be divided among {mesh.size} devices{micro} on "
        f"{hosts} host(s): use a multiple of {unit}, such as {near} or {near + unit}"
    )


def num_chips(mesh: Mesh) -> int:
    """Counts the chips of a mesh; TPU v2, v3 and 7x have two devices (cores) per chip."""
    devices = mesh.devices.flat
    return len({(d.process_index, tuple(getattr(d, "coords", (d.id,)))) for d in devices})


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that every device holds completely."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: the first dimension is cut over all devices."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def abstract(tree: Any, sharding: NamedSharding) -> Any:
    """Converts a tree of arrays or ShapeDtypeStructs to ShapeDtypeStructs with `sharding`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def broadcast(value: Any) -> Any:
    """Returns process 0's `value`, which has JSON types, on every process; all must call this."""
    if jax.process_count() == 1:
        return value
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.asarray(len(text))))
    text = multihost_utils.broadcast_one_to_all(np.resize(text, length))
    return json.loads(bytes(np.asarray(text)))


def largest_of_processes(value: float) -> float:
    """The largest `value` of all processes, in float32; all must call this."""
    if jax.process_count() == 1:
        return value
    return float(np.max(multihost_utils.process_allgather(np.float32(value))))


def any_process(answer: bool) -> bool:
    """Returns whether `answer` is true on any process; all must call this at the same step."""
    return bool(np.any(multihost_utils.process_allgather(np.asarray(answer))))


def ask_processes(
    mesh: Mesh, answers: Callable[[], tuple[bool, ...]]
) -> Callable[[], Sequence[bool]]:
    """Asks which of the `answers` are true on any process, without waiting.

    All must call this at the same step. The function that it returns waits for the programs that
    were dispatched before, and returns the same on every process. One process answers when it is
    called.
    """
    if jax.process_count() == 1:
        return answers
    result = _any(mesh)(_spread(mesh, answers()))
    return lambda: np.asarray(result.addressable_data(0)).tolist()


@functools.cache
def _any(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: jnp.any(x, axis=0), out_shardings=replicated(mesh))


@functools.cache
def _spread(mesh: Mesh, answers: tuple[bool, ...]) -> jax.Array:
    """This process's answers on each of its devices, bool[devices, answers]."""
    local = np.tile(np.asarray(answers), (jax.local_device_count(), 1))
    return jax.make_array_from_process_local_data(batch_sharding(mesh), local)


class Feed:
    """Prefetches global batches, of arrays [b, ...] sharded over all devices.

    A host batch that is the same object as the last one (fake data) is not copied again.

    The loop waited `waited` seconds for batches; `copied` of them went into copies to the devices.
    A copy begins `ahead` batches before its step, so only a run that is bound by copies waits here.
    All threads of this host `worked` so many seconds on the examples, from the leaf host_seconds of
    the batches; nan if they have no such leaf.
    """

    def __init__(self, batches: Iterable[dict[str, np.ndarray]], mesh: Mesh, ahead: int = 2):
        """Reads `batches`, this host's arrays [h, ...]; keeps `ahead` of them on the devices."""
        self.waited = self.copied = self.worked = 0.0
        self._batches = iter(batches)
        self._sharding = batch_sharding(mesh)
        self._ahead = ahead
        self._ready: collections.deque[dict[str, jax.Array]] = collections.deque()
        self._last: tuple[Any, Any] = (None, None)

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        while True:
            self._fill()
            if not self._ready:
                return
            batch, start = self._ready.popleft(), time.monotonic()
            jax.block_until_ready(batch)  # a copy to a TPU or GPU goes on after its call
            seconds = time.monotonic() - start
            self.waited += seconds
            self.copied += seconds
            yield batch

    def _fill(self) -> None:
        start = time.monotonic()
        for batch in itertools.islice(self._batches, self._ahead + 1 - len(self._ready)):
            if batch is not self._last[0]:
                copy_start = time.monotonic()
                copy = {
                    name: jax.make_array_from_process_local_data(self._sharding, value)
                    for name, value in batch.items()
                    if name != "host_seconds"
                }
                self._last = (batch, copy)
                self.copied += time.monotonic() - copy_start
                self.worked += float(np.sum(batch.get("host_seconds", math.nan)))
            self._ready.append(self._last[1])
        self.waited += time.monotonic() - start
