"""From a recipe and the command line to settings: what is changed, and what is said about it."""

import os

import pytest

from commands import configuration
from commands.recipe import Recipe
from common import keys
from common.errors import ConfigError
from tests.conftest import make_tiny_config


def test_the_settings_say_what_differs_from_the_recipe(
    untrained_run, tmp_path, monkeypatch, caplog
):
    """The folders, the command line's values and the other model's; the recipe stays as it is."""
    monkeypatch.setenv("MLP_PATH_GCS_IMAGENET", "/photos")
    config = make_tiny_config("", num_filters=6, resnet_depth=18)
    own = keys.flat(config)
    config.update({"init_from": untrained_run, "resnet_depth": 34, "mlperf": {"org": "me"}})
    before = config.lock().to_dict()
    caplog.set_level("INFO", logger="tpu_suite")
    recipe = Recipe("configs/mine.py", config, own, {"init_from", "resnet_depth", "mlperf.org"})
    settings = configuration.resolve(recipe, "train_and_eval", str(tmp_path))
    changes = {
        "data_dir": ["", "/photos"],
        "init_from": ["", untrained_run],
        "resnet_depth": [18, 34],
    }
    changes |= {"num_filters": [6, 4], "mlperf.org": ["", "me"]}
    assert settings.origin == {"file": "configs/mine.py", "changes": changes}
    assert keys.flat(settings.config) == {**own, **{key: new for key, (_, new) in changes.items()}}
    assert config.to_dict() == before and settings.workdir == str(tmp_path)
    assert caplog.messages == [
        "data: /photos (from $MLP_PATH_GCS_IMAGENET)",
        "NOTE config.num_filters=4 instead of 6, as the weights want it",
    ]


def test_without_a_recipe_the_checkpoint_has_the_settings(untrained_run):
    settings = configuration.resolve(None, "report", untrained_run)
    assert settings.moving_average_decay == 0.9 and settings.workdir == untrained_run


def test_init_from_may_begin_with_a_tilde_where_there_is_no_workdir(untrained_run, monkeypatch):
    folder, name = os.path.split(untrained_run)
    monkeypatch.setenv("HOME", folder)
    config = make_tiny_config("", num_filters=6, init_from=f"~/{name}").lock()
    settings = configuration.resolve(Recipe("", config, {}, ()), "preflight", "")
    assert settings.config["num_filters"] == 4


def test_a_mistake_in_a_recipe_is_found_before_its_folders_are(tmp_path):
    config = make_tiny_config("", seed=-1, data_fallback="").lock()
    recipe = Recipe("", config, {}, ())
    with pytest.raises(ConfigError, match="config.seed=-1: must be at least 0"):
        configuration.resolve(recipe, "train", str(tmp_path))
