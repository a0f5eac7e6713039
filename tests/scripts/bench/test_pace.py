"""scripts/bench/pace.py, as the preparation calls it."""

import re
import shlex
import types

from scripts import prepare
from scripts.bench import pace as bench_pace


def test_the_pace_is_measured(tmp_path, monkeypatch):
    arguments = ["--users=300", "--items=99", "--ratings=6000", f"--out={tmp_path}"]
    flags = shlex.split(prepare.make("ratings", arguments).partition("main.py")[2])
    line = r"on this machine: \S+ s/step measured, \S+ steps and \S+ evaluations: about .*"
    assert re.fullmatch(line, prepare.pace(flags))
    reason = prepare.pace([*flags, "--config.num_users=98"])
    assert reason.startswith("on this machine: not measured: ERROR: config.num_users=98")
    monkeypatch.setattr(prepare, "_PATIENCE", 0.1)
    assert prepare.pace(flags).startswith("on this machine: compiling and a first step take more")


def test_the_time_of_all_steps_and_evaluations(monkeypatch, capsys):
    """300 steps of 2.5 s, and 4 evaluations of 45 s."""
    settings = types.SimpleNamespace(compilation_cache="")
    config = types.SimpleNamespace(lock=lambda: None)
    programs = types.SimpleNamespace(benchmark=types.SimpleNamespace(open=lambda split: 90))
    plan = types.SimpleNamespace(total_steps=300, evaluations=4)
    monkeypatch.setattr(
        bench_pace, "flags", types.SimpleNamespace(FLAGS=types.SimpleNamespace(config=config))
    )
    monkeypatch.setattr(bench_pace, "read_settings", lambda config: settings)
    monkeypatch.setattr(bench_pace.devices, "open_platform", lambda: "cpu")
    monkeypatch.setattr(bench_pace.compiler, "use_cache", lambda folder: None)
    monkeypatch.setattr(bench_pace.Programs, "make", lambda settings: programs)
    monkeypatch.setattr(bench_pace, "make_plan", lambda *_: plan)
    monkeypatch.setattr(bench_pace.pace, "seconds_per_step", lambda *_: 2.5)
    monkeypatch.setattr(bench_pace.pace, "seconds_per_evaluation", lambda *_: 45.0)
    bench_pace.main([])
    assert capsys.readouterr().out.splitlines() == [
        "on this machine: 2.5 s/step measured, 300 steps: about 12 min",  # 750 s
        "on this machine: 2.5 s/step measured, 300 steps and 4 evaluations: about 16 min",  # 930
    ]
