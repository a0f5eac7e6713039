"""scripts/setup.sh with an interpreter that only pretends: what it refuses, and what it leaves.

The interpreter is a shell script, and the clone's path has blanks. The machines at the end have
nothing but shell tools, their own python3 or none, and stand-ins for uv and the network.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from engine import devices

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"
# PIP is what pip does; $0 keeps the same in the venv that it makes.
PYTHON = """#!/bin/bash
case "$*" in
  *python_version*) echo {version} ;;
  *"import ensurepip, venv"*) exit {venv} ;;
  *_base_executable*) echo "{base}" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp -- "$0" "$3/bin/python" ;;
  "-m pip "*) {pip} ;;
  "- "*) echo "$(cat "${{@:3}}" | cksum | tr " " -) {version} $2" ;;
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
        for kind in ("tpu", "cuda", "dev", "parity"):
            self.lock(kind)
        self.venv = self.root / ".venv"
        self.env: dict[str, str] = {}
        self.calls, self.uv = folder / "calls", folder / "uv"  # of `machine` below

    def lock(self, kind, version=1):
        text = f"jax=={version} \\\n    --hash=sha256:0\n{kind}==1\n"
        (self.root / f"requirements-{kind}.txt").write_text(text)

    def kinds(self, folder=".venv"):
        return (self.root / folder / ".setup-stamp").read_text().splitlines()[1].split()

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


@pytest.mark.parametrize("system", ["linux x86_64", "linux aarch64", "darwin arm64"])
@pytest.mark.parametrize("kind", ["", "-tpu", "-cuda", "-dev", "-parity"])
def test_each_platform_has_one_tensorflow(kind, system):
    platform, machine = system.split()
    environment = {"sys_platform": platform, "platform_machine": machine}
    lock = (SCRIPTS.parent / f"requirements{kind}.txt").read_text()
    lines = re.findall(r"^(tensorflow(?:-cpu)?==.*) \\$", lock, re.MULTILINE)
    rows = [Requirement(line) for line in lines]
    names = [r.name for r in rows if r.marker is None or r.marker.evaluate(environment)]
    assert names == ["tensorflow-cpu" if machine == "x86_64" else "tensorflow"]


@pytest.mark.parametrize("version", ["3.11.0", "3.13.9"])
def test_a_venv_is_made_once(clone, version):
    clone.python(version, pip="echo Collecting jax; echo $# arguments")
    before = os.listdir(clone.root)
    code, out, error = clone.run("dev")
    assert (code, error) == (0, "") and f"making .venv for dev with Python {version}" in out
    assert os.listdir(clone.root / ".venv") != []
    assert clone.run("dev") == (0, "", "")
    assert clone.run("dev", PYTHON="python3") == (0, "", "")
    assert sorted(os.listdir(clone.root)) == sorted([*before, ".venv"])


def test_a_venv_keeps_the_packages_of_the_arguments_of_before(clone):
    """The quickstart on a TPU VM must not take libtpu away."""
    clone.python(pip='echo "$@" >pip')
    assert clone.run("tpu")[0] == 0
    code, out, _ = clone.run("dev")
    assert code == 0 and "making .venv for tpu and dev with" in out
    words = (clone.root / "pip").read_text().split()
    assert words[-2:] == [f"--requirement=requirements-{kind}.txt" for kind in ("tpu", "dev")]
    for arguments in (["tpu"], ["dev"], ["dev", "tpu"]):
        assert clone.run(*arguments) == (0, "", "")
    clone.lock("tpu", 2)
    assert "for tpu and dev" in clone.run("dev")[1]


@pytest.mark.parametrize(
    ("machine", "kind", "words"),
    [("grep", "tpu", "has a TPU"), ("nvidia-smi", "cuda", "GPU"), ("", "dev", "no TPU")],
)
def test_without_an_argument_it_is_what_the_machine_has(clone, machine, kind, words):
    clone.python()
    clone.program("nvidia-smi", "#!/bin/sh\nexit 9\n")
    if machine == "grep":  # of the ids on the PCI bus
        text = '#!/bin/sh\ncase "$*" in *PCI_ID*) exit 0 ;; esac; exec /usr/bin/grep "$@"\n'
        clone.program("grep", text)
    elif machine:
        clone.program(machine, "#!/bin/sh\n")
    code, out, error = clone.run()
    assert (code, error) == (0, "") and f"making .venv for {kind} (this machine has " in out
    assert words in out and clone.kinds() == [kind]
    assert clone.run() == clone.run(kind) == (0, "", "")


