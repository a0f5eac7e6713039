"""The published recipes in miniature: the same cost, the recipe's own parts, sizes that fit."""

from typing import Any

import pytest

from configs import digits
from configs.digits import COST
from configs.recipes import RECIPES
from tests.configs.test_configs import rates
from tests.conftest import make_recipe, open_run

IMAGES = 1437
SCALED = {
    *("train_batch_size", "base_learning_rate", "learning_rate_per", "warmup_from", "target"),
    *("end_learning_rate", "moving_average_decay", "moving_average_every", "image_size"),
    *("image_sizes", "eval_image_size", "eval_flip", "crop_area_min", "precision"),
}


def sides(config):
    """The side of the images at each thousandth of the run."""
    stages = config.image_sizes or ((0.0, config.image_size),)
    return [[side for start, side in stages if start <= i / 1000][-1] for i in range(1000)]


@pytest.mark.parametrize("name", ["plain", *RECIPES])
def test_all_miniatures_cost_the_same(name):
    config: Any = digits.get_config(name)
    epochs = int(config.train_steps.removesuffix(" epochs"))
    cost = epochs * sum(side**2 for side in sides(config)) / 1000 / 32**2
    assert cost == pytest.approx(COST, rel=0.05)


@pytest.mark.parametrize("name", RECIPES)
def test_a_miniature_is_the_recipe_on_digits(name, tmp_path):
    config: Any = digits.get_config(name)
    epochs, values = RECIPES[name]
    own = values.keys() - SCALED
    assert own and {key: config[key] for key in own} == {key: values[key] for key in own}
    assert config.schedule_epochs == epochs
    pixels = [side for _, side in config.image_sizes]
    assert len(set(pixels)) == len({side for _, side in values.get("image_sizes", ())})
    assert max([*pixels, config.image_size]) <= 32
    open_run(config.lock(), str(tmp_path))  # refuses keys that cannot work together


def test_scaled_numbers_by_hand():
    mild, torchvision2, a3 = map(digits.get_config, ("mild", "torchvision2", "a3"))
    assert mild.image_sizes == ((0.0, 14), (0.4, 18), (0.6, 22), (0.8, 26))
    # 4 * 64 / 2048 of the rate; 8 of 36 epochs are warm-up.
    recipe = make_recipe(mild, IMAGES)
    assert recipe.total_steps == 494
    assert rates(recipe, [110])[0] == pytest.approx(0.256)
    assert rates(recipe, range(494)).argmax() == 110
    # The half-life of 100 steps is 0.444 % of ImageNet's 36 epochs at 2048; of 494 steps, 2.19.
    assert mild.moving_average_every == 1
    assert mild.moving_average_decay == pytest.approx(0.5 ** (1 / 2.1934), rel=1e-4)
    assert rates(make_recipe(torchvision2, IMAGES), range(269)).max() == pytest.approx(0.125)
    assert torchvision2.warmup_from == pytest.approx(5e-3 / 4)
    assert (a3.base_learning_rate, a3.learning_rate_per, a3.image_size) == (8e-3, 0, 22)


def test_the_digits_without_a_name_are_as_ever():
    config = digits.get_config()
    assert (config.train_steps, config.num_filters, config.image_size) == ("15 epochs", 32, 32)
