"""Makes the data of a benchmark: python -m scripts.prepare WHAT --help."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from engine import environment
from ops import console

# Each module has a function main(argv).
PREPARATIONS = {
    "imagenet": ("benchmarks.resnet.preparation.imagenet", "records of ImageNet or of your photos"),
    "coco": (
        "benchmarks.detection.preparation.coco",
        "records of COCO or of your images with boxes",
    ),
    "text": ("benchmarks.translation.preparation.text", "records of parallel text"),
    "ratings": ("benchmarks.ncf.preparation.ratings", "made-up ratings of films"),
    "compare_ratings": ("benchmarks.ncf.preparation.compare_ratings", "a run beside baselines"),
    "digits": ("ops.preparation.digits", "handwritten digits, for the quickstart"),
    "digit_scenes": (
        "benchmarks.detection.preparation.digit_scenes",
        "scenes of digits, with boxes",
    ),
    "digit_masks": ("benchmarks.detection.preparation.digit_masks", "the same, with masks"),
    "phrases": ("benchmarks.translation.preparation.phrases", "sentences in two languages"),
    "fake": ("benchmarks.resnet.preparation.fake", "random images, for trials"),
}


def main(argv: Sequence[str]) -> None:
    """Runs the preparation that the first argument names with the other arguments."""
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help"):
        width = max(map(len, PREPARATIONS))
        print("usage: python -m scripts.prepare WHAT [arguments; --help lists them]\n")
        print("\n".join(f"  {n:<{width}}  {text}" for n, (_, text) in PREPARATIONS.items()))
        return
    if name not in PREPARATIONS:
        sys.exit(f"prepare: {name!r} is not one of: {', '.join(PREPARATIONS)}")
    # Small blocks, because archives on gs:// are read one image of about 100 KB at a time.
    environment.set_defaults(GCS_READ_CACHE_BLOCK_SIZE_MB="1", TF_CPP_MIN_LOG_LEVEL="3")
    module = importlib.import_module(PREPARATIONS[name][0])
    console.run(lambda: module.main(rest))


if __name__ == "__main__":
    main(sys.argv[1:])
