"""Devices: the mesh, and moving host batches onto it."""

from __future__ import annotations

import collections
import glob
import itertools
import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from errors import DeviceError

# PCI ids. Google's network cards have its vendor id, too, on every VM of its cloud.
_GOOGLE = "0x1ae0"
_TPUS = ("0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")  # v2/v3, v4, v5p, v5e, v6e, 7x


_IMAGES = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")  # a span of BatchNorm in images, "64/4096"


def check_platform() -> None:
    """Refuses to run on the CPU by accident.

    Raises:
      DeviceError: this machine has a TPU that jax does not use, and JAX_PLATFORMS does not say
        that this is meant.
    """
    said = os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu"
    if said or not (chips := tpu_chips()) or jax.default_backend() != "cpu":
        return
    raise DeviceError(
        f"this machine has {chips} TPU chip(s) but jax runs on the CPU: is another process using "
        "them, or is jax[tpu] not installed (pip install -r requirements-tpu.txt)? Set "
        "JAX_PLATFORMS=cpu to run on the CPU all the same"
    )


def tpu_chips(devices: str = "/sys/bus/pci/devices") -> int:
    """TPU chips that this machine's PCI bus shows, whether or not anything can use them."""
    found = 0
    for folder in glob.glob(f"{devices}/*"):
        try:
            with open(f"{folder}/vendor") as vendor, open(f"{folder}/device") as device:
                found += vendor.read().strip() == _GOOGLE and device.read().strip() in _TPUS
        except OSError:  # a device that was just taken away
            continue
    return found


