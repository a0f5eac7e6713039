"""The commands of `scripts/quickstart.sh finetune_ssd`, and its table."""

import json
import pathlib

from scripts import finetune_digits, finetune_scenes


def test_the_commands_and_their_scores(tmp_path, capsys, monkeypatch):
    commands = []

    def run(log, *command):
        commands.append(command[1:])
        if "--config=configs/finetune_ssd_digits.py" in command:
            (workdir,) = [f[len("--workdir=") :] for f in command if "--workdir=" in f]
            assert f"{log}" == f"{workdir}.log"
            pathlib.Path(workdir).mkdir()
            row = {"split": "eval", "mAP": len(commands) / 20}
            pathlib.Path(workdir, "metrics.jsonl").write_text(json.dumps(row))

    monkeypatch.setattr(finetune_digits, "run", run)
    finetune_scenes.main([f"--folder={tmp_path / 'out'}"])
    assert [command[-1] for command in commands[:2]] == ["--train_images=3000", "--train_images=60"]
    start = f"--config.init_from={tmp_path / 'out' / 'pretrained'}"
    assert [start in command for command in commands] == [False] * 3 + [True] * 6
    seeds = [f"--config.seed={seed}" for seed in (2, 3, 4)]
    assert [command[-1] for command in commands[3:]] == 2 * seeds
    rows = capsys.readouterr().out.splitlines()[3:6]
    assert rows[0].split() == ["seed", "2", "seed", "3", "seed", "4", "mean"]
    assert rows[1].split()[-4:] == ["0.2000", "0.2500", "0.3000", "0.2500"]
    assert rows[2].split()[-4:] == ["0.3500", "0.4000", "0.4500", "0.4000"]
