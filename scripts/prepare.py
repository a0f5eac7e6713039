"""Makes the data of a benchmark: `python -m scripts.prepare` lists what it can make."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from common import console, entry
from common.data.shards import tensorflow
from common.errors import UserError, one_line
from common.images import photos
from common.preparation import arguments
from engine import environment

# By name: the package whose `preparation` has a module of this name, with prepare(args), and
# parse(parser, argv) if it has more arguments than --out; and what it makes.
PREPARATIONS = {
    "imagenet": ("benchmarks.resnet", "records of ImageNet, or of own photos"),
    "coco": ("benchmarks.detection", "records of COCO, or of own images"),
    "text": ("benchmarks.translation", "records of parallel text"),
    "interactions": ("benchmarks.ncf", "ratings or events of own users and items"),
    "digits": ("common", "handwritten digits"),
    "digit_scenes": ("benchmarks.detection", "images of digits, with boxes"),
    "digit_masks": ("benchmarks.detection", "images of digits, with masks"),
    "phrases": ("benchmarks.translation", "sentences in English and German"),
    "ratings": ("benchmarks.ncf", "made-up ratings of films"),
    "fake": ("benchmarks.resnet", "random images, for trials"),
}
_COMMAND = "python -m scripts.prepare"


def parse(name: str, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a preparation; exits with status 2 and one line if one is invalid."""
    module = _module(name)
    about = console.summary(module.__doc__)
    parser = console.Parser(prog=f"{_COMMAND} {name}", description=about)
    parse_own = getattr(module, "parse", arguments.parse_out)
    return parse_own(parser, console.underscored(argv))


def _module(name: str) -> Any:
    return importlib.import_module(f"{PREPARATIONS[name][0]}.preparation.{name}")


def make(name: str, argv: Sequence[str]) -> str:
    """Prepares the data; returns the last line to print.

    Raises:
        UserError: a mistake of the user's.
        tf.errors.OpError: reading or writing failed.
    """
    args = parse(name, argv)
    print(f"prepare {name}: starting TensorFlow, up to 10 s", flush=True)
    photos.quiet()
    return _module(name).prepare(args)


def run(name: str, argv: Sequence[str]) -> None:
    """Prepares the data and prints the last line; a failure exits with one line and its code."""
    try:
        print(make(name, argv))
        return
    except KeyboardInterrupt:
        fault, code = "stopped; the same command continues", 130
    except UserError as error:
        fault, code = str(error), error.code
    except (OSError, UnicodeError, tensorflow().errors.OpError) as error:
        fix = "remove the cause, and the same command continues"
        fault, code = f"failed: {one_line(error)}; {fix}", 1
    print(f"prepare {name}: {fault}", file=sys.stderr)
    sys.exit(code)


def main(argv: Sequence[str]) -> None:
    """Runs the preparation that the first argument names with the other arguments."""
    name, *rest = argv or [""]
    if name in ("", "-h", "--help"):
        width = max(map(len, PREPARATIONS))
        print(f"usage: {_COMMAND} NAME [arguments]\n")
        for each, (_, text) in PREPARATIONS.items():
            print(f"  {each:<{width}}  {text}")
        print(f"\n{_COMMAND} NAME --help lists the arguments of one; docs/data.md explains them.")
        print("python main.py --mode=doctor --full checks a folder of records, see docs/data.md.")
        sys.exit(0 if name else 2)
    if name not in PREPARATIONS:
        print(f"prepare: there is no {name!r}; choose {', '.join(PREPARATIONS)}", file=sys.stderr)
        sys.exit(2)
    # Small blocks, because archives on gs:// are read one image of about 100 KB at a time.
    environment.set_defaults(GCS_READ_CACHE_BLOCK_SIZE_MB="1", TF_CPP_MIN_LOG_LEVEL="3")
    entry.output_only_shows()
    run(name, rest)


if __name__ == "__main__":
    entry.run(lambda: main(sys.argv[1:]))
