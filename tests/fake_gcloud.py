"""A stand-in for gcloud whose workers are folders, and a repository whose scripts meet it."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPTS = Path(__file__).parent.parent / "scripts"

# It appends each call to `asked`; `plan` lists, for each kind of call, the failures in order.
GCLOUD = r"""
import json, os, pathlib, shutil, signal, subprocess, sys, time

fake = pathlib.Path(os.environ["FAKE"])
with open(fake / "asked", "a") as file:
    file.write(json.dumps(["gcloud", *sys.argv[1:]]) + "\n")
verb, *rest = sys.argv[4:]
flags = dict(a[2:].partition("=")[::2] for a in rest if a.startswith("--"))
words = [a for a in rest if not a.startswith("--")]
command = flags.get("command", "")
steps = [s for s in ("install", "start", "status", "log", "signal") if f"worker.sh {s}" in command]
kind = steps[0] if steps else verb
vm = json.loads((fake / "vm").read_text()) if (fake / "vm").exists() else None
homes = [fake / f"worker{i}" for i in range(int(os.environ["HOSTS"]))]
plan = json.loads((fake / "plan").read_text())
event = plan[kind].pop(0) if plan.get(kind) else ""
(fake / "plan").write_text(json.dumps(plan))

def save(**changes):
    (fake / "vm").write_text(json.dumps({**vm, **changes}))

def quit(code, text):
    print(text, file=sys.stderr)
    sys.exit(code)

def kill_all():
    for pid in fake.glob("worker*/tpu_run/job/pid"):
        try:
            os.killpg(int(pid.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            pass

def restart():
    kill_all()
    for home in homes:
        (home / "tpu_run/job/boot").write_text("another")

if event in ("PREEMPTED", "REPAIRING"):
    restart()
    for home in homes if event == "PREEMPTED" else []:
        shutil.rmtree(home)
    save(state=event)
    quit(1, f"ERROR: {event}")
elif event == "reboot":
    restart()
elif event:
    code, _, text = event.partition(" ")
    quit(int(code), f"ERROR: ({verb}) {text}")

if verb == "create":
    if vm:
        quit(1, "ERROR: ALREADY_EXISTS")
    vm = {}
    labels = flags["labels"].partition("=")[2]
    save(state="READY", type=flags["accelerator-type"], labels=labels)
    sys.exit(0)
if vm is None:
    quit(1, "ERROR: NOT_FOUND: Resource was not found")
if verb == "describe":
    print(vm["state"], vm["type"], len(homes), vm["labels"], sep=",")
    if vm["state"] == "REPAIRING":
        save(state="READY")
elif verb == "delete":
    kill_all()
    (fake / "vm").unlink()
    for home in homes:
        shutil.rmtree(home, ignore_errors=True)
elif vm["state"] != "READY":
    quit(1, "ERROR: TPU is in an unusable state")
else:
    chosen = homes if flags["worker"] == "all" else [homes[int(flags["worker"])]]
    codes = []
    for home in chosen:
        home.mkdir(exist_ok=True)
        if verb == "scp":
            source, target = (str(home / w.partition(":")[2]) if ":" in w else w for w in words)
            shutil.copy(source, target)
            continue
        path = f"{fake}/remote:" + os.environ["PATH"]
        env = {**os.environ, "HOME": str(home), "PATH": path}
        codes.append(subprocess.run(["bash", "-c", command], cwd=home, env=env).returncode)
        codes += [0]
    while kind == "start" and "wait" in plan and not all(
        (home / "tpu_run/job/exit_code").exists() for home in homes
    ):
        time.sleep(0.01)
    sys.exit(next((code for code in codes if code), 0))
"""

# The program that is run: the n-th start on a worker does what line n of `jobs` says.
MAIN = r"""
me="$FAKE/runs-$(hostname)"
echo x >>"$me"
printf '%s\n' "$@" >"$FAKE/arguments-$(hostname)"
env | grep -E '^(LD_PRELOAD|MLP_|TPU_MODEL)' || true
eval "$(sed -n "$(wc -l <"$me")p" "$FAKE/jobs")"
"""

REMOTE = {
    "hostname": 'basename "$HOME"',
    "ldconfig": 'cat "$FAKE/libraries"',
    "python3.13": r"""
case "$1 $2" in
  "-c "*) exit 0 ;;
  "-m venv") mkdir -p "$3/bin" && cp "$FAKE/venv_python" "$3/bin/python" ;;
