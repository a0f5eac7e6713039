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
import contextlib, json, os, pathlib, re, shutil, signal, subprocess, sys, time

fake = pathlib.Path(os.environ["FAKE"])
with open(fake / "asked", "a") as file:
    file.write(json.dumps(["gcloud", *sys.argv[1:]]) + "\n")

def quit(code, text):
    print(text, file=sys.stderr)
    sys.exit(code)

# What Google's reference (November 2026) has of each command: its flags that are used here, with
# the form of each value. Those with ? may be left out.
zone, worker = {"zone": "[a-z0-9-]+"}, {"worker": "all|[0-9]+"}
format = {"format": r"csv\[no-heading\]\([\w.(),\[\]]+\)"}
new = {"accelerator-type": "[a-z0-9]+-[0-9]+", "labels": "[a-z_]+=[a-z_]+", "spot": "?"} | zone
commands = {
    "tpu-vm create": {"version": ".+"} | new,
    "tpu-vm describe": zone | format,
    "tpu-vm delete": zone,
    "tpu-vm ssh": zone | worker | {"command": ".+"},
    "tpu-vm scp": zone | worker,
    "queued-resources create": {"runtime-version": ".+", "node-id": "[a-z0-9-]+"} | new,
    "queued-resources describe": zone | format,
    "queued-resources delete": zone | {"force": "?"},
}
compute, tpus, what, verb, *words = [a for a in sys.argv[1:] if not a.startswith("--")]
flags = dict(a[2:].partition("=")[::2] for a in sys.argv[1:] if a.startswith("--"))
forms = commands[f"{what} {verb}"] | {"project": "?[a-z0-9-]+", "quiet": ""}
wrong = [f for f, form in forms.items() if f not in flags and form[:1] != "?"] + [
    f for f in flags if not re.fullmatch(forms.get(f, "(?!)").lstrip("?"), flags[f], re.DOTALL)
]
if wrong or (compute, tpus) != ("compute", "tpus") or len(words) != 1 + (verb == "scp"):
    quit(2, f"ERROR: unrecognized or missing arguments: {wrong} {words}")

queued, command = what == "queued-resources", flags.get("command", "")
steps = [s for s in ("install", "start", "status", "log", "signal") if f"worker.sh {s}" in command]
kind = steps[0] if steps else f"queued {verb}" if queued else verb
homes = [fake / "worker0", fake / "worker1"]

def load(what):
    return json.loads((fake / what).read_text()) if (fake / what).exists() else None

def save(what, **changes):
    (fake / what).write_text(json.dumps({**(load(what) or {}), **changes}))

vm, queue = load("vm"), load("queue")
plan = load("plan")

def next_of(what):
    event = plan[what].pop(0) if plan.get(what) else ""
    (fake / "plan").write_text(json.dumps(plan))
    return event

def kill_all():
    for pid in fake.glob("worker*/tpu_run/job/pid"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(pid.read_text()), signal.SIGKILL)

def remove_vm():
    kill_all()
    (fake / "vm").unlink(missing_ok=True)
    for home in homes:
        shutil.rmtree(home, ignore_errors=True)

event = next_of(kind)
if event in ("reboot", "REPAIRING"):
    kill_all()
    for home in homes:
        (home / "tpu_run/job/boot").write_text("another")
elif event in ("PREEMPTED", "SUSPENDED"):
    remove_vm()
if event in ("PREEMPTED", "REPAIRING", "SUSPENDED"):
    save("queue" if event == "SUSPENDED" else "vm", **{**(vm or {}), "state": event})
    quit(1, f"ERROR: {event}")
elif event and event != "reboot":
    code, _, text = event.partition(" ")
    quit(int(code), f"ERROR: ({verb}) {text}")

if verb == "create":
    if queue if queued else vm:
        quit(1, "ERROR: ALREADY_EXISTS")
    made = {"type": flags["accelerator-type"], "labels": flags["labels"].partition("=")[2]}
    state = next_of("queue states") or "ACTIVE" if queued else ""
    if queued:
        save("queue", state=state, **made)
    if state in ("", "ACTIVE"):
        save("vm", state="READY", **made)
