"""Folders of files, commands that prepare them, as a user types them, and spoilt records."""

import json
import os
import pathlib
import re
import shlex
import sys
import warnings

import absl.flags
import pytest
from ml_collections import config_flags

import benchmarks
from common.data import records
from common.preparation.folders import Folder
from common.tensorflow import tensorflow
from scripts import prepare


def place(folder, files):
    """Writes {name: bytes, text, or a value for JSON} below a folder, and opens the folder."""
    for name, content in files.items():
        path = pathlib.Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(content, bytes):
            content = (content if isinstance(content, str) else json.dumps(content)).encode()
        path.write_bytes(content)
    return Folder.open(str(folder))


def choose(folder):
    """The format of a folder that `prepare` takes."""
    return prepare.choose(folder, prepare.dataset_formats(folder))


def follow(refusal, out):
    """Types the command for photos that a refusal advises; returns its flags and its last line."""
    command = re.search(r"type python -m scripts.prepare imagenet (.*) --out", str(refusal.value))
    assert command is not None
    flags = shlex.split(command[1])
    return flags, prepare.make("imagenet", [*flags, f"--out={out}"])


def leaves(name, arguments, capsys):
    """(exit code, the one line on stderr that says why) of a preparation that fails."""
    capsys.readouterr()
    title = f"prepare {name}"
    with pytest.raises(SystemExit) as leaving:
        prepare.run(title, lambda: prepare.make(name, arguments))
    code, output = leaving.value.code, capsys.readouterr().err.splitlines()
    if isinstance(code, str):  # sys.exit prints it
        code, output = 1, [*output, *code.splitlines()]
    lines = [line for line in output if line.startswith(f"{title}: ")]
    lines = [line for line in lines if "starting TensorFlow" not in line]
    assert len(lines) == 1 and lines[0] == output[-1], output
    return code, lines[0]


def check_data(config, folder, cache):
    """The numbers of examples of a recipe's data in a folder, which --mode=doctor --full accepts.

    Raises DataError for the first fault. `cache` is a folder for the index.
    """
    declared = [key for key in config if key.startswith(("num_train_", "num_eval_"))]
    config.update({"data_dir": str(folder), "train_batch_size": 1, **dict.fromkeys(declared, 0)})
    benchmark = benchmarks.load(config, str(cache))
    assert not [fault for split in ("train", "eval") for fault in benchmark.check(split)]
    return benchmark.num_examples("train"), benchmark.num_examples("eval")


def write_shards(folder, split, rows, count):
    """Writes the shards of a split from a list of serialized examples."""
    for i, run in enumerate(records.shard_runs(len(rows), count)):
        path = os.path.join(folder, records.shard_name(split, i, count))
        records.write_shard(path, rows[run.start : run.stop])


def rewrite(path, change):
    """Replaces the records of a shard by what `change` makes of their list."""
    path.write_bytes(b"".join(map(records.frame, change([*records.read_shard(str(path))]))))


def edit(path, change, number=0):
    """Applies `change` to the features, by key, of a record of a shard."""

    def edited(rows):
        message = tensorflow().train.Example.FromString(rows[number])
        change(message.features.feature)
        return [*rows[:number], message.SerializeToString(), *rows[number + 1 :]]

    rewrite(path, edited)


def typed(line, monkeypatch):
    """(the words, the config) of the command at the end of a line, parsed as main.py does."""
    words = shlex.split("python main.py " + line.partition("python main.py ")[2])[1:]
    assert line.count("python main.py ") == 1 and words[-1].startswith("--workdir=runs/")
    monkeypatch.chdir(pathlib.Path(__file__).parents[2])
    monkeypatch.setattr(sys, "argv", words)  # config_flags looks for the overrides there
    flags = absl.flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=flags)
    absl.flags.DEFINE_string("workdir", "", "", flag_values=flags)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of load_module, in ml_collections
        assert flags(words)[1:] == []
    return words, flags.config
