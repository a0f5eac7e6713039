"""What each operation of a compiled program costs, from its optimised HLO text.

The TPU's compiler writes its own estimate, `"estimated_cycles":"N"`, into the backend config of
most instructions that run on the cores. Sorts, gathers, scatters and Pallas kernels have none and
count by the bundles of instructions that they issue; collectives have none either. Instructions
inside fusions have none: the fusion has it.

Bytes are what an instruction reads from and writes to the HBM. Arrays count at the size that
they have there, which tiles of the layout fill up. Those in other memories, `S(1)` and so on in the
layout, do not count, nor what stays in a fusion. Of an operand that is only sliced, or updated in
place, the slice counts. The compiler may keep an array on the chip without saying so, or read one
twice: the count is what a program cannot do without.

FLOPs are those of convolutions and matrix products. A multiplication and an addition are two;
padding does not count.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from engine.forecast import collectives, hlo
from engine.forecast.hlo import Computation, Computations, Instruction
from engine.forecast.topology import Topology

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_RUNS = {"while", "call", "conditional"}  # their callees have cycles of their own
_KERNEL = "tpu_custom_call"  # what a Pallas kernel becomes
_RANDOM = "rng-bit-generator"
_BODY = re.compile(r'"body":\s*"([^"]*)"')
_WITHOUT_TRAFFIC = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "partition-id", "replica-id", "while", "call", "conditional", "optimization-barrier",
}  # fmt: skip
_UNWRITTEN = ("AllocateBuffer", "ConcatBitcast")  # custom calls that move nothing
_SLICES = ("slice", "dynamic-slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # in place; which operand is written
_SAME_ARRAY = ("bitcast", "reshape", "get-tuple-element", "copy", "convert")  # of the same array
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
_GROUPS = re.compile(r"\b(feature|batch)_group_count=(\d+)")
_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")


@dataclasses.dataclass(frozen=True)
class Operation:
    """What one instruction costs one device, in one of the `times` that a program runs it."""

    name: str
    opcode: str
    scopes: str  # its path of scopes, which jax calls op_name
    place: str  # "FILE:LINE" of the user's code, or ""
    times: float  # how often a run of the program runs it
    flops: int
    bf16_flops: float  # FLOPs of bfloat16 that take as long: half of int8's or fp8's on some chips
    moved: int  # bytes to and from the HBM
    cycles: int | None  # by the compiler; None where it gives no estimate
    seconds: float
    # "sort", "gather", "scatter" or "kernel" (of Pallas, or random bits): without cycles; or "".
    kind: str = ""
    bundles: int | None = None  # of instructions, which it issues; None if that is not known
    unknown_loops: int = 0  # loops of these bundles that have an unknown length; each counts once
    link_seconds: float = 0.0  # of a collective on the links, alone; `seconds` of it may be hidden


@dataclasses.dataclass(frozen=True)
class Operations:
    """The operations of a program, without those that cost nothing."""

    all: tuple[Operation, ...]
    collectives: dict[str, tuple[float, float]]  # kind: (how many, bytes that a device sends)
    unknown_loops: int  # how many loops have an unknown number of trips; each counts once
    branches: int  # how many conditionals, whose branches all count as equally likely


def read(
    text: str,
    topology: Topology,
    bundles: Mapping[str, Sequence[int]],
    coordinates: collectives.Coordinates | None = None,
) -> Operations:
    """The operations of a program that was compiled for a slice; ValueError if it is no HLO.

    `bundles` are those of `kernels.read_bundles`. libtpu compiles equal operations once; the others
    have the same number. `coordinates` are those of `collectives.read`.
    """
    computations, entry = hlo.parse_computations(text)
    places, unknown, branches = hlo.Places(text), 0, 0
    found: list[tuple[Operation, str]] = []
    sums: dict[str, tuple[float, float]] = {}
    waiting = [(entry, 1, 1.0)]
    while waiting:
        name, times, chance = waiting.pop()
        inside = computations.get(name, {})
        for instruction in inside.values():
            cost, runs = _cost(instruction, inside, computations, topology), chance * times
            if sent := collectives.read(instruction, inside, computations, topology, coordinates):
                cost = _with_links(cost, sent)
                count, size = sums.get(sent.kind, (0.0, 0.0))
                sums[sent.kind] = count + runs, size + runs * sent.sent
            fused = [*hlo.with_fused(instruction, computations)]
            code = next(filter(None, map(_kernel, fused)), "")
            kind = "kernel" if code else "" if cost.cycles else _kind(fused)
            if kind and not code:
                operands = [inside[x].shape for x in instruction.operands if x in inside]
                code = f"{kind} {instruction.shape} {operands}"
            if kind or cost.cycles or cost.flops or cost.moved or cost.link_seconds:
                place = places.of(instruction)
                cost = dataclasses.replace(cost, times=runs, place=place, kind=kind)
                found.append((cost, code))
            if instruction.opcode not in _RUNS:
                continue
            trips: int | None = 1
            if instruction.opcode == "while":
                trips = hlo.trips(instruction, inside, computations)
                unknown += trips is None
            branches += instruction.opcode == "conditional" and not instruction.is_weighed
            called = zip(instruction.called, instruction.chances, strict=True)
            waiting += [(one, times * (trips or 1), chance * of) for one, of in called]
    equal = {code: bundles[cost.name] for cost, code in found if cost.name in bundles}
    operations = [_with_bundles(cost, code, bundles, equal, topology) for cost, code in found]
    return Operations(tuple(operations), sums, unknown, branches)


def _cost(
    instruction: Instruction, inside: Computation, computations: Computations, topology: Topology
) -> Operation:
    number = _CYCLES.search(instruction.line)
    cycles = int(number[1]) if number else None
    products = flops(instruction, inside, computations)
    doubled = topology.chip.doubled
    fast = flops(instruction, inside, computations, doubled) if products and doubled else 0
    moved = bytes_moved(instruction, inside, computations)
    bf16_flops = products - fast / 2
    seconds = topology.chip.operation_seconds(bf16_flops, moved, cycles or 0)
    if instruction.opcode.endswith("-start"):  # a copy beside other work
        seconds = 0.0
    return Operation(
        name=instruction.name,
        opcode=instruction.opcode,
        scopes=instruction.scopes,
        place="",
        times=1.0,
        flops=products,
        bf16_flops=bf16_flops,
        moved=moved,
        cycles=cycles,
        seconds=seconds,
    )


def _with_links(operation: Operation, sent: collectives.Collective) -> Operation:
    """The operation with its time on the links; other work hides that of an asynchronous one."""
    if sent.is_asynchronous:
        return dataclasses.replace(operation, link_seconds=sent.seconds)
    seconds = max(operation.seconds, sent.seconds)
    return dataclasses.replace(operation, seconds=seconds, link_seconds=sent.seconds)


def _with_bundles(
    operation: Operation,
    code: str,
    bundles: Mapping[str, Sequence[int]],
    equal: Mapping[str, Sequence[int]],
    topology: Topology,
) -> Operation:
    """The operation, with the time of its bundles if the compiler estimates no cycles."""
    issued = bundles.get(operation.name, equal.get(code))
    if not operation.kind or issued is None:
        return operation
    seconds = max(operation.seconds, issued[0] / topology.chip.clock)
    return dataclasses.replace(
        operation, seconds=seconds, bundles=issued[0] or None, unknown_loops=issued[1]
    )


def _kind(fused: Sequence[Instruction]) -> str:
    """What the instructions are, of which the compiler estimates no cycles; "" of others."""
    opcodes = {"sort" if x.target == "TopK" else x.opcode for x in fused}
    return next((kind for kind in ("sort", "scatter", "gather") if kind in opcodes), "")


def _kernel(instruction: Instruction) -> str:
    """The code of an instruction that gets no cycles; "" for others."""
    if instruction.opcode == _RANDOM:
        return f"{_RANDOM} {instruction.shape}"
    match = _BODY.search(instruction.line)
    is_kernel = instruction.target == _KERNEL
    return (match[1] if match else instruction.name) if is_kernel else ""


# FLOPs.


def flops(
    instruction: Instruction,
    inside: Computation,
    computations: Computations,
    dtypes: tuple[str, ...] = (),
) -> int:
    """The FLOPs of one run of an instruction of the computation `inside`, with what it fuses.

    With `dtypes`, only those of products of two arrays of these types, such as "s8".
    """
    if instruction.opcode in ("fusion", "async-start"):
        bodies = [computations.get(name, {}) for name in instruction.called]
        parts = (
            flops(inner, body, computations, dtypes) for body in bodies for inner in body.values()
        )
        return sum(parts)
    if instruction.opcode not in ("convolution", "dot"):
        return 0
    operands = [inside[name].shape for name in instruction.operands[:2]]
    if dtypes and not all(shape.startswith(dtypes) for shape in operands):
        return 0
    if instruction.opcode == "convolution":
        return _flops_of_convolution(instruction, inside)
    contracted = _CONTRACTED.search(instruction.line)
    numbers = contracted[1].split(",") if contracted and contracted[1] else []
    left = hlo.sides(operands[0])
    products = math.prod(hlo.sides(instruction.shape))
    return 2 * products * math.prod(left[int(number)] for number in numbers)


def _flops_of_convolution(instruction: Instruction, inside: Computation) -> int:
    left, _ = (hlo.sides(inside[name].shape) for name in instruction.operands[:2])
    out, labels = hlo.sides(instruction.shape), _LABELS.search(instruction.line)
    if labels is None:
        return 0
    window = _WINDOW.search(instruction.line)
    fields = dict(field.split("=") for field in (window[1].split() if window else ()))
    of_left, _, of_out = labels.groups()
    groups = dict(_GROUPS.findall(instruction.line))
    products = left[of_left.index("f")] // int(groups.get("feature", 1))
    products *= left[of_left.index("b")] // int(groups.get("batch", 1)) * out[of_out.index("f")]
    for i, label in enumerate(sorted(filter(str.isdigit, of_out))):
        extents = left[of_left.index(label)], out[of_out.index(label)]
        products *= _positions(*extents, {name: x.split("x")[i] for name, x in fields.items()})
    return 2 * products


def _positions(extent: int, results: int, window: Mapping[str, str]) -> int:
    """How many pairs of a result and a position of its window meet a value, not padding."""
    stride, spread = int(window.get("stride", 1)), int(window.get("lhs_dilate", 1))
    before = int(window.get("pad", "0_0").split("_")[0])
    step, last = int(window.get("rhs_dilate", 1)), (extent - 1) * spread
    count = 0
    for start in range(-before, int(window.get("size", 1)) * step - before, step):
        if spread == 1:
            count += max(
                0, min(results - 1, (last - start) // stride) - max(0, -(start // stride)) + 1
            )
        else:
            places = range(start, start + results * stride, stride)
            count += sum(0 <= place <= last and place % spread == 0 for place in places)
    return count


# Bytes to and from the HBM.


def bytes_moved(instruction: Instruction, inside: Computation, computations: Computations) -> int:
    """Bytes that an instruction of the computation `inside` moves to and from the HBM in one run.

    Operations that run others, such as loops, count as 0: what they run counts by itself.
    """
    opcode = instruction.opcode
    if opcode in _WITHOUT_TRAFFIC or opcode.endswith("-done") or instruction.target in _UNWRITTEN:
        return 0
    body = computations.get(instruction.called[0], {}) if instruction.called else {}
    if opcode == "fusion":
        return _moved_by_fusion(instruction, inside, body, computations)
    if opcode == "async-start":
        return sum(bytes_moved(inner, body, computations) for inner in body.values())
    if opcode in ("copy-start", "collective-permute-start"):  # (result, operand, context)
        return sum(hlo.array_sizes(instruction.shape)[:2])
    results = hlo.size(instruction.shape)
    operands = [hlo.size(inside[x].shape) if x in inside else 0 for x in instruction.operands]
    if opcode in _SLICES:  # reads as many bytes as its result has, if they are in the HBM
        return results + (hlo.size_anywhere(instruction.shape) if operands[0] else 0)
    if opcode == "dynamic-update-slice":
        return 2 * sum(operands[1:2])
    if opcode == "scatter":  # in place: reads the updates; reads and writes what they change
        return sum(operands[1:]) + 2 * sum(operands[2:])
    if opcode.endswith("slice-start"):  # ((operand), result, context)
        *_, result, _ = hlo.arrays(instruction.shape)
        return hlo.size(result) + hlo.size_anywhere(result)
    if opcode.endswith("-start"):  # a collective: (operands, results)
        return results
    return results + sum(operands)


def _moved_by_fusion(
    fusion: Instruction, inside: Computation, body: Computation, computations: Computations
) -> int:
    total = 0
    for number, name in enumerate(fusion.operands):
        outer, inner = inside.get(name), _parameter(body, number)
        if outer and inner and (size := hlo.size(outer.shape)):
            total += min(size, _bytes_read(inner.name, body, computations))
    updates = _updated_sizes(body, computations)
    results = enumerate(hlo.array_sizes(fusion.shape))
    return total + sum(min(size, updates.get(i, size)) for i, size in results)


def _parameter(body: Computation, number: int) -> Instruction | None:
    mark = f" parameter({number})"
    return next((x for x in body.values() if x.opcode == "parameter" and mark in x.line), None)


def _bytes_read(name: str, body: Computation, computations: Computations) -> int:
    """The bytes that a fusion reads of a value in its body: all, or the slices that it takes."""
    total, whole = 0, hlo.size_anywhere(body[name].shape)
    for user in body.values():
        if name not in user.operands:
            continue
        if user.opcode in _SLICES and user.operands[0] == name:
            total += hlo.size_anywhere(user.shape)
        elif user.opcode in _UPDATES and user.operands[0] == name:
            continue  # in place: what it does not write, it does not read
        elif user.opcode == "fusion":
            inner = computations.get(user.called[0], {})
            for number in (i for i, operand in enumerate(user.operands) if operand == name):
                parameter = _parameter(inner, number)
                total += _bytes_read(parameter.name, inner, computations) if parameter else whole
        elif user.opcode in _SAME_ARRAY and not user.is_root:
            total += _bytes_read(user.name, body, computations)
        else:
            return whole
    return min(total, whole)


def _updated_sizes(body: Computation, computations: Computations) -> dict[int, int]:
    """The bytes that are written of those results of a fusion that are updated in place."""
    root = next((inner for inner in body.values() if inner.is_root), None)
    if root is None:
        return {}
    outputs = root.operands if root.opcode == "tuple" else (root.name,)
    found = {}
    for i, name in enumerate(outputs):
        inner = body.get(name)
        while inner and inner.opcode in _SAME_ARRAY and inner.operands:
            inner = body.get(inner.operands[0])
        if inner and inner.opcode in _UPDATES:
            update = body.get(inner.operands[_UPDATES[inner.opcode]])
            found[i] = hlo.size_anywhere(update.shape) if update else 0
        elif inner and inner.opcode == "fusion":
            nested = _updated_sizes(computations.get(inner.called[0], {}), computations)
            found |= {i: nested[0]} if nested.keys() == {0} else {}
    return found
