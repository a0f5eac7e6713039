"""scripts/setup.sh with an interpreter that only pretends: what it refuses, and what it leaves.

The interpreter is a shell script, and the clone's path has blanks.
"""

import os
import pathlib
import shutil
import subprocess

import pytest

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"
# PIP is what pip does; $0 keeps the same in the venv that it makes.
PYTHON = """#!/bin/bash
case "$*" in
  *python_version*) echo {version} ;;
  *"import ensurepip, venv"*) exit {venv} ;;
  *_base_executable*) echo "{base}" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp -- "$0" "$3/bin/python" ;;
  "-m pip "*) {pip} ;;
  "- "*) echo "key of $3 with $(cksum <"$2") by {version}" ;;
  *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""


class Clone:
    """A repository with nothing but the scripts and a lock, and its own python3."""

    def __init__(self, folder: pathlib.Path):
        self.root, self.bin = folder / "a clone", folder / "bin"
        (self.root / "scripts").mkdir(parents=True)
        self.bin.mkdir()
        for name in ("setup.sh", "usage.sh", "find_python.sh"):
            shutil.copy(SCRIPTS / name, self.root / "scripts")
        (self.root / "requirements-dev.txt").write_text("jax==1 \\\n    --hash=sha256:0\n")
        self.venv = self.root / ".venv"

    def python(self, version="3.12.1", name="python3", pip="true", venv=0):
        text = PYTHON.format(version=version, pip=pip, venv=venv, base=self.bin / name)
        self.program(name, text)

    def program(self, name, text):
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, *arguments, **env):
        command = ["bash", str(self.root / "scripts" / "setup.sh"), *arguments]
        path = f"{self.bin}:/usr/bin:/bin"
        env = {"PATH": path, "HOME": str(self.root), **env}
        done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    def refuses(self, *arguments, **env):
        """The one line of a refusal, after which nothing is there that was not there before."""
        before = sorted(os.listdir(self.root))
        code, out, line = self.run(*arguments, **env)
        assert (code, line.count("\n")) == (1, 1), out + line
        assert sorted(os.listdir(self.root)) == before
        return line.removeprefix("setup: ").rstrip("\n")


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


@pytest.mark.parametrize("version", ["3.11.0", "3.13.9"])
def test_a_venv_is_made_once(clone, version):
    clone.python(version, pip="echo Collecting jax; echo $# arguments")
    code, out, error = clone.run("test.sh")
    assert (code, error) == (0, "") and f"making .venv with Python {version}" in out
    assert os.listdir(clone.root / ".venv") != []
    assert clone.run("test.sh") == (0, "", "")
    assert clone.run("test.sh", PYTHON="python3") == (0, "", "")
    assert sorted(os.listdir(clone.root)) == [".venv", "requirements-dev.txt", "scripts"]


def test_another_folder_and_another_lock(clone):
    clone.python()
    (clone.root / "requirements-own.txt").write_text("jax==2\n")
    assert clone.run("test.sh", "requirements-own.txt", VENV=".venv-own")[0] == 0
    assert (clone.root / ".venv-own").exists() and not clone.venv.exists()
    assert clone.refuses("test.sh", "none.txt").startswith("there is no ")


@pytest.mark.parametrize("version", ["3.10.13", "3.14.0", "2.7.18", "3.1.1"])
def test_an_unsupported_python_is_refused_with_what_to_install(clone, version):
    clone.python(version, name="mine")
    line = clone.refuses("test.sh", PYTHON="mine")
    assert line.startswith(f"'mine' is Python {version}, but ")
    assert line.endswith("install Python 3.13, then: PYTHON=python3.13 bash scripts/test.sh")


def test_without_a_choice_another_python_is_taken_where_python3_does_not_fit(clone):
    """The names cover those of this machine; python3.13 comes first."""
    clone.python("3.14.0")
    clone.python("3.13.5", name="python3.13")
    code, out, _ = clone.run()
    assert code == 0 and "with Python 3.13.5" in out


def test_a_python_that_does_not_run_is_named(clone):
    for _ in ("missing", "broken"):
        assert clone.refuses(PYTHON="python9").startswith("'python9' does not run as a Python ")
        clone.program("python9", "#!/bin/sh\nexit 1\n")


def test_a_python_without_venv_is_refused_with_the_package_to_install(clone):
    clone.python(venv=1)
    line = clone.refuses("quickstart.sh")
    assert "'python3' (Python 3.12.1) lacks the venv module" in line
    assert line.endswith("apt install python3.12-venv), then: bash scripts/quickstart.sh")


def test_the_venv_of_another_project_stays(clone):
    clone.python()
    (clone.venv / "bin").mkdir(parents=True)
    (clone.venv / "bin" / "python").write_text("somebody's")
    assert "/.venv was not made by this script" in clone.refuses("test.sh")
    assert (clone.venv / "bin" / "python").read_text() == "somebody's"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("NewConnectionError; ERROR: No matching distribution", "the package index does not "),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM\n    jax==1 from x", "jax==1 from x"),
        ("something else", "something else"),
    ],
)
def test_a_failed_installation_says_why_and_leaves_nothing(clone, words, reason):
    clone.python(pip=f"echo '{words}' >&2; exit 1")
    line = clone.refuses("test.sh")
    assert line.startswith("the installation failed: ") and reason in line


def test_a_failed_installation_leaves_the_venv_of_before(clone):
    clone.python()
    assert clone.run()[0] == 0
    before = (clone.venv / ".setup-stamp").read_text()
    clone.python("3.13.0", pip="echo ERROR: no; exit 1")
    clone.refuses(PYTHON="python3")
    assert (clone.venv / ".setup-stamp").read_text() == before
    assert clone.run() == (0, "", "")


def test_a_half_made_venv_is_made_again_but_not_under_another_setup(clone):
    clone.python()
    clone.venv.mkdir()
    stamp = clone.venv / ".setup-stamp"
    stamp.write_text("incomplete 999999999\n")  # of a process that was killed
    (clone.venv / "half").write_text("")
    assert clone.run()[0] == 0 and not (clone.venv / "half").exists()
    with subprocess.Popen(["bash", "-c", "exec -a setup.sh sleep 60"]) as other:
        stamp.write_text(f"incomplete {other.pid}\n")
        try:
            line = clone.refuses()
        finally:
            other.kill()
    assert line.startswith(f"another setup.sh (process {other.pid}) makes ")


def test_an_active_venv_can_be_made_again(clone):
    """After a pull that changed the lock, its own python is the first on PATH."""
    clone.python()
    assert clone.run()[0] == 0
    (clone.root / "requirements-dev.txt").write_text("jax==2\n")
    path = f"{clone.venv}/bin:{clone.bin}:/usr/bin:/bin"
    shutil.copy(clone.venv / "bin" / "python", clone.venv / "bin" / "python3")
    before = (clone.venv / ".setup-stamp").stat().st_mtime_ns
    assert clone.run(PATH=path)[0] == 0
    assert (clone.venv / ".setup-stamp").stat().st_mtime_ns > before


def test_a_python_that_only_pyenv_knows_is_found(clone, monkeypatch):
    """Its shim on PATH fails while another version is active."""
    clone.program("python3.12", "#!/bin/sh\nexit 127\n")
    pyenv = clone.root.parent / "pyenv"
    with monkeypatch.context() as patch:
        patch.setattr(clone, "bin", pyenv / "versions" / "3.12.7" / "bin")
        clone.bin.mkdir(parents=True)
        clone.python("3.12.7", name="python")
    code, out, error = clone.run("test.sh", PYTHON="python3.12", PYENV_ROOT=str(pyenv))
    assert (code, error) == (0, "") and "with Python 3.12.7" in out


def test_odd_arguments_and_folders_are_refused_or_understood(clone):
    clone.python()
    code, _, error = clone.run("--parity")
    assert (code, error) == (2, "setup: --parity: there is no such flag (--help)\n")
    assert clone.run(VENV="deep/er/venv/")[0] == 0
    assert (clone.root / "deep" / "er" / "venv" / "bin" / "python").exists()
    clone.venv.symlink_to("nowhere")
    assert "was not made by this script" in clone.refuses()
    assert clone.venv.is_symlink()
