"""Answers with a trained model: classes or boxes of pictures, translations, recommendations.

    python predict.py data/digits_photos photo.jpg 'gs://bucket/x/*.jpg' --workdir=runs/digits
    python predict.py folder/ --workdir=runs/ssd_digits --draw=drawn --out=boxes.json
    python predict.py "A dog runs." --workdir=runs/phrases --n_best=3
    python predict.py messages.po --workdir=runs/memory --out=messages.de.po
    python predict.py --user=1,2 --top=10 --workdir=runs/ncf_synthetic

A source of pictures is a file, a folder (with all folders in it), a pattern, or "-" for paths on
stdin, one per line. A source of sentences is a file of lines, a sentence, or "-" for stdin, which
is read without a source, too; a .po, .xlf or .tmx comes back in its form. An input that cannot be
used has a row with the error, and the exit code is 1. Which flags there are depends on the model;
docs/use.md has examples for each kind.
"""

import scripts  # isort: skip # noqa: F401 (first: a Python without the packages gets one line)

import argparse
import functools
import sys
from typing import Any

from common import entry
from engine import environment

environment.set_defaults(TF_CPP_MIN_LOG_LEVEL="3")

from commands import predict  # noqa: E402
from commands.predict import boxes  # noqa: E402
from commands.predict.model import Request  # noqa: E402
from common import cli, foreign  # noqa: E402
from common.errors import UserError  # noqa: E402 (the environment decides how libraries start)
from configs import finetune, resnet50  # noqa: E402

_GENERAL = ("checkpoint", "format", "out", "batch_size", "accept_other_data")  # of all models
_KEYS = {
    "resnet_version": "1: the first convolution of a bottleneck has its stride; 1.5: the second",
    "input_spec": "how pixels are prepared: a name in docs/resnet.md, or a JSON object",
}


def _parser() -> cli.Parser:
    summary, _, more = (__doc__ or "").partition("\n\n")
    parser = cli.Parser(
        prog="predict",
        description=summary,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("sources", nargs="*", metavar="SOURCE", help="local or gs://, - for stdin, or a sentence")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--workdir", help="of the run whose model it is, or WORKDIR/checkpoints/STEP"
    )
    model.add_argument(
        "--model",
        help="the same, or others' weights: .safetensors, .pth, a checkpoint of TensorFlow, a "
        "folder, hf-hub:OWNER/NAME",
    )
    add("--checkpoint", default="latest", help="latest (default), best or a step")
    add("--format", choices=tuple(predict.ENDS), default="", help="default: by the name of --out")
    ends = ", ".join(predict.ENDS.values())
    add("--out", default="", help=f"file for the results: {ends}, as the model has them")
    add(
        "--accept_other_data",
        action="store_true",
        help="use the model although its data have other classes by now, or --labels another order",
    )
    add(
        "--batch_size",
        type=cli.integer(1, 65536),
        default=8,
        help="inputs at a time (8), rounded up to what the devices take at once; never changes the "
        "results",
    )
    _add_kinds(parser)
    return parser


def _add_kinds(parser: cli.Parser) -> None:
    """Adds the flags that only some models have; only those that are given become options."""

    def group(title: str) -> Any:
        added = parser.add_argument_group(title)
        return functools.partial(added.add_argument, default=argparse.SUPPRESS)

    add = group("weights of other libraries, where the file does not say it")
    for key, text in _KEYS.items():
        add(f"--config.{key}", help=text)
    natural = cli.integer(1)
    add = group("classifiers")
    add("--top_k", type=natural, help="classes for each picture (5; of several labels, all)")
    above = "of several labels per picture: write those with a larger probability (0.5)"
    add("--threshold", type=cli.share, help=above)
    add("--logits", action="store_true", help="write logits instead of probabilities")
    add("--embeddings", help="file .npy for the features, float32[files, channels]")
    add("--heatmap", help="folder for the pictures with a heat map: what speaks for the class")
    add("--labels", help="file with a class name per line; default: the model's names")
    add = group("detectors")
    add("--min_score", type=cli.share, help="of a detection, at least (0.3; .coco.json: 0)")
    add("--max_detections", type=natural, help="the best of each picture (100; in tiles 1,000)")
    text = "side in pixels of overlapping tiles, for small objects, or auto: the model's input"
    add("--tiles", type=boxes.tile_side, help=text)
    add("--draw", help="folder for the pictures with boxes and masks")
    add = group("translators and recommenders")
    add("--data_dir", help="where the vocabulary or the ratings are, if not where the run had them")
    add = group("translators")
    add("--beams", type=cli.integer(1, 100), help="of the search; default: config.beam_size")
    add("--n_best", type=cli.integer(1, 100), help="translations of each sentence (1)")
    text = "of a .po, .xlf or .tmx also what is translated, but a memory's own translations"
    add("--all", action="store_true", help=text)
    add = group("recommenders")
    add("--user", help="users, with commas between; or give a file of ids or names as SOURCE")
    add("--items", help="items of a user who is not in the model; or a file, a user on a line")
    add("--similar", help="items, to find others like them; or a file, an item on a line")
    add("--vectors", help="folder for the vectors of all users and items, for search engines")
    add("--top", type=natural, help="items for each user or item (10)")


def _recipe(file: str) -> Any:
    """The config for what another library's weights do not decide."""
    is_translator = foreign.vocabulary_folder(file)
    config = finetune.get_config("opus_mt") if is_translator else resnet50.get_config()
    config.precision = "float32"  # as the other library computes
    return config


def main(argv: list[str] | None = None) -> int:
    """The command line; argv without the program's name. Returns the exit code."""
    parser = _parser()
    argv = cli.underscored(sys.argv[1:] if argv is None else argv)
    given = vars(parser.parse_intermixed_args(argv))
    workdir, model, sources = (given.pop(name) for name in ("workdir", "model", "sources"))
    keys = {key: given.pop(f"config.{key}") for key in _KEYS if f"config.{key}" in given}
    if workdir and keys:
        parser.error(f"argument --config.{next(iter(keys))}: goes with --model, not --workdir")
    request = Request(
        sources=sources,
        model=workdir or model,
        recipe=_recipe if model else None,
        keys=keys,
        **{name: given.pop(name) for name in _GENERAL},
        options=given,
    )
    try:
        return predict.run(request)
    except UserError as error:
        sys.exit(f"predict: {error}")


if __name__ == "__main__":
    entry.run(main)
