"""SSD as MLPerf Training ran it from 2019 on, to mAP 0.23: --config=configs/mlperf_ssd.py:NAME.

NAME is a batch size for which MLPerf publishes a reference convergence point (rulesets 1.0.0 and
1.1.0), or one of Google's own entries. configs/ssd.py is Google's entry of 2018, to 0.212. No run
here has verified these recipes.
"""

import ml_collections

from configs import _detection, ssd
from configs._loop import choose_recipe

# By name: batch, base rate per 32 images, warm-up, epochs of the two drops, weight decay, images
# that share BatchNorm statistics, and the epoch at which the published runs reached the target.
RECIPES = {
    "1024": (1024, 2.5e-3, "300 steps", (40, 50), 5e-4, 128, 50),
    "1536": (1536, 2.5e-3, "2.62 epochs", (44, 55), 1.3e-4, 192, 55),
    "2048": (2048, 4.57e-3, "1489 steps", (60, 75), 4e-5, 16, 65),
    "4096": (4096, 2.5e-3, "1145 steps", (80, 100), 4e-5, 64, 87),
    # Google's v3-32 of 2019, whose drops are at 42.7 and 53.3 epochs of 120,000 images. The closed
    # division of later rules has no such boundaries.
    "v0.6": (1024, 3e-3, "585 steps", (5.12e6 / 117_266, 6.4e6 / 117_266), 5e-4, 64, 59),
    # Google's v4-16 and, in JAX, v3-4096 of 2020.
    "v0.7-1024": (1024, 3.1e-3, "577 steps", (40, 50), 5e-4, 64, 50),
    "v0.7-4096": (4096, 1.2e-3, "750 steps", (64, 80), 5e-4, 16, 80),
}


def get_config(name: str = "") -> ml_collections.ConfigDict:
    """The configuration of one recipe, a key of `RECIPES`."""
    batch, base, warmup, drops, weight_decay, span, reached = choose_recipe(RECIPES, name, __file__)
    config = ssd.get_config()
    _detection.set_coco(config, batch)
    config.target = 0.23
    config.bn_span = f"{span}/{batch}"
    config.base_learning_rate = base
    config.warmup_steps = warmup
    config.learning_rate_decay_steps = ""
    config.learning_rate_decay_epochs = drops
    config.weight_decay = weight_decay
    # The rules' epochs, and every fifth one more where the reference needs longer, or where the
    # second drop is not over: the log names it.
    evaluations = (40, *range(50, max(80, reached + 15, int(drops[1]) + 5) + 1, 5))
    config.steps_per_eval = ", ".join(map(str, evaluations)) + " epochs"
    config.schedule_epochs = evaluations[-1]  # as long as the run, so that nothing is stretched
    config.train_steps = f"{evaluations[-1]} epochs"
    config.steps_per_checkpoint = "5 epochs"  # evaluations save as well, but begin at epoch 40
    return config
