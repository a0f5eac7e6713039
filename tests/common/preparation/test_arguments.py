"""The command that a preparation prints last: a user with these data should type it."""

import numpy as np
import pytest
from PIL import Image

from benchmarks.detection.preparation import coco
from benchmarks.resnet.preparation import imagenet
from common import foreign
from common.preparation import arguments
from engine.plan import read_settings
from scripts import prepare
from tests.benchmarks.detection.preparation.test_coco import write_coco
from tests.benchmarks.resnet.preparation.test_imagenet import encoded
from tests.conftest import plan_of
from tests.helpers.preparation import place, typed

RESNET = "hf-hub:timm/resnet50.a1_in1k"


def photos(folder, per_class, size):
    draw = np.random.default_rng(0)
    classes = ("cats", "dogs", "it's a bird")
    noise = (draw.integers(0, 256, (*size, 3), np.uint8) for _ in range(3 * per_class))
    names = (f"{name}/{i}.jpg" for name in classes for i in range(per_class))
    images = map(encoded, map(Image.fromarray, noise))
    place(folder, dict(zip(names, images, strict=True)))
    return [f"--train={folder}", "--layout=folder"]


def coco_flags(folder, *more):
    write_coco(folder)
    flags = []
    for split in ("train", "val"):
        flags.append(f"--{split}_images={folder}/open/{split}2017")
        flags.append(f"--{split}_annotations={folder}/open/instances_{split}2017.json")
    return [*flags, *more]


# Preparation, its arguments, the recipe, the model to begin with, the batch, the size of images.
CASES = {
    "245 photos": ("imagenet", lambda f: photos(f, 81, (230, 300)), "finetune", RESNET, 16, 224),
    "32 pixels": ("imagenet", lambda f: photos(f, 25, (32, 32)), "finetune", RESNET, 8, 64),
    "160 pixels": ("imagenet", lambda f: photos(f, 9, (160, 161)), "finetune", RESNET, 8, 160),
    "boxes": (*("coco", coco_flags, "finetune.py:ssd"), *(foreign.RESNET.format(depth=34), 8, 300)),
    "masks": (
        *("coco", lambda f: coco_flags(f, "--masks"), "finetune.py:mask_rcnn"),
        *(foreign.MASK_RCNN, 8, None),
    ),
    "digits": ("digits", lambda f: [], "digits", "", 64, 32),
    "few digits": ("digits", lambda f: ["--digits=5-9", "--per_class=4"], "digits", "", 8, 32),
    "scenes": ("digit_scenes", lambda f: ["--train_images=20"], "ssd_digits", "", 8, 128),
    "ratings": (
        *("ratings", lambda f: ["--users=300", "--items=99", "--ratings=6000"]),
        *("ncf_synthetic", "", 2048, None),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_command_fits_the_data(case, tmp_path, monkeypatch):
    name, flags, recipe, model, batch, size = case
    out = tmp_path / "it's my data"
    line = prepare.make(name, [*flags(tmp_path / "raw"), f"--out={out}"])
    words, config = typed(line, monkeypatch)
    assert f"--config=configs/{recipe if '.py:' in recipe else f'{recipe}.py'}" in words
    assert f"--workdir=runs/{out.name}" in words
    assert (config.data_dir, config.init_from) == (str(out), model)
    assert (config.train_batch_size, config.get("image_size")) == (batch, size)
    benchmark = read_settings(config.lock(), str(tmp_path)).load_benchmark(str(tmp_path))
    images = benchmark.open("train")
    check_plan(config, images)


def check_plan(config, examples):
    """The schedule of a config suits so many training examples."""
    plan = plan_of(config, examples)
    total, batch = plan.total_steps, config.train_batch_size
    assert batch <= examples and 5 <= total * batch / examples <= 1000
    assert plan.learning_rate.warmup_steps <= total / 5
    assert (plan.eval_every.next_after(0) or total) < total


@pytest.mark.parametrize("examples", [*range(1, 40), 57, 245, 2_934, 19_999])
def test_the_rule_for_small_sets(examples, monkeypatch):
    """Batches of about an eighth of the set, and 20 epochs."""
    values = arguments.fitted(examples, largest=64, epochs=20, least=100)
    batch, steps = values["train_batch_size"], values["train_steps"]
    assert batch <= examples and batch.bit_count() == 1 and batch <= 64
    assert batch >= min(8, examples / 2, 64) and batch >= min(64, examples / 16)
    assert steps >= 100 and (steps == 100 or 20 <= steps * batch / examples < 20 + batch / examples)
    line = arguments.train_command("finetune", "x", *arguments.keys(**values))
    assert values["warmup_steps"] == steps // 10
    if examples >= 40:
        check_plan(typed(line, monkeypatch)[1], examples)


@pytest.mark.parametrize("examples", [41, 245, 2_934, 19_999])
def test_photos_without_weights_have_a_command(examples, monkeypatch):
    batch = arguments.fitted(examples, largest=64, epochs=20, least=100)["train_batch_size"]
    _, config = typed(imagenet.small_command("x", examples, batch, 64), monkeypatch)
    check_plan(config, examples)
    assert config.resnet_depth == 18 and config.image_size == config.eval_image_size == 64


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("examples", [60, 292, 2_000, 19_999, 20_000, 99_999])
def test_detectors_have_commands_for_any_size(examples, masks, monkeypatch):
    recipe, flags = coco.small_data(examples, masks)
    assert recipe.startswith("finetune.py:") == (examples < 20_000)
    check_plan(typed(arguments.train_command(recipe, "x", *flags), monkeypatch)[1], examples)


def test_many_photos_train_from_random_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(arguments, "FEW", 20)
    flags = photos(tmp_path / "raw", 9, (300, 300))
    line = prepare.make("imagenet", [*flags, f"--out={tmp_path}/out"])
    assert line.endswith(
        f"--config=configs/resnet50.py --config.data_dir={tmp_path}/out --workdir=runs/out"
    )
