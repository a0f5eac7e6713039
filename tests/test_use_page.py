"""docs/use.md: its commands run, on a tiny model and tiny data."""

import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import train
from engine.plan import read_settings
from tests.conftest import make_tiny_config
from tests.test_main import ROOT, environment

PAGE = (ROOT / "docs" / "use.md").read_text()
# The page's names, and what stands for them here.
TINY = {
    "--config=configs/resnet50.py": "--config.eval_batch_size=8",
    "--config=configs/finetune.py": "--config.train_steps=2 --config.train_batch_size=8 "
    "--config.eval_batch_size=8 --config.image_size=16 "
    "--config.precision=float32 --config.input_streams=2",
    "scripts.prepare": "--shards=2 --validation_shards=1 --untimed --out=data/photos",
}
# Models of other benchmarks, which tests/commands/predict makes.
OTHERS = {f"--workdir=runs/{name}" for name in ("ssd_digits", "phrases", "ncf_synthetic")}
# Of published translators: tests/benchmarks/translation/transformer/test_marian.py.
OTHERS |= {"--model=$M", "--workdir=runs/memory", "ctranslate2/translate.py"}
# And of recipes and data that other tests have: tests/benchmarks/detection/test_weights_tuning.py.
OTHERS |= {"coco", "text"}
OTHERS |= {"scripts.demo"}  # tests/scripts/test_demo.py
OTHERS |= {f"--config=configs/finetune.py:{name}" for name in ("ssd", "transformer")}


@pytest.fixture(scope="module")
def place(tiny_records, tmp_path_factory):
    """A folder with a trained model, its weights as PyTorch names them, and photos."""
    folder = tmp_path_factory.mktemp("use")
    config = make_tiny_config(tiny_records, max_pool="torch", train_steps="4")
    train.train_and_evaluate(read_settings(config, str(folder / "runs/digits")))
    draw = np.random.default_rng(0)
    for name in (f"photos/{kind}/{i}.jpg" for kind in "ab" for i in range(10)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (20, 24, 3), np.uint8)).save(folder / name)
    export = ["main.py", "--mode=export", f"--workdir={folder}/runs/digits", "--format=hf"]
    call([*export, f"--out={folder}/hf"])
    return folder


def call(words):
    """Runs a command of Python; returns what it prints."""
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, shlex.join(words) + "\n" + done.stdout + done.stderr
    return done.stdout


def commands():
    """Those of the page's blocks that begin with `python`, as words, for a classifier."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    parsed = [words[1:] for words in map(shlex.split, lines) if words[:1] == ["python"]]
    return [words for words in parsed if not OTHERS & {*words}]


@pytest.mark.slow
def test_every_command_runs(place, tiny_records):
    names = {
        "data/digits_photos/3_0705.png": f"{place}/photos/a/3.jpg",
        "data/digits_photos": f"{place}/photos",
        "gs://bucket/imagenet": tiny_records,
        "hf-hub:timm/resnet50.a1_in1k": f"{place}/hf",
        "photos/": f"{place}/photos/",
        "MODEL": f"{place}/runs/digits",
        "=data/": f"={place}/data/",
        "=runs/": f"={place}/runs/",
    }
    parsed = commands()
    assert len(parsed) == 7
    for words in parsed:
        own = [next((w.replace(k, v) for k, v in names.items() if k in w), w) for w in words]
        more = [extra.split() for key, extra in TINY.items() if any(key in w for w in words)]
        call([*own, *(w.replace("=data/", f"={place}/data/") for w in sum(more, []))])
    programs = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    assert len(programs) == 2
    for text in programs:
        for name in ("data/digits_photos/3_0705.png", "data/digits_photos"):
            text = text.replace(name, names[name])
        assert call(["-c", text.replace("runs/", f"{place}/runs/").replace("32, 32", "16, 16")])
    for name in ("imported/checkpoints/0", "photos/checkpoints/2", "digits/report/report.html"):
        assert os.path.exists(f"{place}/runs/{name}"), name
    assert os.path.exists(f"{place}/runs/digits/export/savedmodel/1/saved_model.pb")
