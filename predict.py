"""Says what is on pictures, with a trained model:

    python predict.py photo.jpg folder/ 'gs://bucket/x/*.jpg' --workdir=runs/digits
    python predict.py folder/ --workdir=runs/digits --out=labels.csv --contact_sheet=sheet.png

A source is a file, a folder (with all folders in it), a pattern, or "-" for paths on stdin, one per
line. Where folders have the names of classes, the program also prints the accuracy. A file that
cannot be used has a row with the error, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

from engine import environment

environment.set_defaults(TF_CPP_MIN_LOG_LEVEL="3")

from errors import UserError  # noqa: E402 (the environment decides how libraries start)
from modes import predict  # noqa: E402
from modes.predict.outputs import Request  # noqa: E402
from modes.predict.rows import FORMATS  # noqa: E402
from ops import console  # noqa: E402

_NAME = "predict"


def _parser() -> console.Parser:
    summary, _, more = (__doc__ or "").partition("\n\n")
    parser = console.Parser(
        prog=_NAME,
        description=summary,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("sources", nargs="+", metavar="SOURCE", help="local or gs://, or - for paths on stdin")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--workdir", help="of the run whose model it is, or WORKDIR/checkpoints/STEP"
    )
    model.add_argument("--model", help="the same, or others' weights: .safetensors, .pth, .h5")
    add("--checkpoint", default="latest", help="latest (default), best or a step")
    add("--top_k", type=console.whole(1), default=5, help="classes for each picture (5)")
    add("--logits", action="store_true", help="write logits instead of probabilities")
    add("--format", choices=FORMATS, help="default: by the name of --out; a table on a terminal")
    add("--out", default="", help="file for the predictions: .csv, .json or .jsonl")
    add("--embeddings", default="", help="file .npy for the features, float32[files, channels]")
    add("--contact_sheet", default="", help="file .png: the pictures with their classes")
    add("--labels", default="", help="file with a class name per line; default: the model's own")
    add(
        "--batch_size",
        type=console.whole(1, 65536),
        default=8,
        help="images at a time (8), rounded up to 8 for each device; never changes the results",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command line; argv without the program's name. Returns the exit code."""
    parser = _parser()
    argv = console.underscored(sys.argv[1:] if argv is None else argv)
    args = parser.parse_intermixed_args(argv)
    form = args.format or next((f for f in FORMATS if args.out.lower().endswith(f".{f}")), "")
    if args.out and not form:
        parser.error(f"argument --out: {args.out} must end with .csv, .json or .jsonl")
    for flag, end in (("embeddings", ".npy"), ("contact_sheet", ".png")):
        value = getattr(args, flag)
        if value and not value.lower().endswith(end):
            parser.error(f"argument --{flag}: {value} must end with {end}")
    request = Request(
        sources=args.sources,
        model=args.workdir or args.model,
        recipe=None if args.workdir else _recipe(),
        checkpoint=args.checkpoint,
        top_k=args.top_k,
        kind="logit" if args.logits else "probability",
        format=form or ("table" if sys.stdout.isatty() else "csv"),
        out=args.out,
        embeddings=args.embeddings,
        contact_sheet=args.contact_sheet,
        labels=args.labels,
        batch_size=args.batch_size,
        threads=console.threads(*args.sources),
    )
    try:
        return predict.run(request, _lines())
    except UserError as error:
        sys.exit(f"{_NAME}: {error}")
    except (KeyboardInterrupt, BrokenPipeError):  # Ctrl-C, or a reader such as `head` has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(130)


def _recipe() -> Any:
    """What another library's weights do not decide."""
    from configs import resnet50

    recipe = resnet50.get_config()
    recipe.precision = "float32"  # as the other library computes
    return recipe


def _lines() -> Iterator[str]:
    """The paths on stdin; bytes that are not UTF-8 stay as they are in file names."""
    for line in sys.stdin.buffer:
        yield os.fsdecode(line.rstrip(b"\r\n"))


if __name__ == "__main__":
    console.run(lambda: sys.exit(main()))
