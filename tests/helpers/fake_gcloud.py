"""A stand-in for gcloud whose workers are folders, and a repository whose scripts meet it."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"

# It appends each call to `asked`; `plan` lists, for each kind of call, the failures in order. It
# refuses each flag and value that Google's reference of the command does not have.
GCLOUD = r"""
import fcntl, json, os, pathlib, re, shutil, signal, subprocess, sys, time

fake = pathlib.Path(os.environ["FAKE"])
with open(fake / "asked", "a") as file:
    file.write(json.dumps(["gcloud", *sys.argv[1:]]) + "\n")

def quit(code, text):
    print(text, file=sys.stderr)
    sys.exit(code)

words = [a for a in sys.argv[1:] if not a.startswith("-")]
flags = dict(a[2:].partition("=")[::2] for a in sys.argv[1:] if a.startswith("--"))
commands = json.loads((fake / "commands").read_text())
name = max((c for c in commands if " ".join(words).startswith(c + " ")), key=len, default="")
if not name:
    quit(2, f"ERROR: Invalid choice: {words}")
positional, required, optional = commands[name]
words = words[len(name.split()):]
for flag in required:
    if flag not in flags:
        quit(2, f"ERROR: ({name}) argument --{flag}: Must be specified.")
for flag, value in flags.items():
    form = {**required, **optional, "project": "[a-z0-9-]+", "quiet": ""}.get(flag)
    if form is None or re.fullmatch(form, value, re.DOTALL) is None:
        quit(2, f"ERROR: ({name}) unrecognized arguments: --{flag}={value}")
if len(words) != positional or any(a.startswith("-") and a[:2] != "--" for a in sys.argv[1:]):
    quit(2, f"ERROR: ({name}) unrecognized arguments: {words}")

verb = name.split()[-1]
verb = {"workload-policy": "create"}.get(verb, verb)
parts = "queued", "instances", "templates", "managed", "policies"
part = next((p for p in parts if p in name), "")
command = flags.get("command", "")
steps = [s for s in ("install", "start", "status", "log", "signal") if f"worker.sh {s}" in command]
kind = steps[0] if steps else f"{part} {verb}".strip()
homes = [fake / f"worker{i}" for i in range(int(os.environ["HOSTS"]))]

def file_of(what):
    return fake / {"queued": "queue", "templates": "template", "policies": "policy"}.get(what, "vm")

def load(what=""):
    return json.loads(file_of(what).read_text()) if file_of(what).exists() else None

def save(what="", **changes):
    file_of(what).write_text(json.dumps({**(load(what) or {}), **changes}))

vm = load()
with open(fake / "lock", "w") as lock:  # the instances of a group are called at once
    fcntl.flock(lock, fcntl.LOCK_EX)
    plan = json.loads((fake / "plan").read_text())
    event = plan[kind].pop(0) if plan.get(kind) else ""
    new = json.dumps(plan)
    (fake / "plan.new").write_text(new)
    os.rename(fake / "plan.new", fake / "plan")

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

def remove_vm():
    kill_all()
    (fake / "vm").unlink(missing_ok=True)
    for home in homes:
        shutil.rmtree(home, ignore_errors=True)

if event in ("PREEMPTED", "REPAIRING", "TERMINATED"):
    restart()
    for home in homes if event != "REPAIRING" else []:
        shutil.rmtree(home)
    save(state=event)
    quit(1, f"ERROR: {event}")
elif event == "SUSPENDED":
    remove_vm()
    save("queued", state=event)
    quit(1, f"ERROR: {event}")
elif event == "reboot":
    restart()
elif event:
    code, _, text = event.partition(" ")
    quit(int(code), f"ERROR: ({verb}) {text}")

missing = "was not found" if part and part != "queued" else "NOT_FOUND: Resource was not found"
if verb == "create":
    if file_of(part).exists():
        quit(1, "ERROR: ALREADY_EXISTS")
    made = {"state": "READY", "labels": flags.get("labels", flags.get("description", ""))}
    made["labels"] = made["labels"].partition("=")[2]
    made["type"] = flags.get("accelerator-type", flags.get("machine-type", flags.get("size")))
    if part == "queued" and plan.get("queue states"):
        made["state"] = plan["queue states"].pop(0)
        (fake / "plan").write_text(json.dumps(plan))
    elif part == "queued":
        save(**made)
        made["state"] = "ACTIVE"
    elif part == "managed" and not (load("templates") and load("policies")):
        quit(1, "ERROR: the template or the policy was not found")
    save(part, **made)
    sys.exit(0)
