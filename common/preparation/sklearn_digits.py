"""Scikit-learn's handwritten digits and their split, and the flag that chooses digits."""

import argparse
import re

import numpy as np

from common import cli
from common.errors import UserError


def load() -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Returns images f64[n, 8, 8] of 0..16, their digits int64[n], and the rows of each split."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        text = "scikit-learn is not installed; 'bash scripts/setup.sh dev' installs it"
        raise UserError(text) from None
    images, digits = load_digits(return_X_y=True)
    images, digits = np.asarray(images).reshape(-1, 8, 8), np.asarray(digits)
    train, validation = train_test_split(
        np.arange(len(images)), test_size=360, stratify=digits, random_state=0
    )
    return images, digits, {"train": np.asarray(train), "validation": np.asarray(validation)}


def add_choice(parser: cli.Parser) -> None:
    """Adds --digits, a range."""
    parser.add_argument("--digits", type=_range, default=range(10), help="such as 5-9 (0-9)")


def _range(text: str) -> range:
    """The digits of "5-9"."""
    match = re.fullmatch("([0-9])-([0-9])", text)
    if match is None or match[1] >= match[2]:
        raise argparse.ArgumentTypeError(f"must be such as 5-9, got {text!r}")
    return range(int(match[1]), int(match[2]) + 1)
