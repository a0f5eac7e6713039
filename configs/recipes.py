"""Published recipes for ResNet-50 on ImageNet: --config=configs/recipes.py:NAME.

docs/resnet.md has the score and the cost that each source states. No run here has verified
these recipes on ImageNet.
"""

from typing import Any

import ml_collections

from configs import resnet50
from configs._loop import choose_recipe

# fmt: off
# ffcv-imagenet's rn50_E: the rate rises to its peak at epoch 2 and falls to 0 at the end.
_FFCV: dict[str, Any] = {
    "train_batch_size": 512, "learning_rate_schedule": "polynomial", "polynomial_power": 1.0,
    "base_learning_rate": 1.7, "learning_rate_per": 0, "warmup_epochs": 2.0,
    "end_learning_rate": 0.0, "nesterov": False, "weight_decay": 1e-4, "label_smoothing": 0.1,
    "blur_pool": True, "batch_norm": "plain", "crop_area_min": 0.25,
    "image_sizes": ((0.0, 160), (0.775, 192)), "image_size": 192,
    "eval_image_size": 256, "eval_flip": True,
}
# Wightman, Touvron, Jegou 2021 (arXiv:2110.00476): "ResNet strikes back".
_STRIKES_BACK: dict[str, Any] = {
    "learning_rate_schedule": "cosine", "learning_rate_per": 0,
    "optimizer": "lamb", "train_batch_size": 2048, "warmup_epochs": 5.0, "warmup_from": 1e-4,
    "gradient_clip_norm": 1.0, "adam_epsilon": 1e-6, "loss": "bce_binary", "cutmix": 1.0,
    "batch_norm": "plain",
}
# Composer (mosaicml/examples, ResNet-50): the average has a half-life of 100 steps.
_MILD: dict[str, Any] = {
    "learning_rate_schedule": "cosine", "learning_rate_per": 0,
    "train_batch_size": 2048, "base_learning_rate": 2.048, "momentum": 0.875,
    "nesterov": False, "decoupled_decay": True, "weight_decay": 5e-4,
    "warmup_epochs": 8.0, "loss": "bce_sum", "label_smoothing": 0.08,
    "blur_pool": True, "batch_norm": "plain", "head_bias_from_classes": True,
    "moving_average_decay": 0.5**0.2, "moving_average_every": 20,
    "image_sizes": ((0.0, 96), (0.4, 128), (0.6, 160), (0.8, 176)),
    "image_size": 176, "eval_image_size": 224, "target": 0.75,
}
# torchvision multiplies 1 - 0.99998 by batch * 32 / epochs for the decay of an update.
_TORCHVISION: dict[str, Any] = {
    "learning_rate_schedule": "cosine", "learning_rate_per": 0,
    "train_batch_size": 1024, "base_learning_rate": 0.5, "warmup_epochs": 5.0,
    "warmup_from": 5e-3, "nesterov": False, "weight_decay": 2e-5,
    "label_smoothing": 0.1, "mixup": 0.2, "cutmix": 1.0, "random_erasing": 0.1,
    "augmentation": "trivialaugment", "repeats": 4, "batch_norm": "plain",
    "moving_average_decay": 0.99891, "moving_average_every": 32,
    "image_size": 176, "eval_image_size": 224, "target": 0.80,
}
# Bello et al. 2021 (arXiv:2103.07579), tensorflow/tpu's resnetrs50_i160.yaml. The running
# statistics come from the last batch, and the average of the weights averages them too.
_RS: dict[str, Any] = {
    "learning_rate_schedule": "cosine", "train_batch_size": 4096, "weight_decay": 4e-5,
    "deep_stem": True, "max_pool": "conv", "squeeze_excite": 0.25, "dropout": 0.25,
    "bn_momentum": 0.0, "batch_norm": "plain", "moving_average_decay": 0.9999,
    "label_smoothing": 0.1, "augmentation": "randaugment:2x10",
    "image_size": 160, "input_spec": "resnet_rs", "target": 0.788,
}
# By name: epochs, and the keys that differ from configs/resnet50.py.
RECIPES: dict[str, tuple[int, dict[str, Any]]] = {
    "mild": (36, _MILD),
    "ffcv16": (16, {**_FFCV, "target": 0.71}),
    "ffcv24": (24, {**_FFCV, "target": 0.738}),
    "ffcv32": (32, {**_FFCV, "target": 0.75}),
    "ffcv40": (40, {**_FFCV, "target": 0.76}),
    "ffcv56": (56, {**_FFCV, "target": 0.77}),
    "ffcv88": (88, {**_FFCV, "target": 0.78}),
    "a3": (100, {
        **_STRIKES_BACK, "base_learning_rate": 8e-3, "weight_decay": 0.02, "mixup": 0.1,
        "augmentation": "randaugment:2x6:0.5", "image_size": 160, "eval_image_size": 224,
        "target": 0.78,
    }),
    "a2": (300, {
        **_STRIKES_BACK, "base_learning_rate": 5e-3, "weight_decay": 0.02, "mixup": 0.1,
        "repeats": 3, "augmentation": "randaugment:2x7:0.5", "drop_path": 0.05, "target": 0.795,
    }),
    "a1": (600, {
        **_STRIKES_BACK, "base_learning_rate": 5e-3, "weight_decay": 0.01, "mixup": 0.2,
        "label_smoothing": 0.1, "repeats": 3, "augmentation": "randaugment:2x7:0.5",
        "drop_path": 0.05, "target": 0.80,
    }),
    "torchvision2": (600, _TORCHVISION),
    "rs50": (350, _RS),
}
# fmt: on


def get_config(name: str = "") -> ml_collections.ConfigDict:
    """The configuration of one recipe, a key of `RECIPES`."""
    epochs, values = choose_recipe(RECIPES, name, __file__)
    config = resnet50.get_config()
    config.train_steps = f"{epochs} epochs"
    config.schedule_epochs = epochs
    config.update(values)
    return config
