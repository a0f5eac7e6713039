"""Reads the text of optimised HLO: its computations, their instructions, and what these call."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
# The shape may be a tuple with layouts, {3,2,1,0:T(8,128)}; the opcode alone follows a blank.
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z0-9\-]*)\((.*)$")
_OPERAND = re.compile(r"%([\w.\-]+)")
_SCOPES = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"\b(?:body|condition|to_apply|calls)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_RARELY = re.compile(r"\bone_step_in_(\d+)/cond$")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of HLO.

    Attributes:
      name, opcode: as they are there.
      shape: the type of the result with its layout.
      line: all of it.
      operands: the names of what it reads.
      is_root: whether it is the result of its computation.
    """

    name: str
    opcode: str
    shape: str
    line: str
    operands: tuple[str, ...]
    is_root: bool

    @property
    def scopes(self) -> str:
        """The path of scopes that jax gave to it, or ""."""
        match = _SCOPES.search(self.line)
        return match[1] if match else ""

    @property
    def target(self) -> str:
        """What a custom call calls; "" for other operations."""
        match = _TARGET.search(self.line) if self.opcode == "custom-call" else None
        return match[1] if match else ""

    @property
    def branches(self) -> list[str]:
        """The computations of which a conditional runs one."""
        names = ",".join(_BRANCHES.findall(self.line)).split(",")
        return [name.strip(" %") for name in names if name]

    @property
    def called(self) -> list[str]:
        """The computations that it names."""
        return _CALLED.findall(self.line) + self.branches

    @property
    def chances(self) -> list[float]:
        """The probability with which each of `called` runs."""
        count, rarely = len(self.branches), _RARELY.search(self.scopes)
        each = [1 / count] * count if count else []
        if count == 2 and rarely:
            each = [1 - 1 / int(rarely[1]), 1 / int(rarely[1])]
        return [1.0] * (len(self.called) - count) + each


Computation = Mapping[str, Instruction]  # by name, in the order of the text


def computations(text: str) -> tuple[dict[str, dict[str, Instruction]], str | None]:
    """All computations by name, and the name of the entry."""
    found: dict[str, dict[str, Instruction]] = {}
    entry, current = None, {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = found[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            root, name, shape, opcode, rest = match.groups()
            operands = tuple(_OPERAND.findall(_until_closed(rest)))
            current[name] = Instruction(name, opcode, shape, line, operands, bool(root))
    return found, entry


def _until_closed(text: str) -> str:
    """The text up to the parenthesis that closes one before it."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return text[:place]
    return text
