"""scripts/bench/pace.py, as the preparation calls it."""

import re
import shlex

from scripts import prepare


def test_the_pace_is_measured(tmp_path, monkeypatch):
    last = prepare.make(
        "ratings", ["--users=300", "--items=99", "--ratings=6000", f"--out={tmp_path}"]
    )
    flags = shlex.split(last.partition("main.py")[2])
    assert re.fullmatch(
        r"on this machine \(.*\): \S+ s/step measured, \S+ steps and \S+ evaluations: about .*",
        prepare.pace(flags),
    )
    fault = prepare.pace([*flags, "--config.num_users=98"])
    assert fault.startswith("on this machine: not measured: ERROR: config.num_users=98")
    monkeypatch.setattr(prepare, "_PATIENCE", 0.1)
    assert prepare.pace(flags).startswith("on this machine: compiling and a first step take more")
