"""`prepare text`: faults of the files and of the arguments, and other text to evaluate on."""

import gzip
import json

import pytest

from benchmarks.translation.preparation import text, text_formats
from configs import transformer
from scripts import prepare
from tests.benchmarks.translation.preparation.test_text import (
    DEV,
    EVAL,
    NAMES,
    rows_of,
    write_lines,
    write_text,
)
from tests.helpers.preparation import leaves


def test_other_text_to_evaluate_on_leaves_the_training_files(tmp_path, capsys):
    arguments = write_text(tmp_path)
    out = tmp_path / "out"
    prepare.make("text", [*arguments, f"--out={out}"])
    times = {name: (out / name).stat().st_mtime_ns for name in (*NAMES, "vocab.subwords")}
    for side, language in enumerate(("en", "de")):
        write_lines(tmp_path / f"eval.{language}", [pair[side] for pair in EVAL[4:9]])
    (tmp_path / "eval.en").write_bytes((tmp_path / "eval.en").read_bytes()[:-2] + b"\xff\n")
    _, line = leaves("text", [*arguments, f"--out={out}"], capsys)
    assert "eval.en, line 5 is not UTF-8" in line and (out / "manifest.json").exists()
    left_out = json.loads((out / "manifest.json").read_text())["splits"]["train"]["left_out"]
    long = "bird_ " * 90
    write_lines(tmp_path / "eval.en", [*(pair[0] for pair in EVAL[4:8]), long])
    capsys.readouterr()
    last = prepare.make("text", [*arguments, f"--out={out}"])
    printed = capsys.readouterr().out
    assert "pairs; eval: 5" in printed and "continuing: 3 of 3 shards" in printed
    assert times == {name: (out / name).stat().st_mtime_ns for name in times}
    assert (
        json.loads((out / "manifest.json").read_text())["splits"]["train"]["left_out"] == left_out
    )
    lines = (out / "sources.txt").read_text().split("\n")[:-1]
    assert lines == [*(pair[0] for pair in EVAL[4:8]), long] and len(rows_of(out / DEV)) == 5
    # The command fits the data.
    size = len(rows_of(out / DEV)[-1]["inputs"])
    assert size > 128
    assert f"warning: an evaluation sentence has {size} tokens" in printed
    flags = f"--config.row_length=32 --config.eval_lengths=32,64,128,{size} --workdir=runs/out"
    (gnmt,) = (line for line in printed.splitlines() if "configs/small.py:gnmt" in line)
    assert gnmt.endswith(f"--config.eval_lengths=32,64,128,{size} --workdir=runs/out_gnmt")
    assert last.endswith(flags) and f"configs/small.py:transformer --config.data_dir={out} " in last


@pytest.mark.parametrize(
    ("rows", "length", "recipe", "batch", "epochs", "warmup"),
    [
        (283, 256, "small.py:transformer", 16, 100, 10),  # 3,000 captions
        (2016, 256, "small.py:transformer", 16, 40, 4),  # 29,000
        (8_200, 64, "small.py:transformer", 64, 40, 4),
        (20_000, 256, "small.py:transformer", 64, 10, 1),
        (9, 32, "small.py:transformer", 2, 100, 10),
        (1, 256, "small.py:transformer", 1, 100, 10),
        (566_340, 256, "transformer", 0, 0, 0),  # WMT
    ],
)
def test_the_command_fits_the_text(rows, length, recipe, batch, epochs, warmup):
    name, flags = text._schedule(rows, length)
    assert name == recipe and bool(flags) == bool(batch)
    if batch:
        assert f"--config.train_batch_size={batch}" in flags
        assert f'--config.train_steps="{epochs} epochs"' in flags
        assert f'--config.warmup_steps="{warmup} epochs"' in flags
        assert ("--config.width=256" in flags) == (rows == 20_000)


def test_the_vocabulary_fits_the_text(tmp_path):
    """1,000 subwords at least; of Chinese, whose characters are many, more than characters."""
    arguments = [f"--eval_source={tmp_path}/a", f"--eval_target={tmp_path}/a", "--workers=1"]
    arguments += [f"--train_source={tmp_path}/a", f"--train_target={tmp_path}/a"]
    for characters, size in (("the cat sat on a mat", 1000), (map(chr, range(20000, 23000)), 3003)):
        write_lines(tmp_path / "a", [" ".join(characters), "b"])
        prepare.make("text", [*arguments, f"--out={tmp_path}/{size}"])
        settings = json.loads((tmp_path / f"{size}/manifest.json").read_text())["settings"]
        assert abs(settings["vocabulary_size"] - size) < 20


