"""Every key of every recipe with nonsensical values: one line that names the key, or a meaning.

The default tests walk one recipe of each benchmark; `bash scripts/test.sh -m slow -k nonsense`
walks all of them.
"""

import functools
import math
import operator
from typing import Any

import pytest

import benchmarks
from common import keys
from common.errors import UserError
from configs import mlperf_gnmt, mlperf_mask_rcnn, mlperf_resnet50, mlperf_ssd, mlperf_transformer
from configs import recipes as published
from engine import locations, sharding
from engine.plan import make_plan, read_settings
from tests.configs.test_configs import FILES, load
from tests.fixtures.recipes import languages

SAMPLE = (
    *("digits", "gnmt_phrases", "languages", "mask_rcnn_digits", "ncf_synthetic", "phrases"),
    "ssd_digits",
)
NAMED = {
    "mlperf_gnmt": mlperf_gnmt.RECIPES,
    "mlperf_mask_rcnn": mlperf_mask_rcnn.RECIPES,
    "mlperf_resnet50": {**mlperf_resnet50.POINTS, **mlperf_resnet50.ENTRIES},
    "mlperf_ssd": mlperf_ssd.RECIPES,
    "mlperf_transformer": mlperf_transformer.RECIPES,
    "recipes": published.RECIPES,
}
REST = [f"{file}:{name}" for file, names in NAMED.items() for name in names]
REST += sorted(set(FILES) - set(NAMED) - set(SAMPLE))

WRONG: dict[type, list[Any]] = {
    bool: [2, "yes", None, math.nan],
    int: [math.nan, math.inf, 1.5, "many", None, True, -1, 10**30, -(10**30), 10**400],
    float: [math.nan, math.inf, -math.inf, "fast", None, True, -1.0, 1e300, 1e-300],
    str: [3.5, None, True, "\0", "\udcff"],
    tuple: [3, "30", (math.nan,), (math.inf,), ("a",), (-1,), (1e300,), (1,) * 100_000],
}
DURATIONS = ["1e18 epochs", "-1", "nan", "inf steps", "1 fortnight", "1e99", "x" * 100_000]
# What switches something off, or is as large as a person likes.
EMPTY: dict[type, tuple[Any, ...]] = {int: (0, 10**9), float: (0.0, 1e30), str: ("",), tuple: ((),)}
# Numbers of examples, which are compared with the data.
COUNTS = (
    "num_eval_images num_eval_sentences num_eval_texts num_items num_ratings num_train_images "
    "num_train_pairs num_train_rows num_train_texts learning_rate_per seed "
    "train_fraction_seed "
)
MEANINGFUL: dict[Any, str] = {
    # The data, the devices or the file decide; or nothing is held back or added.
    0: COUNTS + "bn_span check_devices_every class_candidates eval_image_size eval_tiles "
    "extra_length num_classes num_label_classes num_users patience vocabulary_size "
    # No decay, threshold, noise, warm-up or watchdog; a rate of 0 changes nothing; any score is
    # enough.
    "adam_beta1 adam_beta2 anchor_negative_iou base_learning_rate bn_epsilon bn_momentum "
    "coverage_penalty crop_area_min cutmix drop_path dropout end_learning_rate "
    "gradient_clip_norm label_smoothing lars_epsilon length_penalty mask_target "
    "min_score mixup momentum moving_average_decay nms_iou proposal_nms_iou random_erasing "
    "rare_target score_seconds squeeze_excite target warmup_epochs warmup_from "
    "watchdog_seconds weight_decay",
    # Never, none, the default; or no file, which is refused where the data are opened.
    "": "augmentation best_by class_weights compilation_cache data_dir data_env data_fallback "
    "dataset decay_steps eval_annotations eval_files eval_offset eval_references eval_source "
    "eval_target freeze init_env init_from init_without learning_rate_decay_steps "
    "log_step_count_steps mlperf.format mlperf.org mlperf.platform profile_steps "
    "steps_of steps_per_checkpoint steps_per_eval tracker train_files train_source "
    "train_target vocabulary_file warmup_steps",
    (): "box_features image_sizes learning_rate_decay_epochs learning_rate_decay_factors "
    "mask_features",
    # Devices are still compared at each start.
    10**9: COUNTS + "check_devices_every min_ratings shuffle_buffer_size",
    1e30: "gradient_clip_norm",  # clips nothing
    1.5: "schedule_epochs",
}


def read_and_plan(config: Any) -> None:
    """All that is checked before devices, data or files are touched."""
    settings = read_settings(config, "/nowhere")
    keys.read_config(locations.Keys, config)
    benchmark = settings.load_benchmark("")
    if "/" in str(benchmark.bn_span):
        parts: Any = settings.gradient_accumulation_steps
        sharding.check_image_span(str(benchmark.bn_span), settings.train_batch_size, parts)
        sharding.group_size(benchmark.bn_span, int(str(benchmark.bn_span).partition("/")[2]))
    else:
        sharding.group_size(benchmark.bn_span, 64)
    declared = benchmark.declared_examples("train")
    plan = make_plan(settings, benchmark, declared or 10_000)
    for step in (0, plan.total_steps - 1):
        assert math.isfinite(plan.learning_rate(step))


def trials(key: str, value: Any) -> list[Any]:
    """Values to try for a key that has a sensible one."""
    kind = type(value)
    is_duration = kind is str and ("steps" in key or key == "eval_offset")
    others = "profile_steps", "steps_of"  # a range, and a workdir
    durations = DURATIONS if is_duration and key not in others else []
    return [*WRONG[kind], *durations, *EMPTY.get(kind, ())]


def put(config: Any, key: str, value: Any) -> None:
    """Gives a key a value of any type."""
    *parents, last = key.split(".")
    inside = operator.attrgetter(".".join(parents))(config) if parents else config
    with config.unlocked():
        del inside[last]
        inside[last] = value


@pytest.mark.parametrize(
    "name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)]
)
def test_every_key_refuses_nonsense(name, monkeypatch):
    for module, function in ((keys, "get_type_hints"), (benchmarks, "modules")):  # most of the time
        monkeypatch.setattr(module, function, functools.cache(getattr(module, function)))
    config = languages.get_config() if name == "languages" else load(name)
    config = config.copy_and_resolve_references()
    accepted = []
    for key, value in keys.flat(config).items():
        for trial in trials(key, value):
            put(config, key, trial)
            try:
                read_and_plan(config)
            except UserError as error:
                text = str(error)
                assert key.rpartition(".")[2] in text, (key, trial, text)
                assert "\n" not in text and len(text) < 4100, (key, text)
            else:
                if key not in MEANINGFUL.get(trial, "").split():
                    accepted.append((key, trial))
        put(config, key, value)
    read_and_plan(config)
    assert accepted == []
