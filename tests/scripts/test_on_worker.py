"""scripts/on_worker.sh on a host, and the scripts in deploy/ that bring it there by hand."""

import os
import re
import shutil
import subprocess
import time

import pytest

from tests.test_main import ROOT, environment

SETUP = """mkdir -p .venv/bin; ln -sf "$(command -v bash)" .venv/bin/python; echo setup "$@"\n"""


@pytest.fixture
def worker(tmp_path):
    """A host with this script, an installation that takes no time, and a tcmalloc."""
    (tmp_path / "scripts").mkdir()
    for name in ("on_worker.sh", "usage.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "scripts/setup.sh").write_text(SETUP)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ldconfig").write_text(
        "#!/bin/sh\nfor i in $(seq 9999); do echo '  libtcmalloc.so.4 (x) => /lib/none'; done\n"
        "exit 1\n"
    )
    (tmp_path / "bin/ldconfig").chmod(0o755)

    def start(*command):
        env = environment(PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
        words = ["bash", str(tmp_path / "scripts/on_worker.sh"), *command]
        return subprocess.run(words, env=env, capture_output=True, text=True, cwd="/")

    return start


def ended(folder):
    """The output of the command, once it has ended."""
    log = folder / "logs/worker.log"
    for _ in range(600):
        if "ended with code" in log.read_text():
            return log.read_text()
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def test_a_command_gets_the_environment_and_leaves_its_code(worker, tmp_path):
    assert worker().returncode == 1
    show = 'echo "$1|$PYTHONUNBUFFERED|$LD_PRELOAD|$(command -v python)"; exit 75'
    done = worker("python", "-c", show, "-", "it's  two")
    assert done.returncode == 0 and "logs/worker.log" in done.stdout, done.stderr
    output = ended(tmp_path)
    assert f"\nit's  two|1|/lib/none|{tmp_path}/.venv/bin/python\n" in output
    assert output.startswith("setup tpu\n") and output.endswith("ended with code 75\n")


def test_one_command_at_a_time_which_a_signal_stops(worker, tmp_path):
    trap = "trap 'exit 143' TERM; echo ready; while :; do sleep 0.05; done"
    worker("python", "-c", trap)
    while "ready" not in (tmp_path / "logs/worker.log").read_text():
        time.sleep(0.05)
    again = worker("python", "-c", "echo second")
    assert again.returncode == 0 and "runs already" in again.stdout
    stop = ["bash", "-c", 'kill -TERM -- "-$(cat logs/worker.pid)"']
    subprocess.run(stop, cwd=tmp_path, check=True)
    output = ended(tmp_path)
    assert output.endswith("ended with code 143\n") and "second" not in output
    assert "started" in worker("true").stdout


def test_the_scripts_that_bring_it_to_a_slice(tmp_path):
    """gcloud is a script that notes its arguments; what it would run on a host is run here."""
    gcloud = tmp_path / "gcloud"
    gcloud.write_text(
        f'#!/bin/bash\nprintf "%s\\0" "$@" "&" >>{tmp_path}/asked\n'
        'case "$*" in *list-instances*) printf "run1-a\\nrun1-b\\nrun1-c\\nrun1-d\\n" ;; '
        f'*" describe "*) test -e {tmp_path}/made ;; esac\n'
    )
    gcloud.chmod(0o755)
    (tmp_path / "repository").mkdir()
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path / "repository")]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    env = environment(PATH=f"{tmp_path}:{os.environ['PATH']}")

    def run(script, *arguments):
        """The commands that gcloud gets."""
        (tmp_path / "asked").unlink(missing_ok=True)
        command = ["bash", str(ROOT / "deploy" / script), *arguments]
        subprocess.run(command, cwd=tmp_path / "repository", env=env, check=True)
        return [a.split("\0") for a in (tmp_path / "asked").read_text().split("\0&\0") if a]

    numbers = []
    for script in ("compute_engine.sh", "cloud_tpu.sh"):
        command = ["bash", str(ROOT / "deploy" / script)]
        (tmp_path / "asked").unlink(missing_ok=True)
        for word, code in (("--help", 0), ("up", 2)):  # these make no VM
            assert subprocess.run([*command, word], env=env).returncode == code
        assert not (tmp_path / "asked").exists()
        asked = run(script)
        remote = [
            word.removeprefix("--command=") for a in asked for word in a if "on_worker" in word
        ]
        numbers += [re.findall(r"--process_id=(\d)", text) for text in remote]
        for text in remote:
            home = tmp_path / f"host{len(list(tmp_path.glob('host*')))}"
            home.mkdir()
            shutil.copy(tmp_path / "repository/code.bundle", home)
            text = text.replace("bash resnet/scripts/on_worker.sh", "echo")
            done = subprocess.run(
                ["bash", "-euc", text], cwd=home, capture_output=True, text=True, check=True
            )
            assert done.stdout.startswith(
                "python main.py --config=configs/resnet50.py --workdir=gs://"
            )
            assert (home / "resnet/.git").is_dir()
        assert {"create", "scp", "ssh"} <= {word for words in asked for word in words[:5]}
        (tmp_path / "made").touch()  # what is there is not made again
        assert "create" not in {word for words in run(script) for word in words[:5]}
        kinds = [[w for w in words if w in ("create", "delete")] for words in run(script, "delete")]
        assert kinds and all(kind == ["delete"] for kind in kinds)
        (tmp_path / "made").unlink()
    assert numbers == [["0"], ["1"], ["2"], ["3"], []]
