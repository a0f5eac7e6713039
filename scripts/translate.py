"""Translates text with a trained Transformer or GNMT, one sentence per line.

    python -m scripts.translate --workdir=runs/phrases < sentences.en > sentences.de

It is `predict.py -` with plain text as output: every line of the input becomes a line of the
output, and an empty line stays empty. A model whose data were cut into words and pieces ("H@@ aus")
wants its input so too. A line that cannot be translated is empty, and the exit code is 1.
"""

import sys

import predict
from ops import console


def main(argv: list[str] | None = None) -> int:
    """The command line; argv without the program's name. Returns the exit code."""
    parser = console.Parser(prog="translate", description=console.summary(__doc__))
    add = parser.add_argument
    add("--workdir", required=True, help="of a run, or WORKDIR/checkpoints/STEP; local or gs://")
    add("--data_dir", default="", help="where the vocabulary is, if not where the run had it")
    add("--batch_size", type=console.whole(1, 4096), default=32, help="sentences")
    args = parser.parse_args(console.underscored(sys.argv[1:] if argv is None else argv))
    flags = [f"--{name}={value}" for name, value in vars(args).items() if value]
    return predict.main(["-", "--format=text", *flags])


if __name__ == "__main__":
    console.run(lambda: sys.exit(main()))
