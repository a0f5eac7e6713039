"""The command line of the scripts: a parser with messages of one line, types of arguments."""

import argparse
import os
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

from common.errors import INVALID, UserError


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an invalid argument in one line."""

    def error(self, message: str) -> NoReturn:
        name = self.prog.removeprefix("python -m scripts.")
        help_ = "--help lists the arguments, CHANGELOG.md those that are gone"
        self.exit(INVALID, f"{name}: {UserError(message)} ({help_})\n")


def summary(doc: str | None) -> str:
    """The first line of a module's docstring; python -OO has none."""
    return (doc or "").partition("\n")[0]


def underscored(argv: Sequence[str]) -> list[str]:
    """The arguments with --a-name as --a_name; their values stay."""

    def convert(text: str) -> str:
        name, *value = text.split("=", 1)
        return "=".join([f"--{name[2:].replace('-', '_')}", *value])

    return [convert(text) if text.startswith("--") and text != "--" else text for text in argv]


def integer(least: int, most: int = 10**18) -> Callable[[str], int]:
    """Returns the type of an argument that is a whole number from `least` to `most`."""

    def convert(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or not least <= int(text) <= most:
            limit = f" and {most:,} or less" if most < 10**18 else ""
            message = f"must be a whole number of {least} or more{limit}, got '{text}'"
            raise argparse.ArgumentTypeError(message)
        return int(text)

    return convert


def share(text: str) -> float:
    """The type of an argument that is a number from 0 to 1."""
    if not re.fullmatch(r"[0-9.]+(e-[0-9]+)?", text) or not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, got '{text}'")
    return value


def path(text: str) -> str:
    """The type of an argument that names a file or folder: TensorFlow needs UTF-8."""
    if not is_utf8(text):
        raise argparse.ArgumentTypeError(f"the path {os.fsencode(text)!r} is not UTF-8")
    return text


def is_utf8(name: str) -> bool:
    """Whether the name of a file is text; Python keeps other bytes as lone surrogates."""
    return name == name.encode(errors="replace").decode()