if load(part) is None and not (part == "" and verb in ("ssh", "scp") and vm):
    quit(1, f"ERROR: {missing}")
if verb == "describe":
    one = load(part)
    if part == "queued":
        print(one["state"], one["type"], one["labels"], one.get("why", ""), sep=",")
        if plan.get("queue states"):
            one["state"] = plan["queue states"].pop(0)
            (fake / "plan").write_text(json.dumps(plan))
            save("queued", **one)
            if one["state"] == "ACTIVE":
                save(state="READY", type=one["type"], labels=one["labels"])
    elif part == "instances":
        state = {"READY": "RUNNING"}.get(one["state"], one["state"])
        print(state, one["type"], one["labels"], sep=",")
    elif part == "managed":
        print(one["type"], f"made_by={one['labels']}" if one["labels"] else "", sep=",")
    else:
        print(one["state"], one["type"], len(homes), one["labels"], sep=",")
        if one["state"] == "REPAIRING":
            save(state="READY")
elif verb == "list-instances":
    states = plan["group states"].pop(0) if plan.get("group states") else ""
    (fake / "plan").write_text(json.dumps(plan))
    state = {"READY": "RUNNING"}.get(vm["state"], vm["state"])
    for i in reversed(range(len(homes))):  # not by name
        print(f"{words[0]}-{'ab'[i]}{i}x", states or f"{state},NONE", sep=",")
elif verb == "delete":
    if part in ("", "instances", "managed"):
        remove_vm()
    elif part == "queued":
        if load() and "force" not in flags:
            quit(1, "ERROR: the queued resource has nodes")
        remove_vm()
        file_of(part).unlink()
    elif (part == "templates" and vm) or (part == "policies" and load("templates")):
        quit(1, "ERROR: it is in use")
    else:
        file_of(part).unlink()
elif vm["state"] != "READY":
    quit(1, "ERROR: TPU is in an unusable state")
else:
    if "worker" in flags:
        chosen = homes if flags["worker"] == "all" else [homes[int(flags["worker"])]]
    else:
        place = next(w for w in words if ":" in w).partition(":")[0] if verb == "scp" else words[0]
        number = re.fullmatch(r"resnet(?:-[ab]([0-9])x)?", place)
        chosen = [homes[int(number[1] or 0)]]
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
        (home / "tpu_run/job/exit_code").exists() for home in chosen
    ):
        time.sleep(0.01)
    sys.exit(next((code for code in codes if code), 0))
"""

_ZONE, _LABELS, _TEXT = {"zone": "[a-z0-9-]+"}, "[a-z_]+=[a-z_]+", ".+"
_FORMAT = {"format": r"csv\[no-heading\]\([\w.(),\[\]]+\)"}
_MACHINE = {
    "machine-type": "ct5lp-hightpu-[148]t|ct5p-hightpu-4t|ct6e-standard-[148]t|tpu7x-standard-4t",
    "image-family": "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e|ubuntu-accel-2404-amd64-tpu-tpu7x",
    "image-project": "ubuntu-os-accelerator-images",
    "maintenance-policy": "TERMINATE",
}
_MORE = {
    **{"boot-disk-size": "[0-9]+GB", "scopes": "cloud-platform", "labels": _LABELS},
    **{"provisioning-model": "SPOT", "instance-termination-action": "STOP|DELETE"},
}
_TPUS = "compute tpus tpu-vm", "compute tpus queued-resources"
# What Google's reference (November 2026) has of each command: the number of its positional
# arguments, the flags that it needs and the others that are used here, with the form of each value.
COMMANDS = {
    f"{_TPUS[0]} create": (
        *(1, {"version": _TEXT} | _ZONE),
        {"accelerator-type": "[a-z0-9]+-[0-9]+", "labels": _LABELS, "spot": ""},
    ),
    f"{_TPUS[0]} describe": (1, _ZONE, _FORMAT),
    f"{_TPUS[0]} delete": (1, _ZONE, {}),
    f"{_TPUS[0]} ssh": (1, _ZONE, {"worker": "all|[0-9]+", "command": _TEXT}),
    f"{_TPUS[0]} scp": (2, _ZONE, {"worker": "all|[0-9]+"}),
    f"{_TPUS[1]} create": (
        *(1, {"runtime-version": _TEXT, "accelerator-type": "[a-z0-9]+-[0-9]+"} | _ZONE),
        {"node-id": "[a-z0-9-]+", "labels": _LABELS, "spot": ""},
    ),
    f"{_TPUS[1]} describe": (1, _ZONE, _FORMAT),
    f"{_TPUS[1]} delete": (1, _ZONE, {"force": ""}),
    "compute instances create": (1, _ZONE | _MACHINE, _MORE),
    "compute instances describe": (1, _ZONE, _FORMAT),
    "compute instances delete": (1, _ZONE, {}),
    "compute instance-templates create": (1, _MACHINE, _MORE),
    "compute instance-templates delete": (1, {}, {}),
    "compute resource-policies create workload-policy": (
        *(1, {"type": "HIGH_THROUGHPUT|HIGH_AVAILABILITY", "region": "[a-z]+-[a-z0-9]+"}),
        {"accelerator-topology": "[0-9]+(x[0-9]+){1,2}"},
    ),
    "compute resource-policies delete": (1, {"region": "[a-z]+-[a-z0-9]+"}, {}),
    "compute instance-groups managed create": (
        *(1, {"size": "[0-9]+", "template": "[a-z0-9-]+"} | _ZONE),
        {
            **{"description": _TEXT, "target-size-policy-mode": "bulk|individual"},
            "default-action-on-vm-failure": "do-nothing|repair",
            "workload-policy": "projects/[^/]+/regions/[^/]+/resourcePolicies/[^/]+",
        },
    ),
    "compute instance-groups managed describe": (1, _ZONE, _FORMAT),
    "compute instance-groups managed list-instances": (1, _ZONE, _FORMAT),
    "compute instance-groups managed delete": (1, _ZONE, {}),
    "compute ssh": (1, _ZONE, {"command": _TEXT}),
    "compute scp": (2, _ZONE, {}),
}

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
    "python3": r"""
