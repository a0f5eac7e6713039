"""Checksums of what each device holds and computes, for config.check_devices_every.

The programs here add nothing up over the devices: a sum over them depends on their order, and one
faulty device would change the results of all. So healthy devices of one kind agree in every bit.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from engine.accumulation import accumulate
from engine.terms import factors, vjp, weights

AXIS = "device"  # all devices of the run, in the order of its mesh
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}  # by the bytes of an element


def make_state_checksums(mesh: Mesh) -> Any:
    """Returns the jitted function from replicated arrays to checksums u32[devices, arrays]."""

    def on_device(tree: Any) -> jax.Array:
        return _checksums(tree)[None]

    return _jit(mesh, on_device, (PartitionSpec(),), gathered=True)


def make_exchange(mesh: Mesh) -> Any:
    """Returns the jitted function that gives device i the share of device i + 1 of each array."""
    count = mesh.size
    pairs = [((i + 1) % count, i) for i in range(count)]

    def on_device(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), tree)

    return _jit(mesh, on_device, (PartitionSpec(AXIS),), gathered=False)


def make_share_checksums(
    loss: Callable[..., Any],
    mesh: Mesh,
    accumulation: int,
    compiler_options: dict[str, str] | None = None,
) -> Any:
    """Returns the jitted function that differentiates the loss of each device's share alone.

    Its arguments are (seed u32[], step i32[], numbers i32[devices], params, model_state, batch).
    `numbers` are the shares that the devices have; the random key is that of the share, as in the
    train step. BatchNorm's statistics and the weights of the terms are those of the share. The
    result are checksums u32[devices, arrays] of the gradients, the terms and metrics of the loss,
    and the model's new state.
    """
    axes = mesh.axis_names

    def on_device(
        seed: jax.Array, step: jax.Array, numbers: jax.Array, params: Any, state: Any, batch: Any
    ) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), step)
        key = jax.random.fold_in(key, numbers[0])
        if accumulation == 1:
            pullback, *others = vjp(loss, params, state, batch, key)
            outcome = pullback(factors(weights(others[0]), axes)), *others
        else:
            batches = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), batch)
            parts = batches, jax.random.split(key, accumulation)
            outcome = accumulate(loss, axes, params, state, parts)
        return _checksums(outcome)[None]

    shared, everywhere = PartitionSpec(AXIS), PartitionSpec()
    specs = (everywhere, everywhere, shared, everywhere, everywhere, shared)
    return _jit(mesh, on_device, specs, gathered=True, compiler_options=compiler_options)


def judge(votes: Iterable[Mapping[int, bytes]]) -> tuple[list[int], bool]:
    """Which devices are wrong, from votes {device: its value} on several questions.

    A device is wrong where most of the devices with that question have another value.

    Returns:
      (devices, certain). Where no question has a majority, they are all that were asked one whose
      values differ, and nothing is certain.
    """
    wrong, suspects = set(), set()
    for values in votes:
        ((most, count), *_) = collections.Counter(values.values()).most_common(1)
        others = {device for device, value in values.items() if value != most}
        if 2 * count > len(values):
            wrong |= others
        else:
            suspects |= set(values)
    return (sorted(wrong), True) if wrong else (sorted(suspects), False)


def votes_on_shares(passes: Sequence[np.ndarray]) -> list[dict[int, bytes]]:
    """The votes on each share, from checksums [devices, arrays] of several passes.

    In pass k device i computed share i + k.
    """
    count = len(passes[0])
    return [
        {
            (share - k) % count: checksums[(share - k) % count].tobytes()
            for k, checksums in enumerate(passes)
        }
        for share in range(count)
    ]


def _jit(mesh: Mesh, on_device: Any, specs: Any, gathered: bool, **options: Any) -> Any:
    """The jitted `on_device` over `AXIS`; the axes of the run's mesh have the size 1 in it.

    So a loss that averages over them, as BatchNorm over a group, sees its own device only.
    """
    devices, names = mesh.devices.reshape(-1, 1, 1), (AXIS, *mesh.axis_names)
    own = Mesh(devices, names, axis_types=(AxisType.Auto,) * 3)
    shared = PartitionSpec(AXIS)
    mapped = jax.shard_map(on_device, mesh=own, in_specs=specs, out_specs=shared, check_vma=False)
    out = PartitionSpec() if gathered else shared
    return jax.jit(mapped, out_shardings=NamedSharding(own, out), **options)


def _checksums(tree: Any) -> jax.Array:
    return jnp.stack([_checksum(x) for x in jax.tree.leaves(tree)])


def _checksum(x: jax.Array) -> jax.Array:
    """A checksum u32[] of the bits of an array and their places.

    A change of one element always changes it, a change of several with probability 1 - 2^-32: each
    element is mixed by MurmurHash3's finalizer (Appleby), which has an inverse, and the sum modulo
    2^32 does not depend on the order.
    """
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    bits = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.uint32(0)
    for axis, size in enumerate(x.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    mixed = bits ^ (place * jnp.uint32(0x9E3779B1))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)
