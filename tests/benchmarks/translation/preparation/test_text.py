"""`prepare text` on files, read back by hand, and its continuation."""

import gzip
import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks.translation import vocabulary
from benchmarks.translation.preparation import text
from benchmarks.translation.schema import SIDES
from common.data import records as shard_files
from common.errors import DataError
from common.tensorflow import tensorflow
from configs import transformer
from scripts import prepare
from tests.benchmarks.resnet.preparation.test_imagenet_gcs import assert_same
from tests.benchmarks.translation.preparation.test_examples import unpack
from tests.helpers.preparation import check_data
from tests.test_main import ROOT

WORDS = "the cat sat on a mat and saw one small bird_ over there \\ é\u00a0 x\u2028y 😀 ?"
SETTINGS = ["--vocabulary_size=120", "--length=32", "--shards=3", "--workers=1"]
NAMES = [shard_files.shard_name("translate_packed-train", k, 3) for k in range(3)]
DEV = "translate-dev-00000-of-00001"


def sentences(count, seed):
    """Pairs of lines; some are long, and two have an empty side."""
    draw = np.random.default_rng(seed)
    pairs = []
    for i in range(count):
        sizes = draw.integers(1, 12, 2) if i % 20 else (60, 4)
        sides = [" ".join(draw.choice(WORDS.split(" "), size)).strip() or "the" for size in sizes]
        pairs.append((f"{i} {sides[0]}", f"{sides[1]} {i}"))
    pairs[3], pairs[5] = ("", "there"), ("the", " \u00a0")
    return pairs


TRAIN, EVAL = sentences(200, 0), [p for p in sentences(30, 1) if all(s.strip() for s in p)]


def write_lines(path, lines, end="\n"):
    path.write_bytes("\n".join(lines).encode() + end.encode())


def write_text(folder):
    """Writes the files; returns the arguments."""
    for split, pairs, end in (("train", TRAIN, "\n"), ("eval", EVAL, "")):
        for side, language in enumerate(("en", "de")):
            write_lines(folder / f"{split}.{language}", [pair[side] for pair in pairs], end)
    return arguments_of(folder)


def arguments_of(folder):
    return [
        *(f"--train_source={folder}/train.en", f"--train-target={folder}/train.de"),
        *(f"--eval_source={folder}/eval.en", f"--eval_target={folder}/eval.de"),
        *SETTINGS,
    ]


def contents(folder):
    """{name: bytes} of the files in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def small():
    """The Transformer's recipe for these records."""
    config = transformer.get_config()
    config.update({"row_length": 32, "eval_lengths": (200,), "vocabulary_size": 0})
    return config


def rows_of(path):
    """The rows of a file as {name: int64[n]}."""
    rows = []
    for record in shard_files.read_shard(str(path)):
        feature = tensorflow().train.Example.FromString(record).features.feature
        rows.append({name: np.array(feature[name].int64_list.value) for name in feature})
    return rows


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, arguments, output) of the records of the files."""
    folder = tmp_path_factory.mktemp("text")
    arguments = write_text(folder)
    prepare.make("text", [*arguments, f"--out={folder}/records"])
    return folder, arguments, folder / "records"


def test_every_pair_is_in_the_records(made, tmp_path):
    _, _, out = made
    encoder = vocabulary.load_vocabulary(str(out / "vocab.subwords"))
    assert set(contents(out)) == {
        *(*NAMES, DEV, "vocab.subwords"),
        *("manifest.json", "references.txt", "sources.txt"),
    }
    pairs = [pair for name in NAMES for row in rows_of(out / name) for pair in unpack(row)]
    assert all(side[-1] == 1 and 0 not in side for pair in pairs for side in pair)
    texts = [tuple(encoder.decode(side) for side in pair) for pair in pairs]
    kept = [tuple(s.strip() for s in pair) for pair in TRAIN if all(s.strip() for s in pair)]
    short = [p for p in kept if max(len(encoder.encode(side)) + 1 for side in p) <= 32]
    assert 150 < len(short) < len(kept) == 198
    assert sorted(texts) == sorted(short)
    assert texts != short  # shuffled
    evaluated = [[encoder.decode(row[side]) for side in SIDES] for row in rows_of(out / DEV)]
    assert evaluated == [[side.strip() for side in pair] for pair in EVAL]
    references = (out / "references.txt").read_bytes()
    assert references == "".join(f"{pair[1]}\n" for pair in EVAL).encode()
    content = json.loads((out / "manifest.json").read_text())
    train = content["splits"]["train"]
    assert train["left_out"] == {"empty": 2, "long": len(kept) - len(short)}
    assert train["pairs"] == len(short) and content["vocabulary"]["sha256"] == encoder.digest
    sizes = [row["pairs"] for row in train["shards"]]
    assert max(sizes) - min(sizes) <= 20  # dealt evenly; long pairs fall out
    assert check_data(small(), out, tmp_path) == (train["examples"], len(EVAL))


def test_the_same_bytes_in_processes(made, tmp_path, monkeypatch):
    _, arguments, out = made
    monkeypatch.setattr("benchmarks.translation.preparation.examples._PER_PROCESS", 1)
    prepare.make("text", [*arguments, f"--out={tmp_path}/out", "--workers=2"])
    assert contents(tmp_path / "out") == contents(out)


ONE_SHARD = """
import sys, time
from benchmarks.translation.preparation import examples
from scripts import prepare
calls, write = [], examples.records.write_shard