elif not (queue if queued else vm):
    quit(1, "ERROR: NOT_FOUND: Resource was not found")
elif verb == "describe" and queued:
    print(queue["state"], queue["type"], queue["labels"], "", sep=",")
    if state := next_of("queue states"):
        save("queue", state=state)
        if state == "ACTIVE":
            save("vm", state="READY", type=queue["type"], labels=queue["labels"])
elif verb == "describe":
    print(vm["state"], vm["type"], len(homes), vm["labels"], sep=",")
    if vm["state"] == "REPAIRING":
        save("vm", state="READY")
elif verb == "delete":
    if queued and "force" not in flags:
        quit(1, "ERROR: the queued resource has nodes")
    remove_vm()
    if queued:
        (fake / "queue").unlink()
elif vm["state"] != "READY":
    quit(1, "ERROR: TPU is in an unusable state")
else:
    chosen = homes if flags["worker"] == "all" else [homes[int(flags["worker"])]]
    codes = []
    for home in chosen:
        home.mkdir(exist_ok=True)
        if verb == "scp":
            shutil.copy(*(home / w.partition(":")[2] if ":" in w else w for w in words))
            continue
        env = {**os.environ, "HOME": str(home), "PATH": f"{fake}/remote:" + os.environ["PATH"]}
        codes.append(subprocess.run(["bash", "-c", command], cwd=home, env=env).returncode)
    ends = [home / "tpu_run/job/exit_code" for home in chosen]
    while kind == "start" and "wait" in plan and not all(end.exists() for end in ends):
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

# Instead of scripts/setup.sh, which has tests of its own: an interpreter that is a shell.
SETUP = r"""
echo "$@" >>"$FAKE/setup-$(hostname)"
mkdir -p "$VENV/bin"
printf '#!/bin/sh\nexec bash "$@"\n' >"$VENV/bin/python"
chmod +x "$VENV/bin/python"
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
        for name in ("tpu_run.sh", "tpu/gcloud.sh", "tpu/worker.sh"):
            shutil.copy(SCRIPTS / name, self.repository / "scripts" / name)
        self.write("main.py", MAIN)
        self.write("scripts/setup.sh", SETUP)
        (self.fake / "gcloud.py").write_text(GCLOUD)
        python = shlex.join([sys.executable, "-IS", f"{self.fake}/gcloud.py"])
        self.program("bin/gcloud", f'exec {python} "$@"')
        self.program("remote/hostname", 'basename "$HOME"')
        self.program("remote/ldconfig", 'cat "$FAKE/libraries"')
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
        return {what for what in ("vm", "queue") if (self.fake / what).exists()}

    def vm(self, state="READY", labels="", kind="v4-16"):
        (self.fake / "vm").write_text(json.dumps({"state": state, "type": kind, "labels": labels}))

    def start(self, *flags, env=None, command=("python", "main.py", WORKDIR), kind="v4-16"):
        # A shell has what it runs in the background ignore SIGINT, and so would all its children.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLP_", "TPU_"))}
        ours = {"FAKE": str(self.fake), "PATH": f"{self.fake}/bin:{os.environ['PATH']}"}
        ours |= {"TPU_RUN_WAITS": "0.01 0.02 0.03", "TPU_RUN_POLL": "0.05", "TPU_RUN_GRACE": "0"}
        script = ["bash", "scripts/tpu_run.sh", "--name=resnet", "--zone=us-central1-a"]
        return subprocess.Popen(
            [*script, f"--type={kind}", *flags, "--", *command],
            cwd=self.repository,
            env=kept | ours | (env or {}),
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

    def verbs(self, *among):
        """The verbs of all calls, or those of a few."""
        return [call[4] for call in self.asked() if not among or call[4] in among]

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

    def wait_for(self, condition, process):
        while not condition() and process.poll() is None:
            time.sleep(0.01)
        assert condition(), process.stdout.read()
