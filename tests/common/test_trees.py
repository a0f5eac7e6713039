"""Parts of a model by the words of their names."""

import pytest

from common.trees import Parts


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("stem", {"conv_stem/kernel", "conv_stem2/kernel", "bn_stem/scale"}),
        ("stage1", {"stage1_block1/conv1/kernel", "stage1_block2/bn1/bias"}),
        ("stage1_block2, head", {"stage1_block2/bn1/bias", "head/kernel"}),
        ("bn1", {"stage1_block2/bn1/bias"}),
        ("layer_1", {"layer_1/kernel"}),
        ("", set()),
    ],
)
def test_parts_are_words_of_the_names(text, names):
    known = {"conv_stem/kernel", "conv_stem2/kernel", "bn_stem/scale", "head/kernel"}
    known |= {"stage1_block1/conv1/kernel", "stage1_block2/bn1/bias", "stage10_block1/conv1/kernel"}
    known |= {"layer_1/kernel", "layer_10/kernel", "overhead/kernel", "system/kernel"}
    parts = Parts("freeze", text)
    assert {name for name in known if name in parts} == names
    parts.check(known)