def first(*arguments):
    calls.append(arguments)
    return write(*arguments) if len(calls) == 1 else time.sleep(600)

examples.records.write_shard, examples._PER_PROCESS = first, 1
prepare.make("text", sys.argv[1:])
"""


@pytest.mark.long
def test_a_killed_run_leaves_no_process_and_continues(made, tmp_path, capsys):
    _, arguments, out = made
    again = [*arguments, f"--out={tmp_path}/out"]
    command = [sys.executable, "-c", ONE_SHARD, *again, "--workers=2"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    state = tmp_path / "out" / "prepare_state"
    while process.poll() is None and not list(state.glob("translate_packed-train-*.json")):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()  # until its workers, which have its output, have ended, too
    assert process.returncode == -signal.SIGKILL
    assert set(contents(tmp_path / "out")) == {NAMES[0], "vocab.subwords", "prepare.lock"}
    capsys.readouterr()
    prepare.make("text", again)
    assert "continuing: 1 of 3 shards are finished" in capsys.readouterr().out
    assert contents(tmp_path / "out") == contents(out)


def sgm(lines):
    rows = "".join(f'<seg id="{i}"> {line} </seg>\n' for i, line in enumerate(lines, 1))
    return f'<refset setid="x">\n<doc docid="1">\n<p>\n{rows}</p>\n</doc>\n</refset>\n'.encode()


def test_gzip_and_sgm_give_the_same_records(made, tmp_path):
    folder, _, out = made
    flags = [f"--out={tmp_path}/out", *SETTINGS]
    for side, (name, language) in enumerate((("source", "en"), ("target", "de"))):
        train = gzip.compress((folder / f"train.{language}").read_bytes())
        (tmp_path / f"train.{language}.gz").write_bytes(train)
        (tmp_path / f"t-src.{language}.sgm").write_bytes(sgm(p[side] for p in EVAL))
        flags.append(f"--train_{name}={tmp_path}/train.{language}.gz")
        flags.append(f"--eval_{name}={tmp_path}/t-src.{language}.sgm")
    prepare.make("text", flags)
    made_here, expected = contents(tmp_path / "out"), contents(out)
    for name in (*NAMES, DEV, "vocab.subwords"):
        assert made_here[name] == expected[name]


def test_from_and_to_gs(gcs, made):
    folder, _, out = made
    raw, target = gcs.bucket("read"), gcs.bucket("objects")
    for path in folder.iterdir():
        if path.is_file():
            gcs.write(f"{raw}/text/{path.name}", path.read_bytes())
    prepare.make("text", [*arguments_of(f"{raw}/text"), f"--out={target}/records"])
    expected = contents(out)
    assert_same(gcs, f"{target}/records", expected)
    with pytest.raises(DataError):
        vocabulary.load_vocabulary(f"{raw}/nothing")


@pytest.mark.parametrize(
    ("rows", "length", "recipe", "batch", "epochs"),
    [
        (99_999, 256, "small.py:transformer", 64, 10),
        (100_000, 256, "transformer", 0, 0),
        (5_078, 256, "small.py:transformer", 16, 20),  # 5000 steps of 16 are 15.8 epochs
        (5_079, 256, "small.py:transformer", 64, 30),  # 2500 of 64: 31.5
        (400, 256, "small.py:transformer", 16, 100),  # 200 epochs would be too many
        (850, 64, "small.py:transformer", 64, 100),
        (3, 256, "small.py:transformer", 1, 100),
    ],
)
def test_the_schedule_fits_the_number_of_rows(rows, length, recipe, batch, epochs):
    found, flags = text._schedule(rows, length)
    assert found == recipe
    if recipe == "transformer":
        assert flags == []
        return
    assert flags[:-5] == (
        [] if rows * length < 1_300_000 else ["--config.width=256", "--config.mlp_width=1024"]
    )
    assert flags[-5:] == [
        f"--config.train_batch_size={batch}",
        f'--config.train_steps="{epochs} epochs"',
        f'--config.warmup_steps="{epochs // 10} epochs"',
        f'--config.steps_per_eval="{epochs // 5} epochs"',
        f'--config.steps_per_checkpoint="{epochs // 5} epochs"',
    ]


def test_a_batch_is_a_power_of_two_of_a_quarter_of_the_rows():
    assert [text._batch(32, rows) for rows in (1, 7, 8, 15, 16, 127, 128, 9999)] == [
        *(1, 1, 2, 2, 4, 16, 32, 32)
    ]