def test_the_values_are_those_of_the_config():
    config = transformer.get_config()
    assert config.row_length == text.ROW_LENGTH
    assert config.eval_lengths == text.EVAL_LENGTHS


VOCABULARY = ("--vocabulary=FOLDER/new",)


@pytest.mark.parametrize(
    ("name", "data", "flags", "words"),
    [
        ("train.de", b"a\nb\n", (), "train.en has 200 lines and FOLDER/train.de 2: line i"),
        ("train.de", None, (), "there is no FOLDER/train.de"),
        ("eval.en", b"a\nb\xffc\n", (), "eval.en, line 2 is not UTF-8 (byte 0xff)"),
        ("train.en", b"\n" * 200, (), "hold no pair with text on both sides"),
        ("train.en", b"x" * (1 << 20) + b"\n", (), "FOLDER/train.en, line 1 is longer than 1 MiB"),
        ("train.en", gzip.compress(b"a\n" * 9999, mtime=0)[:-9], (), "train.en is damaged"),
        ("new", b"the\n", VOCABULARY, "FOLDER/new is not a vocabulary: give a file"),
        ("new", b"<unk>\n<s>\n</s>\nthe\n", VOCABULARY, "new is a vocabulary of tokenized text"),
        ("a.tgz", b"", ("--eval_source=FOLDER/a.tgz",), "FOLDER/a.tgz is an archive: unpack it"),
        ("new", b"", ("--max_tokens=1",), "all training pairs have more than --max_tokens=1"),
        ("new", b"", ("--max_tokens=33",), "--max_tokens=33 must not exceed --length=32"),
        ("new", b"", ("--train_target=a,b",), "--train_source has 1 files and --train_target 2"),
        ("new", b"", ("--columns=1",), "--columns=1 must be two"),
        ("new", b"", ("--train_source=", "--train_target="), "give --train, or --train_source"),
    ],
    ids=range(14),  # a gzip file, which would be a name, has the time of its making
)
def test_a_fault_takes_one_line(tmp_path, capsys, name, data, flags, words):
    arguments = write_text(tmp_path)
    path = tmp_path / name
    path.write_bytes(data) if data is not None else path.unlink()
    flags = [flag.replace("FOLDER", str(tmp_path)) for flag in flags]
    code, line = leaves("text", [*arguments, *flags, f"--out={tmp_path}/out"], capsys)
    assert code in (1, 2) and words in line.replace(str(tmp_path), "FOLDER"), line
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert "--max_tokens=1" in flags or not list((tmp_path / "out").glob("*-train-*"))


@pytest.mark.parametrize(
    ("flags", "sides"),
    [
        ([], ["a/x.en,y.en", "b/x.de.gz,y.de", "v.en", "v.de"]),
        (["--source_language=en"], ["a/x.en,y.en", "b/x.de.gz,y.de", "v.en", "v.de"]),
        (["--source_language=de"], ["b/x.de.gz,y.de", "a/x.en,y.en", "v.de", "v.en"]),
        (["--target_language=eng"], ["b/x.de.gz,y.de", "a/x.en,y.en", "v.de", "v.en"]),
        (["--source_language=fr"], None),
    ],
)
def test_the_language_asked_for_turns_files_of_lines(flags, sides):
    names = ("train_source", "train_target", "eval_source", "eval_target")
    given = ["a/x.en,y.en", "b/x.de.gz,y.de", "v.en", "v.de"]
    argv = [f"--{name}={paths}" for name, paths in zip(names, given, strict=True)]
    if not sides:
        with pytest.raises(SystemExit):
            prepare.parse("text", [*argv, *flags, "--out=o"])
        return
    args = prepare.parse("text", [*argv, *flags, "--out=o"])
    assert [getattr(args, name) for name in names] == sides


def test_only_newlines_end_lines(tmp_path):
    text = "one\u2028line\x0cof\x85three\u2029\r\nnext"
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert list(text_formats.lines(f"{tmp_path}/a")) == text.split("\n")
