"""What a user can fix, as exceptions; other libraries' errors in one line."""

import json
import re
from collections.abc import Iterable
from typing import Any

# Google answers a refusal over many lines, JSON or XML, with the reason somewhere in them.
_ANSWER = re.compile(
    r"""with body '.*?(?:"message": "|<Message>)(.*?)(?:"|</).*?'\s*(?=when|$)""", re.DOTALL
)
_BODY = re.compile(r'\{\s*"error": \{.*?"message": "(.*?)".*', re.DOTALL)  # of its own library
_OP_NAMES = re.compile(r"\{\{.*?\}\} ?| \[Op:\w+\].*")
# Control characters but tab and line feed, marks that turn the writing direction, and surrogates.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

# The exit codes of the programs; docs/run.md has the same table, and what to do then.
FAILED = 1  # You must fix something: data, config, disk, a loss that is not finite.
INVALID = 2  # An argument or a file given to `predict.py` or a script is invalid.
RESTART = 75  # Start it again: a host was lost or hung, memory was nearly full, or ...
CORRUPTED = 76  # Two devices disagree.
INTERRUPTED = 130  # Ctrl-C stopped the run.
BROKEN_PIPE = 141  # The reader of the output, such as `head`, has ended.
TERMINATED = 143  # Another signal stopped the run.


class UserError(Exception):
    """A mistake that the user can fix.

    The message is one line: the value, the place and the fix. `main.py` prints it without a
    stack trace and exits with `code`.
    """

    def __init__(self, message: str, code: int = FAILED):
        text = visible(message)  # both ends of a long one, because the fix is at its end
        super().__init__(text if len(text) < 4000 else f"{text[:2000]} ... {text[-1000:]}")
        self.code = code


class ConfigError(UserError):
    """A value in the config or on the command line cannot work."""


class DataError(UserError):
    """The input data cannot be used."""


class DeviceError(UserError):
    """The devices cannot run what the config asks for."""


class HostError(UserError):
    """The hosts of a run cannot work together."""


class CheckpointError(UserError):
    """A checkpoint cannot be written, read or used."""


class OutputError(UserError):
    """A result cannot be written to the workdir."""


def visible(text: str) -> str:
    r"""Text in which control characters are escaped, such as "\x1b": a terminal would obey them."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def is_of_files(error: BaseException) -> bool:
    """Whether a file system raised it; gs:// raises TensorFlow's own classes."""
    return isinstance(error, OSError) or type(error).__module__.startswith("tensorflow")


def one_line(error: BaseException) -> str:
    """What an exception says, in one line of at most 1,000 characters."""
    text = str(getattr(error, "message", "") or error)  # TensorFlow's str() adds op names
    text = _OP_NAMES.sub("", _BODY.sub(r"\1", _ANSWER.sub(r"(\1) ", text)))
    text = re.sub(r"libcurl code 42 .*?Callback aborted", "the connection stood still", text)
    text = re.sub(r"\s+(?=when \w+ing )", " ", text)  # the next line says with which object
    lines = text.split(" [tensorstore_spec")[0].strip().splitlines()
    return lines[0][:1000] if lines else type(error).__name__


def some(names: Iterable[str], most: int = 4) -> str:
    """The first names of a list for a message: "a, b, c, d and 3 more"."""
    names = [name[:120] for name in names]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def count(number: int, noun: str, plural: str = "") -> str:
    """A number of things for a message: "1 image", "2,000 images"."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def parse_json(data: str | bytes, **options: Any) -> Any:
    """The value of a JSON document; `options` are passed to `json.loads`.

    ValueError if it is no JSON, or so nested that Python's parser gives up.
    """
    try:
        return json.loads(data, **options)
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error
