"""Counts the bytes that an instruction of optimised HLO reads from and writes to the HBM.

Arrays count at the size that they have there, which tiles of the layout fill up. Those in other
memories, `S(1)` and so on in the layout, do not count, nor what stays in a fusion. Of an operand
that is only sliced, or updated in place, the slice counts. The compiler may keep an array on the
chip without saying so, or read one twice: the count is what a program cannot do without.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping

from engine.aot.text import Computation, Instruction

_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_MEMORY = re.compile(r"S\(\d+\)")
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "while", "call", "conditional", "optimization-barrier"),
}
_UNWRITTEN = ("AllocateBuffer", "ConcatBitcast")  # custom calls that move nothing
_SLICES = ("slice", "dynamic-slice", "gather")
_NAMES = ("bitcast", "reshape", "get-tuple-element", "copy", "convert")  # of the same array


def moved(
    instruction: Instruction, inside: Computation, computations: Mapping[str, Computation]
) -> int:
    """Bytes that an instruction of the computation `inside` moves to and from the HBM in one run.

    Operations that run others, such as loops, count as 0: what they run counts by itself.
    """
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done") or instruction.target in _UNWRITTEN:
        return 0
    body = computations.get(instruction.called[0], {}) if instruction.called else {}
    if opcode == "fusion":
        return _of_fusion(instruction, inside, body)
    if opcode == "async-start":
        return sum(moved(inner, body, computations) for inner in body.values())
    if opcode in ("copy-start", "collective-permute-start"):  # (result, operand, context)
        return sum(sizes(instruction.shape)[:2])
    results, operands = sum(sizes(instruction.shape)), _operand_sizes(instruction, inside)
    if opcode in _SLICES:
        return results + _selected(instruction, inside)
    if opcode == "dynamic-update-slice":
        return 2 * sum(operands[1:2])
    if opcode == "scatter":  # in place: the updates are read, and their places read and written
        return sum(operands[1:]) + 2 * sum(operands[2:])
    if opcode.endswith("slice-start"):  # ((operand), result, context)
        *_, result, _ = _ARRAY.findall(instruction.shape)
        return _size(*result) + _size(*result[:2], _MEMORY.sub("", result[2]))
    if opcode.endswith("-start"):  # a collective: (operands, results)
        return results
    return results + sum(operands)


def sizes(shape: str) -> list[int]:
    """The bytes in the HBM of each array of a shape; 0 for one in another memory."""
    return [_size(*found) for found in _ARRAY.findall(shape)]


@functools.lru_cache(100_000)
def _size(kind: str, sides: str, layout: str) -> int:
    order, _, tiling = layout.partition(":")
    if "S(" in tiling and "S(0)" not in tiling:
        return 0
    numbers = [int(side) for side in sides.split(",") if side]
    minor_first = [numbers[int(i)] for i in order.split(",") if i] or numbers[::-1]
    tile = _TILE.search(tiling)
    for i, side in enumerate(reversed(tile[1].split(",")) if tile else ()):
        if i < len(minor_first):
            minor_first[i] = -(-minor_first[i] // int(side)) * int(side)
    bits = 8 if kind == "pred" else int(re.findall(r"\d+", kind)[0])
    return bits * math.prod(minor_first) // 8


def _operand_sizes(instruction: Instruction, inside: Computation) -> list[int]:
    found = [inside[name].shape for name in instruction.operands if name in inside]
    return [sum(sizes(shape)) for shape in found]


def _selected(instruction: Instruction, inside: Computation) -> int:
    """The bytes that a slice or a gather reads: as many as its result has, if they are in HBM."""
    source = inside.get(instruction.operands[0])
    if source is None or not sum(sizes(source.shape)):
        return 0
    return sum(sizes(_MEMORY.sub("", instruction.shape)))


def _of_fusion(fusion: Instruction, inside: Computation, body: Computation) -> int:
    users: dict[str, list[Instruction]] = {}
    for inner in body.values():
        for name in inner.operands:
            users.setdefault(name, []).append(inner)
    total, updates = 0, _updates(body)
    for name, inner in body.items():
        if inner.opcode == "parameter":
            number = int(inner.line.split(" parameter(", 1)[1].split(")", 1)[0])
            outer = inside.get(fusion.operands[number]) if number < len(fusion.operands) else None
            if outer is None or not (whole := sum(sizes(outer.shape))):
                continue
            total += min(whole, _read(name, users, body))
    results = sizes(fusion.shape)
    for i, size in enumerate(results):
        total += min(size, updates[i]) if size and i in updates else size
    return total


def _read(name: str, users: Mapping[str, list[Instruction]], body: Computation) -> int:
    """The bytes that a fusion reads of a parameter: all, or the slices that it takes."""
    total = 0
    for user in users.get(name, []):
        if user.opcode in _SLICES and user.operands[0] == name:
            total += _bare(user.shape)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
            continue  # in place: what it does not write, it does not read
        elif user.opcode in _NAMES and not user.is_root:
            total += _read(user.name, users, body)
        else:
            return _bare(body[name].shape)
    return total


def _updates(body: Computation) -> dict[int, int]:
    """The bytes that are written of those results of a fusion that are updated in place."""
    root = next((inner for inner in body.values() if inner.is_root), None)
    if root is None:
        return {}
    outputs = root.operands if root.opcode == "tuple" else (root.name,)
    found = {}
    for i, name in enumerate(outputs):
        inner = body.get(name)
        while inner and inner.opcode in _NAMES and inner.operands:
            inner = body.get(inner.operands[0])
        if inner and inner.opcode == "dynamic-update-slice":
            update = body.get(inner.operands[1])
            found[i] = _bare(update.shape) if update else 0
    return found


def _bare(shape: str) -> int:
    """Bytes of a shape wherever it is: inside of a fusion memories have no meaning."""
    return sum(sizes(_MEMORY.sub("", shape)))