esac""",
}
VENV_PYTHON = r"""
if [[ "$1" == -m ]]; then
  echo "$@" >>"$FAKE/pip-$(hostname)"
else
  exec bash "$@"
fi
"""
UNTIL_TOLD = 'trap "exit 143" TERM; echo "step 3/9  x"; while :; do sleep 0.02; done'
WORKDIR = "--workdir=gs://bucket/run"


class Place:
    """A small repository with the scripts, and the stand-in."""

    def __init__(self, folder: Path):
        self.fake, self.repository = folder / "fake", folder / "a clone"
        for path in (self.fake / "bin", self.fake / "remote", self.repository / "scripts/tpu"):
            path.mkdir(parents=True)
        for name in ("tpu_run.sh", "tpu/gcloud.sh", "tpu/worker.sh"):
            shutil.copy(SCRIPTS / name, self.repository / "scripts" / name)
        self.write("main.py", MAIN)
        self.write("requirements-tpu.txt", "nothing\n")
        (self.fake / "gcloud.py").write_text(GCLOUD)
        self.program(
            "bin/gcloud",
            f'exec {shlex.join([sys.executable, "-IS", f"{self.fake}/gcloud.py"])} "$@"',
        )
        for name, text in REMOTE.items():
            self.program(f"remote/{name}", text)
        self.program("venv_python", VENV_PYTHON)
        (self.fake / "libraries").write_text("")
        self.git("init", "-q")
        self.git("add", ".")
        self.set({}, "exit 0")

    def write(self, name, text):
        (self.repository / name).write_text(text)

    def program(self, name, text):
        (self.fake / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (self.fake / name).chmod(0o755)

    def git(self, *arguments):
        subprocess.run(["git", *arguments], cwd=self.repository, check=True)

    def set(self, plan, *jobs):
        """What will go wrong, and what the program does at each start."""
        (self.fake / "plan").write_text(json.dumps(plan))
        (self.fake / "jobs").write_text("\n".join(jobs) + "\n")

    def vm(self, state="READY", labels="", kind="v4-16"):
        (self.fake / "vm").write_text(json.dumps({"state": state, "type": kind, "labels": labels}))

    def there(self):
        return (self.fake / "vm").exists()

    def arguments(self, *flags, command=("python", "main.py", WORKDIR), kind="v4-16"):
        return [
            *("bash", "scripts/tpu_run.sh", "--name=resnet", "--zone=us-central1-a"),
            *(f"--type={kind}", *flags, "--", *command),
        ]

    def environment(self, **extra):
        path = f"{self.fake}/bin:{os.environ['PATH']}"
        ours = {
            "FAKE": str(self.fake),
            "HOSTS": "2",
            "PATH": path,
            "TPU_RUN_WAITS": "0.01 0.02 0.03",
        }
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLP_", "TPU_"))}
        return kept | ours | {"TPU_RUN_POLL": "0.05", "TPU_RUN_GRACE": "0"} | extra

    def start(self, *flags, env=None, **options):
        # A shell has what it runs in the background ignore SIGINT, and so would all its children.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return subprocess.Popen(
            self.arguments(*flags, **options),
            cwd=self.repository,
            env=self.environment(**(env or {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *flags, **options):
        process = self.start(*flags, **options)
        out, _ = process.communicate()
        return process.returncode, out

    def asked(self):
        path = self.fake / "asked"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def verbs(self):
        return [call[4] for call in self.asked()]

    def questions(self, kind):
        return sum(f"worker.sh {kind} " in " ".join(call) for call in self.asked())

    def runs(self, worker=0):
        path = self.fake / f"runs-worker{worker}"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def logs(self, worker):
        return sorted(self.repository.glob(f"logs/resnet/*/worker-{worker}.log"))

    def wait_for(self, condition, process):
        while not condition() and process.poll() is None:
            time.sleep(0.01)
        assert condition(), process.stdout.read()