def make(axes: tuple[str, str], span: int | str, devices: Sequence[Any] | None = None) -> Mesh:
    """All devices as a mesh (devices / group, group).

    Args:
      axes: their names.
      span: the size of a group in devices, 0 for all; or in images, "64/4096": groups that have
        64 of the 4096 images of a forward pass, however many devices that takes.
      devices: those of this run, unless others are given, such as a topology's.

    Raises:
      DeviceError: the devices cannot be cut into such groups.
    """
    count = jax.device_count() if devices is None else len(devices)
    inner = _by_images(span, count) if "/" in str(span) else _by_devices(span, count)
    # Auto is said explicitly: since jax 0.9 the default is Explicit.
    kinds = (AxisType.Auto,) * 2
    return jax.make_mesh((count // inner, inner), axes, axis_types=kinds, devices=devices)


def _by_devices(span: int | str, count: int) -> int:
    """The size of a group for a span in devices, which a recipe may hold as text."""
    inner = int(span) if re.fullmatch(r"-?[0-9]{1,9}", str(span)) else -1
    inner = inner or count
    if inner < 0 or count % inner:
        raise DeviceError(f"config.bn_span={span} does not divide the {count} devices of this run")
    return inner


def _by_images(span: int | str, count: int) -> int:
    """The size of a group for a span in images; `count` devices."""
    images, whole = _images(span)
    groups = whole // images
    if count % groups == 0:
        return count // groups
    parts = groups // math.gcd(groups, count)
    remedy = f"use a multiple of {groups} devices"
    if whole % (parts * count) == 0:
        remedy += (
            f", or {parts} times as many micro-batches (config.gradient_accumulation_steps) with"
            f" config.bn_span={images}/{whole // parts}"
        )
    raise DeviceError(
        f"config.bn_span={span}: {count} devices cannot be {groups} groups of equal size, of"
        f" {images} images each: {remedy}"
    )


def _images(span: int | str) -> tuple[int, int]:
    """Reads "64/4096", or refuses it."""
    match = _IMAGES.fullmatch(str(span))
    images, whole = map(int, match.groups()) if match else (0, 0)
    if images < 1 or whole < 1 or whole % images:
        raise DeviceError(
            f"config.bn_span={span}: write a number of devices, 0 for all, or images of those of a"
            " forward pass such as 64/4096, where the first number divides the second"
        )
    return images, whole


def check_span(span: int | str, batch_size: int, parts: int) -> None:
    """Refuses a span in images that is not of this batch.

    Args:
      span: as for `make`.
      batch_size: global batch.
      parts: micro-batches that each device's share is cut into; a forward pass sees one.

    Raises:
      DeviceError: it is "64/4096", and batch_size / parts is not 4096; or it is no span.
    """
    if "/" not in str(span):
        return
    images, whole = _images(span)
    if whole * parts != batch_size:
        micro = f" / {parts} micro-batches" if parts > 1 else ""
        raise DeviceError(
            f"config.bn_span={span} is of {whole} images, but a forward pass has {batch_size}"
            f"{micro}: write {images}/{batch_size // max(1, parts)}"
        )


def check_batch(mesh: Mesh, key: str, batch_size: int, parts: int = 1) -> None:
    """Refuses a batch that does not divide evenly.

    Args:
      mesh: the run's devices.
      key: the config key that holds the batch size, for the message.
      batch_size: global batch.
      parts: micro-batches that each device's share is cut into.

    Raises:
      DeviceError: `batch_size` is not a positive multiple of devices * parts.
    """
    if batch_size > 0 and batch_size % (mesh.size * parts) == 0:
        return
    unit = mesh.size * parts
    near = max(unit, batch_size // unit * unit)  # also for what is not positive
    micro = f" x {parts} micro-batches" if parts > 1 else ""
    hosts = len({device.process_index for device in mesh.devices.flat})
    raise DeviceError(
        f"config.{key}={batch_size} cannot be divided among {mesh.size} devices{micro} on "
        f"{hosts} host(s): use a multiple of {unit}, such as {near} or {near + unit}"
    )


def num_chips(mesh: Mesh) -> int:
    """Chips under the mesh; TPU v2 and v3 show two devices (cores) per chip."""
    devices = list(mesh.devices.flat)
    where = {(d.process_index, tuple(getattr(d, "coords", (d.id,)))) for d in devices}
    return len(where)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of batches: the first dimension over all devices."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def abstract(tree: Any, sharding: NamedSharding) -> Any:
    """`tree` of arrays or ShapeDtypeStructs as ShapeDtypeStructs that carry `sharding`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def agree(answer: int) -> int:
    """Process 0's answer, on every process."""
    if jax.process_count() == 1:
        return answer
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.asarray(answer)))


def broadcast(value: Any) -> Any:
    """Process 0's `value`, of JSON types, on every process; all must call it."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    text = json.dumps(value).encode()
    length = agree(len(text))
    buffer = np.frombuffer(text.ljust(length)[:length], np.uint8)
    return json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(buffer))))


def any_process(answer: bool) -> bool:
    """Whether any process says so, on every process; all must ask at the same step."""
    if jax.process_count() == 1:
        return answer
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.asarray(answer))))


class Feed:
    """Global batches on the devices, copied ahead of their use.

    A host batch that is the same object as the one before (fake data) is not copied again.
    `waited` counts the seconds in which the next batch was waited for, `copied` those of them
    that went into copies to the devices, `worked` what all threads of this host spent on the
    examples; that is nan if the batches do not say (leaf host_seconds).
    """

    def __init__(self, batches: Iterable[dict[str, np.ndarray]], mesh: Mesh, ahead: int = 2):
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
            yield self._ready.popleft()

    def _fill(self) -> None:
        begun = time.monotonic()
        for batch in itertools.islice(self._batches, self._ahead + 1 - len(self._ready)):
            if batch is not self._last[0]:
                copying = time.monotonic()
                put = {
                    name: jax.make_array_from_process_local_data(self._sharding, value)
                    for name, value in batch.items()
                    if name != "host_seconds"
                }
                self._last = (batch, put)
                self.copied += time.monotonic() - copying
                self.worked += float(np.sum(batch.get("host_seconds", math.nan)))
            self._ready.append(self._last[1])
        self.waited += time.monotonic() - begun
