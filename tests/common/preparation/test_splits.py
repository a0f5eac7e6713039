"""Which names say that they are for training, validation or a test."""

import pytest

from common.preparation.splits import have_splits, split_of, whole_split


@pytest.mark.parametrize(
    ("name", "split", "whole"),
    [
        ("Training", "train", "train"),
        ("Testing", "test", "test"),
        ("trainset", "train", "train"),
        ("val2017", "validation", "validation"),
        ("eval", "validation", "validation"),
        ("seg_train", "train", ""),
        ("newstest2014.de", "test", ""),
        ("asyncio-dev.po", "validation", ""),
        ("latest", "", ""),
        ("trains", "", ""),
        ("Protest", "", ""),
        ("PublicTest", "test", ""),
        ("HeldOut", "validation", "validation"),
    ],
)
def test_words_count_and_parts_of_words_do_not(name, split, whole):
    assert (split_of(name), whole_split(name)) == (split, whole)


def test_one_kind_of_names_says_nothing():
    assert not have_splits(["library/asyncio-dev.po", "library/test.po", "about.po"])
    assert not have_splits(["train.en", "more.en"])
    assert have_splits(["train.en", "more.en", "dev.en"])
