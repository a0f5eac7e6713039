"""The data and the table of `scripts/quickstart.sh finetune`."""

import collections
import json
import pathlib
import re
import sys

import pytest

from ops.preparation import digits
from scripts import finetune_digits, prepare
from tests.ops.preparation import test_schema


def test_some_digits_are_the_first_images_of_the_complete_set():
    every, small = digits.examples(), digits.examples(range(5, 10), per_class=20)
    parsed = {split: list(map(test_schema.parse, rows)) for split, rows in small.items()}
    complete = {split: list(map(test_schema.parse, rows)) for split, rows in every.items()}
    labels = collections.Counter(row["image/class/label"] for row in parsed["train"])
    assert labels == dict.fromkeys(range(1, 6), 20)
    for split, rows in complete.items():
        names = [row["image/filename"] for row in rows if row["image/class/label"] > 5]
        kept = [row["image/filename"] for row in parsed[split]]
        assert kept == [name for name in names if name in kept]
        if split == "validation":
            assert kept == names
        for digit in range(5, 10):
            own = [name for name in names if name.startswith(b"digit_%d" % digit)]
            taken = [name for name in kept if name.startswith(b"digit_%d" % digit)]
            assert taken == own[: len(taken)]
    assert {row["image/class/synset"] for row in parsed["train"]} == {
        b"digit_%d" % digit for digit in range(5, 10)
    }


@pytest.mark.parametrize("flags", [["--digits=9-5"], ["--digits=5"], ["--per_class=1"]])
def test_odd_tasks_are_refused(flags, tmp_path, capsys):
    with pytest.raises(SystemExit):
        prepare.make("digits", ["--out", str(tmp_path), *flags])
    assert "must be" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_table_has_a_mean():
    scores = {"probe": [0.75], "tuned": [0.9, 0.95, 1.0]}
    assert finetune_digits.table(scores).splitlines() == [
        " " * 32 + "seed 2     seed 3     seed 4     mean",
        "probe" + " " * 28 + "75.0 %                          75.0 %",
        "tuned" + " " * 28 + "90.0 %     95.0 %    100.0 %    95.0 %",
    ]


def test_the_commands_and_their_scores(tmp_path, capsys, monkeypatch):
    logs, commands = [], []

    def run(log, *command):
        logs.append(log.relative_to(tmp_path / "out").as_posix())
        commands.append(command)
        (workdir,) = [f[len("--workdir=") :] for f in command if "--workdir=" in f] or [None]
        if "--mode=probe" in command:
            pathlib.Path(workdir).mkdir()
            pathlib.Path(workdir, "probe.json").write_text('{"top_1_accuracy": 0.5}')
        elif "--config=configs/finetune_digits.py" in command:
            pathlib.Path(workdir).mkdir()
            rows = [("eval", 0.1), ("eval", len(commands) / 10), ("train", 0.2)]
            lines = [json.dumps({"split": split, "top_1_accuracy": v}) for split, v in rows]
            pathlib.Path(workdir, "metrics.jsonl").write_text("\n".join(lines))

    monkeypatch.setattr(finetune_digits, "run", run)
    finetune_digits.main([f"--folder={tmp_path / 'out'}"])
    runs = [f"{way}_{seed}.log" for way in ("tuned", "scratch") for seed in (2, 3, 4)]
    assert logs == ["digits_0-4.log", "digits_5-9.log", "pretrained.log", "probe.log", *runs]
    assert [command[-1] for command in commands[:2]] == ["--digits=0-4", "--per_class=20"]
    start = f"--config.init_from={tmp_path / 'out' / 'pretrained'}"
    assert [start in command for command in commands] == [False] * 3 + [True] * 4 + [False] * 3
    rows = capsys.readouterr().out.splitlines()[3:7]
    assert [row.split()[-2] for row in rows[1:]] == ["50.0", "60.0", "90.0"]


def test_a_command_that_fails_shows_its_last_lines(tmp_path, capsys):
    count = "import sys; print(*range(10), sep=chr(10)); sys.exit(3)"
    log = tmp_path / "x.log"
    fault = f"^ERROR: exit code 3; all of its output is in {re.escape(str(log))}$"
    with pytest.raises(SystemExit, match=fault):
        finetune_digits.run(log, sys.executable, "-c", count)
    output = capsys.readouterr()
    assert output.out.startswith("$ python -c ") and output.err == "5\n6\n7\n8\n9\n"
