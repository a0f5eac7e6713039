"""Arranges the devices as a mesh, and moves batches and values between hosts and devices.

A span of BatchNorm's statistics may be a number of devices, or a part of the images of a forward
pass: config.bn_span='64/4096' is as many devices as have 64 of the 4096 images. At the end are the
TPUs and GPUs of this machine: how many there are, and why jax cannot open or use them.
"""

import collections
import glob
import importlib.metadata
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
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from common.errors import DeviceError, one_line

# PCI ids. Google's network cards have its vendor id, too, on every VM of its cloud.
_GOOGLE = "0x1ae0"
_TPUS = ("0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")  # v2/v3, v4, v5p, v5e, v6e, 7x

_NVIDIA_DRIVER = "/proc/driver/nvidia"
_CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_INSTALL_CUDA = "bash scripts/setup.sh cuda && . .venv/bin/activate"


def make(axes: tuple[str, str], span: int | str, devices: Sequence[Any] | None = None) -> Mesh:
    """Arranges devices as a mesh (devices / group, group); a group shares BatchNorm's statistics.

    `span` gives the size of a group, see `group_size`. Without `devices` it takes all of the run.
    """
    count = jax.device_count() if devices is None else len(devices)
    group = group_size(span, count)
    kinds = (AxisType.Auto,) * 2  # since jax 0.9 the default is Explicit
    return jax.make_mesh((count // group, group), axes, axis_types=kinds, devices=devices)


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
    images, total = _parse_image_span(span)
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
    images, total = _parse_image_span(span)
    rest = batch_size // max(1, parts)
    if total != rest > 0 and rest * parts == batch_size:  # else `check_batch` refuses it
        micro = f" / {parts} micro-batches" if parts > 1 else ""
        nearest = max(n for n in range(1, min(images, rest) + 1) if rest % n == 0)
        raise DeviceError(
            f"config.bn_span={span} is a part of {total} images, but a forward pass has "
            f"{batch_size}{micro}: write {nearest}/{rest}"
        )


def _parse_image_span(span: str) -> tuple[int, int]:
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


def any_process(answer: bool) -> bool:
    """Returns whether `answer` is true on any process; all must call this at the same step."""
    return bool(np.any(multihost_utils.process_allgather(np.asarray(answer))))


class Feed:
    """Copies global batches to the devices before the step needs them.

    A host batch that is the same object as the last one (fake data) is not copied again.

    The loop waited `waited` seconds for batches; `copied` of them went into copies to the devices.
    All threads of this host `worked` so many seconds on the examples, from the leaf host_seconds of
    the batches; nan if they have no such leaf.
    """

    def __init__(self, batches: Iterable[dict[str, np.ndarray]], mesh: Mesh, ahead: int = 2):
        """Reads `batches`, of arrays [h, ...], and keeps `ahead` of them on the devices."""
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


# --- The devices of this machine.


def open_platform() -> str:
    """Opens jax's devices and returns the name of their platform; DeviceError if that fails."""
    try:
        return jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # the latter without a GPU
        reason = one_line(error) if str(error) else "it finds none"
        reason = reason.split(" (set JAX_PLATFORMS")[0].rstrip(".")
        raise DeviceError(
            f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}: jax cannot open these devices "
            f"({reason}): is another process using them, or is jax for them not installed (bash "
            "scripts/setup.sh tpu, or cuda)? JAX_PLATFORMS=cpu runs on the CPU"
        ) from None  # that another host is lost is not the reason


def check_platform() -> None:
    """Raises DeviceError on the CPU of a machine with TPUs, unless JAX_PLATFORMS=cpu is set."""
    platform, wanted = open_platform(), os.environ.get("JAX_PLATFORMS", "").split(",")[0]
    if wanted != "cpu" and platform == "cpu" and (chips := tpu_chips()):
        raise DeviceError(
            f"this machine has {chips} TPU chip(s) but jax runs on the CPU: is another process "
            "using them, or is jax[tpu] not installed (bash scripts/setup.sh tpu)? Set "
            "JAX_PLATFORMS=cpu to run on the CPU all the same"
        )


def tpu_chips() -> int:
    """Counts the TPU chips on this machine's PCI bus, whether or not a process can use them."""
    chips = 0
    for folder in glob.glob("/sys/bus/pci/devices/*"):
        try:
            with open(f"{folder}/vendor") as vendor, open(f"{folder}/device") as device:
                chips += vendor.read().strip() == _GOOGLE and device.read().strip() in _TPUS
        except OSError:  # the device was removed a moment ago
            continue
    return chips


def count_gpus(driver: str = _NVIDIA_DRIVER) -> int:
    """Counts the GPUs that the driver has found, whether or not a process can use them."""
    return len(glob.glob(f"{driver}/gpus/*"))


def gpu_obstacle(driver: str = _NVIDIA_DRIVER) -> tuple[str, str]:
    """Why jax cannot use the GPUs of this machine, and what to do; ("", "") if nothing is known."""
    number = count_gpus(driver)
    is_unwanted = os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu"
    if not number or is_unwanted or any(map(installed_version, _CUDA_PLUGINS)):
        return "", ""
    gpus = f"{number} NVIDIA GPU{'s' * (number > 1)}"
    return f"this machine has {gpus}, but jax is installed without CUDA", _INSTALL_CUDA


def installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def explain_full_memory(error: BaseException | None) -> DeviceError | None:
    """The mistake that the user can fix, if `error` or one of its causes is a full memory."""
    while error is not None:
        is_of_device = isinstance(error, jax.errors.JaxRuntimeError)
        if is_of_device and str(error).startswith("RESOURCE_EXHAUSTED"):
            who = "; nvidia-smi shows what else uses the GPU" * (jax.default_backend() == "gpu")
            return DeviceError(
                f"the memory of a device is full ({one_line(error)}): use a smaller "
                "--config.train_batch_size, or --config.gradient_accumulation_steps=2 for the same "
                f"batch in parts; --mode=preflight forecasts the memory of TPUs{who}"
            )
        error = error.__cause__
    return None
