"""Estimates how long the collectives of a compiled TPU program take on the links of its slice.

The model is the one of the scaling book (jax-ml.github.io/scaling-book, "TPUs" and "Sharding"): a
ring per axis of the torus, a share of the data for each, and about 1 us per hop. An axis has links
in both directions; a ring can use both only where the ends of the axis are joined too. All-gather,
reduce-scatter and (twice) all-reduce are limited by what a chip receives, all-to-all by the
links across the middle of the longest axis, a permute by the link that most of its routes share.
The two profiles that the book shows, an all-gather of 34 MB and of 131 kB over 4 chips of v5e, took
1.3 and 1.6 times the estimate.

The compiler of TPUs writes how many rings it uses. It wraps collectives: in a fusion, an all-reduce
of which each device keeps a part, or an all-gather in pieces beside other operations (v5e); in a
call that runs on the SparseCore (tpu7x).

Left out: traffic of other collectives at the same time, twisted tori, links between slices.
"""

import collections
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from engine.forecast import hlo
from engine.forecast.topology import Topology

_WRAPPERS = ("fusion", "async-start", "call-start")
_HOP = 1e-6  # seconds; the scaling book: "typically around 1us"
_FULL = {"v2": 16, "v3": 32, "v5e": 16, "v6e": 16}  # sides of the pods; only these are joined

