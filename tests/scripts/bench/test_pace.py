"""scripts/bench/pace.py, as the preparation calls it."""

import re
import shlex

from scripts import prepare


def test_the_pace_is_measured(tmp_path, monkeypatch):
    arguments = ["--users=300", "--items=99", "--ratings=6000", f"--out={tmp_path}"]
    flags = shlex.split(prepare.make("ratings", arguments).partition("main.py")[2])
    line = r"on this machine: \S+ s/step measured, \S+ steps and \S+ evaluations: about .*"
    assert re.fullmatch(line, prepare.pace(flags))
    reason = prepare.pace([*flags, "--config.num_users=98"])
    assert reason.startswith("on this machine: not measured: ERROR: config.num_users=98")
    monkeypatch.setattr(prepare, "_PATIENCE", 0.1)
    assert prepare.pace(flags).startswith("on this machine: compiling and a first step take more")