case "$*" in
  *python_version*) echo 3.12.1 ;;
  *_base_executable*) echo "$0" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$FAKE/venv_python" "$3/bin/python" ;;
esac""",
}
VENV_PYTHON = r"""
if [[ "$1" == -m ]]; then
  echo "$@" >>"$FAKE/pip-$(hostname)"
elif [[ "$1" == - ]]; then
  cat "${@:3}" | cksum
else
  exec bash "$@"
fi
"""
UNTIL_TOLD = 'trap "exit 143" TERM; echo "step 3/9  x"; while :; do sleep 0.02; done'
WORKDIR = "--workdir=gs://bucket/run"


def timeless(calls):
    return [[re.sub(r"\d{8}-\d{6}", "TIME", word) for word in call] for call in calls]


class Place:
    """A small repository with the scripts, and the stand-in."""

    def __init__(self, folder: Path):
        self.fake, self.repository = folder / "fake", folder / "a clone"
        for path in (self.fake / "bin", self.fake / "remote", self.repository / "scripts/tpu"):
            path.mkdir(parents=True)
        tpu = ("tpu/gcloud.sh", "tpu/compute.sh", "tpu/worker.sh")
        for name in ("tpu_run.sh", "setup.sh", "usage.sh", "find_python.sh", *tpu):
            shutil.copy(SCRIPTS / name, self.repository / "scripts" / name)
        self.write("main.py", MAIN)
        self.write("requirements-tpu.txt", "nothing\n")
        (self.fake / "gcloud.py").write_text(GCLOUD)
        (self.fake / "commands").write_text(json.dumps(COMMANDS))
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

    def left(self):
        """What is still there and costs money or stands in the way of a next run."""
        return {
            what for what in ("vm", "queue", "template", "policy") if (self.fake / what).exists()
        }

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
        ours = {"FAKE": str(self.fake), "HOSTS": "2", "PATH": path}
        ours |= {"TPU_RUN_WAITS": "0.01 0.02 0.03"}
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

    def succeeds(self, *flags, **options):
        """What is printed."""
        code, out = self.run(*flags, **options)
        assert code == 0, out
        return out

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

    def printed(self, shown):
        """The calls that --dry_run has printed, as a shell reads them."""
        echo = 'gcloud() { printf "%s\\0" gcloud "$@" $\'\\1\'; }\n'
        command = ["bash", "-c", echo + shown]
        read = subprocess.run(command, capture_output=True, text=True, check=True)
        return timeless(part.split("\0")[:-1] for part in read.stdout.split("\1\0")[:-1])

    def refuses(self, flags, words, **options):
        """One line that has all words, before Google is asked anything."""
        code, out = self.run(*flags, **options)
        assert code == 1 and len(out.splitlines()) == 1, out
        assert all(word in out for word in words), out
        assert self.asked() == []

    def wait_for(self, condition, process):
        while not condition() and process.poll() is None:
            time.sleep(0.01)
        assert condition(), process.stdout.read()
