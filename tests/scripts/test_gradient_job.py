"""scripts/gradient_job.sh on a bare host, and what gradient/ holds."""

import os
import shutil
import stat
import subprocess

import yaml

from scripts.gradient import parse_request
from tests.test_main import ROOT, environment


def executable(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_the_variables_of_the_job_command_are_those_of_the_jobs_host(tmp_path):
    """The platform's command is played by a script that records what this shell gives it."""
    executable(tmp_path / "paperspace", f'#!/bin/sh\nprintf "%s\\0" "$@" > {tmp_path}/arguments\n')
    path = f"{tmp_path}:{os.environ['PATH']}"
    shutil.copy(ROOT / "gradient" / "job_command.sh", tmp_path)
    url = "https://example.com/suite.git"
    for words in (["init", "--quiet"], ["remote", "add", "origin", url]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    command = ["bash", str(tmp_path / "job_command.sh")]
    subprocess.run(command, env=environment(PATH=path, TPU_MODEL_DIR="gs://mine"), check=True)
    words = (tmp_path / "arguments").read_text().split("\0")[:-1]
    assert words[:4] == ["jobs", "create", "--machineType", "TPU"]
    assert words[words.index("--workspace") + 1] == f"git+{url}"
    job = words[words.index("--command") + 1].replace("bash scripts/gradient_job.sh", "echo")
    env = {"TPU_NAME": "tpu-7", "TPU_GRPC_URL": "grpc://x", "TPU_MODEL_DIR": "gs://a b/job"}
    done = subprocess.run(["bash", "-c", job], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "TPU_NAME=tpu-7 TPU_GRPC_URL=grpc://x TPU_MODEL_DIR=gs://a b/job",
        "--config=configs/resnet50.py",
    ]


def test_a_bare_host_installs_the_packages_first(tmp_path):
    """Of two interpreters: python3 has no packages; what the installation makes is used."""
    (tmp_path / "scripts").mkdir()
    for name in ("gradient_job.sh", "find_python.sh", "usage.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    executable(tmp_path / "python3", "#!/bin/sh\nexit 1\n")
    script = "mkdir -p .venv/bin; printf '#!/bin/sh\\necho runs \"$@\"' > .venv/bin/python"
    setup = f'echo setup "$@"; {script}; chmod +x .venv/bin/python\n'
    (tmp_path / "scripts" / "setup.sh").write_text(setup)
    command = ["bash", str(tmp_path / "scripts" / "gradient_job.sh"), "--config=a b.py"]
    path = f"{tmp_path}:{os.environ['PATH']}"

    def start(**env):
        env = environment(PATH=path, VIRTUAL_ENV="", **env)
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout.splitlines(), done.stderr

    code, lines, error = start()
    assert (code, lines) == (1, []) and error.startswith("ERROR: TPU_MODEL_DIR is not set")
    setup = "setup"  # for what the machine has
    trains = "runs -m scripts.gradient --config=a b.py"
    assert start(TPU_MODEL_DIR="/m") == (0, [setup, trains], "")
    assert start(TPU_MODEL_DIR="/m") == (0, [trains], "")


def test_the_workflow_is_what_its_documentation_shows():
    flow = yaml.safe_load((ROOT / "gradient" / "workflow.yaml").read_text())
    job = flow["jobs"]["train"]
    assert (job["uses"], job["needs"]) == ("container@v1", ["code"])
    assert job["inputs"]["repository"] == "code.outputs.repository"
    flag, script = job["with"]["args"]
    assert flag == "-c" and subprocess.run(["bash", "-n", "-c", script]).returncode == 0
    for word in ("/inputs/records", "/outputs/model", "scripts/gradient_job.sh"):
        assert word in script
    parse_request([], job["env"])