_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}")
_AXIS = re.compile(r"('[^']*'|\w+)(?:=(\d+)|:\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_RINGS = re.compile(r"\{colors:(\d+) ")
_STARTS = "AsyncCollectiveStart"  # the custom call that begins an all-gather in pieces
_PIECE = '"async_collective_fusion_config"'

Coordinates = Sequence[tuple[int, ...]]  # of each device: its chip's in the grid, then its core


class Collective(NamedTuple):
    """One run of a collective on one device."""

    kind: str  # its opcode, without "-start"; "reduce-scatter" also if the text has an all-reduce
    devices: int  # that take part with each other
    sent: int  # bytes that this device sends, if no data pass through it
    seconds: float  # on the links, alone
    is_asynchronous: bool  # whether the device computes meanwhile


def read(
    instruction: hlo.Instruction,
    inside: hlo.Computation,
    computations: Mapping[str, hlo.Computation],
    topology: Topology,
    coordinates: Coordinates | None = None,
) -> Collective | None:
    """The collective that an instruction of the computation `inside` runs; None if it runs none.

    Each counts once, with the instruction that starts it: not again with those of the computations
    that a fusion or an asynchronous start calls. `coordinates` are those of the devices
    in the order of the program's device assignment, `(*device.coords, device.core_on_chip)`; by
    default, the order in which jax lists the devices of the slice.
    """
    inner, body = instruction, {}
    if instruction.opcode in _WRAPPERS and instruction.called:
        body = computations.get(instruction.called[0], {})
        inner = next((x for x in body.values() if _kind(x) in hlo.COLLECTIVES), instruction)
    kind = _kind(inner)
    starts_pieces = any(x.target == _STARTS for x in body.values())
    if kind not in hlo.COLLECTIVES or (_PIECE in inner.line and not starts_pieces):
        return None
    at = coordinates or device_coordinates(topology)
    size = hlo.result_bytes(inner)
    is_asynchronous = starts_pieces or _is_overlapped(instruction, inside)
    if kind == "collective-permute":
        seconds = _permute(_pairs(inner.line), size, at, topology)
        return Collective(kind, 2, size, seconds, is_asynchronous)
    groups = replica_groups(inner.line, len(at))
    devices = max(map(len, groups))
    if kind == "reduce-scatter":
        size *= devices
    elif kind == "all-reduce" and "all-reduce-scatter" in instruction.line:
        kind = "reduce-scatter"
    rings = _RINGS.search(instruction.line)
    limit = int(rings[1]) if rings else None
    return Collective(
        kind=kind,
        devices=devices,
        sent=size * (devices - 1) // devices * (2 if kind == "all-reduce" else 1),
        seconds=max(_seconds(kind, size, [at[i] for i in g], topology, limit) for g in groups),
        is_asynchronous=is_asynchronous,
    )


def device_coordinates(topology: Topology) -> list[tuple[int, ...]]:
    """The coordinates of the devices in jax's order: host by host, and of a host chip by chip."""
    shape = topology.shape + (1,) * (3 - len(topology.shape))
    host = [math.gcd(side, 2) for side in shape[:2]] + [1]
    hosts = itertools.product(*(range(0, side, of) for side, of in zip(shape, host, strict=True)))
    return [
        (*(corner + chip for corner, chip in zip(corner, chip, strict=True)), core)
        for corner in sorted(hosts, key=lambda corner: corner[::-1])
        for chip in sorted(itertools.product(*map(range, host)), key=lambda chip: chip[::-1])
        for core in range(topology.chip.devices)
    ]


# What the text says.


def replica_groups(line: str, devices: int) -> list[list[int]]:
    """The groups of devices of a collective, by their numbers in the device assignment.

    HLO has three spellings: a list, `{{0,1},{2,3}}`; a reshaped and transposed range,
    `[4,2]<=[2,4]T(1,0)`; axes of a mesh, `mesh['a'=2,'b'=4] {'b'}`.
    """
    if mesh := _MESH.search(line):
        return _groups_of_axes(*mesh.groups())
    if match := _LISTED.search(line):
        groups = [list(map(int, g.split(","))) for g in re.findall(r"\{([\d,]+)\}", match[1])]
        return groups or [list(range(devices))]
    match = _IOTA.search(line)
    return _range(match).tolist() if match else [list(range(devices))]


def _range(match: re.Match[str]) -> np.ndarray:
    """The array of `[4,2]<=[2,4]T(1,0)`."""
    shape, sides, order = (_numbers(part) for part in match.groups())
    numbers = np.arange(math.prod(sides)).reshape(sides)
    return numbers.transpose(order or range(len(sides))).reshape(shape)


def _groups_of_axes(mesh: str, order: str | None, chosen: str) -> list[list[int]]:
    sides = {name: int(side) for name, side, _, _ in _AXIS.findall(mesh)}
    iota = _IOTA.search(order or "")
    flat = _range(iota).ravel() if iota else np.array(_numbers(order))
    # An axis may take part in pieces: 'a':(2)4 is the piece of 4 that follows a piece of 2.
    pieces: dict[str, list[tuple[int, int]]] = {name: [] for name in sides}
    for name, _, before, size in _AXIS.findall(chosen):
        pieces[name].append((int(before or 1), int(size or sides[name])))
    split, varying = [], []
    for name, side in sides.items():
        done = 1
        for before, size in sorted(pieces[name]):
            split += [before // done, size]
            varying.append(len(split) - 1)
            done = before * size
        split.append(side // done)
    array = (flat if order else np.arange(math.prod(sides.values()))).reshape(split)
    array = np.moveaxis(array, varying, range(-len(varying), 0))
    return array.reshape(-1, math.prod(split[i] for i in varying)).tolist()


def _numbers(text: str | None) -> list[int]:
    return [int(part) for part in (text or "").split(",") if part]


def _pairs(line: str) -> list[tuple[int, int]]:
    match = _PAIRS.search(line)
    pairs = re.findall(r"(\d+),(\d+)", match[1]) if match else []
    return [(int(source), int(target)) for source, target in pairs]


def _kind(instruction: hlo.Instruction) -> str:
    return instruction.opcode.removesuffix("-start")


def _is_overlapped(start: hlo.Instruction, inside: hlo.Computation) -> bool:
    """Whether the core has work between the start of an operation and its end."""
    if not start.opcode.endswith("-start"):
        return False
    after = itertools.islice(inside.values(), list(inside).index(start.name) + 1, None)
    between = itertools.takewhile(lambda x: start.name not in x.operands, after)
    return any("estimated_cycles" in x.line or x.opcode == "while" for x in between)


# What the links allow.


class _Axis(NamedTuple):
    """An axis of the grid along which the chips of a group lie."""

    chips: int  # of the group, side by side along it
    rate: float  # bytes/s that a chip receives along it
    hops: int  # to the farthest chip


def _seconds(
    kind: str, size: int, group: Coordinates, topology: Topology, rings: int | None
) -> float:
    """The seconds of a collective other than a permute in one group.

    `size` is the whole array's in bytes: after gathering, or before scattering; of an all-to-all,
    what each device has.
    """
    chips = sorted({at[:-1] for at in group})
    passes = 2 if kind == "all-reduce" else 1
    if len(chips) == 1:  # in the memory that they share
        return passes * size * (len(group) - 1) / len(group) / topology.chip.bandwidth
    cores = len(group) // len(chips)
    axes = _axes(chips, topology, topology.chip.devices // cores)
    delay = _HOP * sum(axis.hops for axis in axes)
    if kind == "all-to-all":
        return delay + max(
            size * cores * (a.chips // 2) * -(-a.chips // 2) / a.chips / a.rate for a in axes
        )
    rate = sum(axis.rate for axis in axes)
    if rings:
        rate = min(rate, rings * topology.chip.link)
    return passes * (delay + size * (len(group) - 1) / len(group) / rate)


def _axes(chips: Coordinates, topology: Topology, sharing: int) -> list[_Axis]:
    """The axes that chips span; so many such groups at the same chips share the links."""
    axes = []
    for axis, side in enumerate(topology.shape):
        values = sorted({chip[axis] for chip in chips})
        if (count := len(values)) > 1:
            # Groups that lie between the chips of this one use the same links.
            step = min(b - a for a, b in itertools.pairwise(values))
            is_ring = _is_ring(topology, axis) and count * step == side
            rate = topology.chip.link * (2 if is_ring else 1) / step / sharing
            axes.append(_Axis(count, rate, step * (count // 2 if is_ring else count - 1)))
    if math.prod(axis.chips for axis in axes) != len(chips):  # no grid: as if in one line
        return [_Axis(len(chips), topology.chip.link / sharing, len(chips) - 1)]
    return axes


def _is_ring(topology: Topology, axis: int) -> bool:
    """Whether the ends of an axis of a slice are joined."""
    if topology.chip.name in _FULL:
        return topology.shape[axis] == _FULL[topology.chip.name]
    return all(side % 4 == 0 for side in topology.shape)  # whole cubes of optical switches


def _permute(
    pairs: Sequence[tuple[int, int]], size: int, at: Coordinates, topology: Topology
) -> float:
    """The seconds in which each source sends `size` bytes, one axis after the other."""
    loads: collections.Counter[tuple[tuple[int, ...], int, int]] = collections.Counter()
    farthest = 0
    for source, target in pairs:
        chip, hops = list(at[source][:-1]), 0
        for axis, side in enumerate(topology.shape):
            way = at[target][axis] - chip[axis]
            if _is_ring(topology, axis) and abs(way) > side / 2:
                way -= math.copysign(side, way)
            for _ in range(int(abs(way))):
                direction = 1 if way > 0 else -1
                loads[tuple(chip), axis, direction] += 1
                chip[axis] = (chip[axis] + direction) % side
                hops += 1
        farthest = max(farthest, hops)
    if not loads:  # between the cores of a chip
        return size / topology.chip.bandwidth if any(a != b for a, b in pairs) else 0.0
    return farthest * _HOP + size * max(loads.values()) / topology.chip.link