def test_the_tpus_are_those_that_the_program_knows():
    (ids,) = re.findall(r"PCI_ID=1AE0:\((.*)\)", (SCRIPTS / "setup.sh").read_text())
    assert [f"0x{one.lower()}" for one in ids.split("|")] == list(devices._TPUS)


@pytest.mark.parametrize(
    ("machine", "arguments", "words"),
    [
        ("Linux aarch64", "dev", "resolve for Linux aarch64, .* tensorflow-cpu has no wheel"),
        ("Darwin arm64", "dev", "resolve for Darwin arm64, .* tensorflow-cpu has no wheel"),
        ("Linux aarch64", "cuda", "resolve for Linux aarch64"),
        ("Linux aarch64", "tpu", "REFUSED libtpu has wheels for Linux on x86-64 only"),
        ("Darwin arm64", "dev cuda", "REFUSED jax has no CUDA for Darwin arm64"),
        ("Darwin x86_64", "dev", "REFUSED does not run on Darwin x86_64"),
    ],
)
def test_other_platforms(clone, machine, arguments, words):
    clone.python()
    clone.program(
        "uname",
        f"#!/bin/sh\ncase $1 in -s) echo {machine.split()[0]} ;; *) echo {machine} ;; esac\n",
    )
    if words.startswith("REFUSED "):
        line = clone.refuses(*arguments.split())
        assert re.search(words.removeprefix("REFUSED "), line)
        return
    code, out, error = clone.run(*arguments.split())
    assert (code, error) == (0, "") and re.search(words, out)
    assert clone.run(*arguments.split()) == (0, "", "")


@pytest.mark.parametrize("version", ["3.10.13", "3.14.0", "2.7.18", "3.1.1"])
def test_an_unsupported_python_is_refused_with_what_to_install(clone, version):
    clone.python(version, name="mine")
    line = clone.refuses("tpu", PYTHON="mine")
    assert line.startswith(f"'mine' is Python {version}, but ")
    assert line.endswith(": bash scripts/setup.sh tpu")
    line = clone.refuses("dev", PYTHON="mine", SETUP_CALLER="test.sh")
    assert line.endswith(": bash scripts/test.sh")


def test_without_a_choice_another_python_is_taken_where_python3_does_not_fit(clone):
    """The names cover those of this machine; python3.13 comes first."""
    for own in ("3.14.0", "3.10.12"):
        clone.python(own)
        clone.python("3.13.5", name="python3.13")
        code, out, _ = clone.run("tpu", VENV=f"venv-{own}")
        assert code == 0 and "with Python 3.13.5" in out


def test_a_python_that_does_not_run_is_named(clone):
    for _ in ("missing", "broken"):
        line = clone.refuses("cuda", PYTHON="python9", VENV="a b")
        assert line.startswith("'python9' does not run as a Python ")
        assert line.endswith(r": VENV=a\ b bash scripts/setup.sh cuda")
        clone.program("python9", "#!/bin/sh\nexit 1\n")


def test_the_venv_of_another_project_stays(clone):
    clone.python()
    (clone.venv / "bin").mkdir(parents=True)
    (clone.venv / "bin" / "python").write_text("somebody's")
    assert "/.venv was not made by this script" in clone.refuses("dev")
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
    line = clone.refuses("dev")
    assert line.startswith("the installation failed: ") and reason in line


def test_a_failed_installation_leaves_the_venv_of_before(clone):
    clone.python()
    assert clone.run("dev")[0] == 0
    before = (clone.venv / ".setup-stamp").read_text()
    clone.python("3.13.0", pip="echo ERROR: no; exit 1")
    clone.refuses("dev", PYTHON="python3")
    assert (clone.venv / ".setup-stamp").read_text() == before
    assert clone.run("dev") == (0, "", "")


