"""Which programs have Pallas kernels that preflight has to price."""

import pytest

import run as runs
from configs import fake_imagenet
from modes.pricing import uses_kernels


@pytest.mark.parametrize("kernels", ["xla", "pallas"])
def test_a_kernel_of_the_backward_pass_alone_is_found(kernels):
    config = fake_imagenet.get_config()
    config.kernels = kernels
    config.num_label_classes = 10
    benchmark = runs.read(config.lock()).load_benchmark("")
    assert uses_kernels(benchmark) == (kernels == "pallas")