def test_a_half_made_venv_is_made_again_but_not_under_another_setup(clone):
    clone.python()
    clone.venv.mkdir()
    stamp = clone.venv / ".setup-stamp"
    stamp.write_text("incomplete 999999999\n")  # of a process that was killed
    (clone.venv / "half").write_text("")
    assert clone.run("dev")[0] == 0 and not (clone.venv / "half").exists()
    with subprocess.Popen(["bash", "-c", "exec -a setup.sh sleep 60"]) as other:
        stamp.write_text(f"incomplete {other.pid}\n")
        try:
            line = clone.refuses("dev")
        finally:
            other.kill()
    assert line.startswith(f"another setup.sh (process {other.pid}) makes ")


def test_an_active_venv_can_be_made_again(clone):
    """After a pull that changed the lock, its own python is the first on PATH."""
    clone.python()
    assert clone.run("dev")[0] == 0
    clone.lock("dev", 2)
    path = f"{clone.venv}/bin:{clone.bin}:/usr/bin:/bin"
    shutil.copy(clone.venv / "bin" / "python", clone.venv / "bin" / "python3")
    before = (clone.venv / ".setup-stamp").stat().st_mtime_ns
    assert clone.run("dev", PATH=path)[0] == 0
    assert (clone.venv / ".setup-stamp").stat().st_mtime_ns > before


def test_why_a_venv_is_made_again_is_said(clone):
    clone.python()
    assert "again" not in clone.run("dev")[1]
    clone.lock("dev", 2)
    assert ".venv is made again: the locks, the Python or the arguments" in clone.run("dev")[1]
    before, clone.root = clone.root, clone.root.rename(clone.root.with_name("moved"))
    reason = f"it was made as {before}/.venv, a path that its commands contain\n"
    assert f"setup: .venv is made again: {reason}" in clone.run("dev")[1]
    assert clone.run("dev") == (0, "", "")


def test_a_python_that_only_pyenv_knows_is_found(clone, monkeypatch):
    """Its shim on PATH fails while another version is active."""
    clone.program("python3.12", "#!/bin/sh\nexit 127\n")
    pyenv = clone.root.parent / "pyenv"
    with monkeypatch.context() as patch:
        patch.setattr(clone, "bin", pyenv / "versions" / "3.12.7" / "bin")
        clone.bin.mkdir(parents=True)
        clone.python("3.12.7", name="python")
    code, out, error = clone.run("dev", PYTHON="python3.12", PYENV_ROOT=str(pyenv))
    assert (code, error) == (0, "") and "with Python 3.12.7" in out


def test_odd_arguments_and_folders_are_refused_or_understood(clone):
    clone.python()
    for argument in ("--parity", "gpu", "setup.sh", "tpu cuda"):  # the third as in older programs
        code, _, error = clone.run(argument, "requirements-tpu.txt")
        assert code == 2 and error.startswith(f"setup: '{argument}': there is no such argument")
        assert "tpu, cuda, dev, parity" in error and error.count("\n") == 1
    assert clone.run("dev", VENV="deep/er/venv/")[0] == 0
    assert (clone.root / "deep" / "er" / "venv" / "bin" / "python").exists()
    clone.venv.symlink_to("nowhere")
    assert "was not made by this script" in clone.refuses("dev")
    assert clone.venv.is_symlink()


# uv, which makes a venv from the real interpreter. Its pip only notes what it is asked for.
UV = f"""#!/bin/bash
if [[ "$1" == --version ]]; then exit; fi
echo uv "$@" >>"$CALLS"
[[ "$1" == venv ]] || exit 9
folder="${{@: -1}}"
{shlex.quote(sys.executable)} -m venv --without-pip -- "$folder"
cd -- "$folder"/lib/python3*/site-packages && cat >pip.py <<'PIP'
import os, sys
print("pip", *sys.argv[1:], file=open(os.environ["CALLS"], "a"))
PIP
"""
# The python3 of a TPU VM's image, with pip and without the venv module.
IMAGES_PYTHON = """#!/bin/bash
case "$*" in
  *python_version*) echo 3.10.12 ;;
  "-m pip "*) echo pip $(cat) "$@" >>"$CALLS"; [[ -e "$UV" ]] || exit 1
    while [[ "$1" != --target ]]; do shift; done; mkdir -p "$2/bin"; cp "$UV" "$2/bin/uv" ;;
  *) exit 1 ;;
esac
"""
# The archive for what is fetched. Its hash cannot be the pinned one.
CURL = """#!/bin/bash
echo curl "$@" >>"$CALLS"
folder="$(mktemp -d)"; mkdir "$folder/uv-x"; cp "$UV" "$folder/uv-x/uv" || exit 22
tar -czf "$3" -C "$folder" uv-x
"""


@pytest.fixture
def machine(clone):
    """A clone on a machine with a shell's tools, but no Python, no uv and no network."""
    tools = clone.root.parent / "tools"  # a folder of its own: nothing writes through these links
    tools.mkdir()
    names = (
        "cat cp dirname grep gzip mkdir mktemp mv ps rm sed sha256sum sort tail tar uname wc xargs"
    )
    for name in ("bash", *names.split()):
        (tools / name).symlink_to(str(shutil.which(name, path="/usr/bin:/bin")))
    clone.uv.write_text(UV)
    clone.uv.chmod(0o755)
    clone.env = {"PATH": f"{clone.bin}:{tools}", "CALLS": str(clone.calls), "UV": str(clone.uv)}
    return clone


def readmes_block():
    """What README says to type on a TPU VM."""
    text = (SCRIPTS.parent / "README.md").read_text()
    return re.findall(r"On a TPU VM:\n\n```bash\n(.*?)```", text, re.DOTALL)[0]


@pytest.mark.parametrize("python", ["3.10.12", "none", "none, and uv"])
def test_the_first_commands_on_a_tpu_vm(machine, python):
    if python == "3.10.12":
        machine.program("python3", IMAGES_PYTHON)
    elif python == "none":
        machine.program("curl", CURL)
        machine.program("sha256sum", '#!/bin/bash\necho sha256sum $(cat) >>"$CALLS"\n')
    else:
        machine.program("uv", UV)
    (machine.root / "main.py").write_text("import sys; print('main', *sys.argv[1:])\n")
    command = ["bash", "-euo", "pipefail", "-c", readmes_block()]
    env = {**machine.env, "HOME": str(machine.root)}
    done = subprocess.run(command, cwd=machine.root, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    *_, doctor, training = done.stdout.splitlines()
    assert doctor.startswith("main ") and doctor.endswith(" --mode=doctor")
    assert training == "main --config=configs/resnet50.py"
    *fetches, uv, pip = machine.calls.read_text().splitlines()
    assert uv == f"uv venv --quiet --seed --allow-existing --python 3.12 {machine.venv}"
    assert pip.endswith("--require-hashes --requirement=requirements-tpu.txt")
    hashes = r"[0-9a-f]{64}"
    if python == "3.10.12":
        assert re.match(f"pip uv==[0-9.]+ --hash=sha256:{hashes} -m pip install ", fetches[0])
    elif python == "none":
        assert re.search(
            r"https://github.com/astral-sh/uv/releases/.*linux-gnu.tar.gz$", fetches[0]
        )
        assert re.match(f"sha256sum {hashes} ", fetches[1])
    assert len(fetches) == {"3.10.12": 1, "none": 2, "none, and uv": 0}[python]
    assert machine.kinds() == ["tpu"]
    assert machine.run("tpu", **machine.env) == (0, "", "")
    assert not list(machine.root.glob(".venv.*"))


@pytest.mark.parametrize("tools", ["none", "another archive", "no network"])
def test_without_python_and_uv_the_refusal_keeps_the_argument(machine, tools):
    if tools != "none":
        machine.program("curl", CURL)
    if tools == "no network":
        machine.uv.unlink()
    line = machine.refuses("tpu", **machine.env)
    assert line.startswith("no venv was made (") and line.endswith(": bash scripts/setup.sh tpu")
    assert "install Python 3.11" in line
    assert not (machine.root / ".venv").exists()
    line = machine.refuses("dev", SETUP_CALLER="quickstart.sh", **machine.env)
    assert line.endswith(": bash scripts/quickstart.sh")


def test_uv_makes_the_venv_of_a_python_without_the_module(machine):
    machine.python("3.12.3", venv=1)
    machine.program("uv", UV)
    assert machine.run("dev", **machine.env)[0] == 0
    assert f" --python {machine.bin}/python3 " in machine.calls.read_text()
