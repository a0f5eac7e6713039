"""scripts/tpu_run.sh, end to end, against a stand-in for gcloud.

The stand-in refuses flags and values that Google's reference does not have.
"""

import os
import re
import shutil
import signal
import subprocess
import time

import pytest

from tests.helpers.fake_gcloud import SCRIPTS, UNTIL_TOLD, WORKDIR, timeless

AWKWARD = ["it's", 'say "x"', "$HOME `id` \\ *", "", "two  blanks", "line\nbreak"]


@pytest.mark.parametrize(
    "flags", [["--spot", "--project=p", "--version=v2-beta"], ["--queued", "--spot"]]
)
def test_dry_run_prints_what_a_run_asks(place, flags):
    options = {"command": ("python", "main.py", WORKDIR, *AWKWARD)}
    shown = place.succeeds("--dry_run", *flags, **options)
    assert place.asked() == []
    assert not (place.repository / "logs").exists()
    place.set({"wait": []}, "exit 0")
    place.succeeds(*flags, **options)
    assert timeless(place.asked()) == place.printed(shown)
    assert place.left() == set()
    for worker in (0, 1):
        arguments = (place.fake / f"arguments-worker{worker}").read_text()
        assert arguments == "\n".join([WORKDIR, *AWKWARD]) + "\n"


def test_a_run_from_nothing(place):
    place.set({}, 'echo "step 9/9  done by $(hostname)"; cat configs/new; cat old; exit 0')
    place.write("old", "before\n")
    place.write("gone", "")
    place.git("add", ".")
    place.write("old", "uncommitted change\n")
    (place.repository / "gone").unlink()
    place.write("untracked", "")
    out = place.succeeds()
    assert "step 9/9  done by worker0" in out
    assert "done by worker1" not in out
    assert "uncommitted change" in out
    assert "WARNING: 1 new files are not copied" in out
    create = next(call for call in place.asked() if call[4] == "create")
    assert "--version=tpu-ubuntu2204-base" in create
    assert "--spot" not in create
    assert place.left() == set()
    for worker in (0, 1):
        (log,) = place.logs(worker)
        assert f"done by worker{worker}" in log.read_text()
        assert (place.fake / f"setup-worker{worker}").read_text() == "tpu\n"


@pytest.mark.parametrize(
    ("flags", "options", "words"),
    [
        ([], {"command": ()}, ["no command"]),
        (["--nmae=x"], {}, ["'--nmae=x'", "--help"]),
        (["python"], {}, ["'python'", "after --"]),
        (["--name=A_b"], {}, ["--name='A_b'"]),
        (["--zone="], {}, ["--zone=us-central1-a"]),
        ([], {"kind": "v5e-12"}, ["--type='v5litepod-12'"]),
        (["--dry_run"], {"kind": "v4-4"}, ["--type='v4-4'"]),
        ([], {"kind": "tpu7x-8"}, ["--type='tpu7x-8'", "docs/run.md"]),
        (["--max_restarts=x"], {}, ["--max_restarts=x"]),
        ([], {"command": ("python", "main.py", "--workdir", "w")}, ["'w'", "several", "gs://"]),
        ([], {"command": ("python", "main.py")}, ["workdir ''", "gs://"]),
        ([], {"command": ("python", "resnet_main.py", "--model_dir=/w")}, ["'/w'", "several"]),
        ([], {"kind": "v4-8", "command": ("python", "main.py", "--workdir=/w")}, ["--keep"]),
        ([], {"env": {"PATH": "{tools}"}}, ["no gcloud"]),
    ],
)
def test_what_cannot_work_is_said_in_one_line(place, flags, options, words):
    tools = place.fake / "tools"
    tools.mkdir()
    for tool in ("bash", "git", "mktemp", "rm", "dirname"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    env = {k: v.format(tools=tools) for k, v in options.pop("env", {}).items()}
    code, out = place.run(*flags, env=env, **options)
    assert code == 1 and len(out.splitlines()) == 1, out
    assert all(word in out for word in words), out
    assert place.asked() == []


@pytest.mark.parametrize(
    ("kind", "image"),
    [
        ("v3-32", "tpu-ubuntu2204-base"),
        ("v5e-16", "v2-alpha-tpuv5-lite"),
        ("v5p-8", "v2-alpha-tpuv5"),
        ("v6e-8", "v2-alpha-tpuv6e"),
    ],
)
def test_the_runtime_follows_the_type(place, kind, image):
    code, out = place.run("--dry_run", kind=kind)
    assert code == 0
    kind = kind.replace("v5e", "v5litepod")  # as preflight takes it, too
    assert f"--accelerator-type={kind} --version={image} " in out


def test_environment_and_tcmalloc_reach_the_command(place):
    library = "/lib/x86_64-linux-gnu/libtcmalloc.so.4"
    (place.fake / "libraries").write_text(f"\tlibtcmalloc.so.4 (libc6,x86-64) => {library}\n")
    env = {
        "TPU_MODEL_DIR": "gs://b/m",
        "MLP_PATH_GCS_IMAGENET": "gs://b/i",
        "MLP_GCS_RESNET_CHECKPOINT": "gs://b/resnet34",
    }
    out = place.succeeds(env=env, command=("python", "main.py"))
    for name, value in {**env, "LD_PRELOAD": library}.items():
        assert f"\n{name}={value}\n" in out


def test_capacity_is_waited_for_and_other_refusals_are_not(place):
    place.set({"create": ["1 There is no more capacity in the zone"] * 2}, "exit 0")
    out = place.succeeds()
    assert "again in 0.01 s (3 tries left)" in out
    assert place.verbs().count("create") == 3
    place.set({"create": ["1 Quota limit exceeded, no capacity"]})
    code, out = place.run()
    assert code == 1
    assert "cannot create resnet" in out.splitlines()[-1]
    place.set({"create": ["1 no more capacity"] * 9})
    code, out = place.run()
    assert code == 1
    assert "gave up after 3 waits" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "event"),
    [([], "PREEMPTED"), (["--queued"], "PREEMPTED"), (["--queued"], "SUSPENDED")],
)
def test_a_preempted_vm_is_made_anew_and_the_run_goes_on(place, flags, event):
    place.set({"status": ["", event]}, UNTIL_TOLD, 'echo "step 9/9  x"; exit 0')
    place.succeeds("--spot", *flags)
    assert place.verbs("create", "delete") == ["create", "delete"] * 2
    assert place.runs() == place.runs(1) == len(place.logs(0)) == 2
    assert place.left() == set()


DEAF = 'trap "" TERM; while :; do sleep 0.02; done'


@pytest.mark.parametrize("event", ["reboot", "REPAIRING"])
def test_a_machine_that_started_anew_is_used_again(place, event):
    place.set({"status": ["", event]}, UNTIL_TOLD, "exit 0")
    place.succeeds()
    assert place.verbs().count("create") == 1
    assert place.runs() == 2


@pytest.mark.parametrize(
    ("first", "code", "runs"),
    [
        ("exit 1", 1, 1),
        ("exit 75", 0, 2),
        ("exit 139", 139, 1),
        ("exit 143", 143, 1),
        ("[[ $(hostname) == worker0 ]] && exit 75; exit 1", 1, 1),
        ("[[ $(hostname) == worker0 ]] && exit 75; exit 139", 0, 2),
        (f"[[ $(hostname) == worker0 ]] && exit 139; {UNTIL_TOLD}", 139, 1),
        (f"[[ $(hostname) == worker0 ]] && exit 139; {DEAF}", 139, 1),
    ],
)
def test_exit_codes(place, first, code, runs):
    place.set({}, first, "exit 0")
    exit_code, out = place.run()
    assert (exit_code, place.runs()) == (code, runs), out
    assert place.left() == set()


def test_restarts_that_bring_nothing_are_bounded(place):
    steps = [f"echo 'step {step}/9,000  x'; exit 75" for step in ("999", "1,000", "1,000", "1,001")]
    place.set({}, *steps)
    code, out = place.run("--max_restarts=1")
    assert code == 1
    assert "gave up: no new step after 1 restart(s)" in out
    assert place.runs() == 3


def test_ssh_that_fails_is_tried_again_without_a_second_trainer(place):
    faults = {"status": ["", "255 ssh"], "start": ["255 ssh"], "scp": ["255 ssh"], "log": ["255 x"]}
    place.set(faults, "exit 0")
    out = place.succeeds()
    assert place.runs() == place.runs(1) == 1
    assert "cannot copy" in out and "cannot start" in out


def test_an_installation_that_fails_is_not_tried_for_hours(place):
    place.write("scripts/setup.sh", "echo ERROR: no such package >&2; exit 1")
    code, out = place.run()
    assert code == 1
    assert out.count("no such package") == 2  # by each of two workers
    assert "tpu_run: cannot install on resnet\n" in out
    assert place.left() == set()


def test_the_complete_reason_of_gcloud_is_one_line(place):
    place.set({"describe": ["1 Error parsing [tpu].\nNo [project] is set: \n- give `--project`"]})
    code, out = place.run()
    reason = "Error parsing [tpu]. No [project] is set: - give `--project`"
    assert (code, out) == (1, f"tpu_run: cannot ask for resnet: ERROR: (describe) {reason}\n")


def test_vms_of_others_of_another_type_or_state_are_left_alone(place):
    place.vm()
    place.succeeds()
    place.vm("PREEMPTED")
    code, out = place.run()
    assert code == 1 and "--recreate" in out
    for state, kind, words in (
        ("READY", "v4-32", "resnet is a v4-32, not a v4-16"),
        ("STOPPED", "v4-16", "tpu-vm start resnet"),
    ):
        place.vm(state, kind=kind, labels="tpu_run")
        code, out = place.run()
        assert code == 1 and words in out
    assert place.left() == {"vm"} and place.verbs("create", "delete") == []
    place.vm("PREEMPTED")
    place.succeeds("--recreate")
    assert place.left() == set()


def test_keep_and_a_second_run_within_the_same_second(place):
    place.program(
        "bin/date",
        """echo x >>"$FAKE/dates"; echo "20260101-00000$(($(wc -l <"$FAKE/dates") / 3))" """,
    )
    out = place.succeeds("--keep")
    assert "still there and costs money" in out
    place.set({}, "", "exit 0")
    out = place.succeeds()
    assert place.left() == set()
    assert place.verbs().count("create") == 1
    assert [log.parent.name for log in place.logs(1)] == ["20260101-000000-1", "20260101-000001-1"]


def signalled(place, process):
    """The script, once the program has printed its first step through it."""
    place.wait_for(lambda: place.logs(0) and "step 3/9" in place.logs(0)[0].read_text(), process)
    process.send_signal(signal.SIGINT)


def test_the_first_signal_stops_the_workers_and_keeps_their_code(place):
    place.set({}, UNTIL_TOLD)
    process = place.start()
    signalled(place, process)
    out, _ = process.communicate()
    assert process.returncode == 143, out
    assert place.runs() == 1
    assert place.left() == set()
    for worker in (0, 1):
        assert "ended with code 143" in place.logs(worker)[0].read_text()


def test_the_second_signal_leaves_it_running(place):
    slow = 'trap "" TERM; until [[ -e "$FAKE/go" ]]; do echo "step 3/9  x"; sleep 0.05; done'
    place.set({}, slow)
    process = place.start()
    signalled(place, process)
    place.wait_for(lambda: place.questions("signal"), process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate()
    assert process.returncode == 130, out
    assert "gcloud compute tpus tpu-vm delete resnet --zone=us-central1-a" in out
    assert place.left() == {"vm"}
    ends = [place.fake / f"worker{i}/tpu_run/job/exit_code" for i in (0, 1)]
    assert not any(end.exists() for end in ends)
    (place.fake / "go").touch()
    while not all(end.exists() for end in ends):
        time.sleep(0.01)
    assert [end.read_text() for end in ends] == ["0\n", "0\n"]


def test_a_run_in_progress_is_joined_or_refused(place):
    place.set({}, 'echo first; while [[ ! -e "$FAKE/go" ]]; do sleep 0.02; done; echo last; exit 0')
    first = place.start()
    place.wait_for(lambda: place.runs() == 1 and place.runs(1) == 1, first)
    code, out = place.run()
    assert code == 1 and f"process {first.pid} on this machine looks after resnet" in out
    first.kill()
    first.communicate()
    code, out = place.run(command=("python", "main.py", WORKDIR, "--more"))
    assert code == 1 and "busy with another command" in out
    assert place.left() == {"vm"}
    before = place.questions("log")
    again = place.start()
    place.wait_for(lambda: place.questions("log") > before, again)
    (place.fake / "go").touch()
    out, _ = again.communicate()
    assert again.returncode == 0, out
    assert "joining the run in progress" in out
    assert "\nlast\n" in out
    assert place.runs() == 1
    assert len(place.logs(0)) == 1
    assert place.left() == set()


def test_lines_are_not_repeated_when_gcloud_asks_twice(place):
    home = place.fake / "home"
    (home / "tpu_run/job").mkdir(parents=True)
    (home / "tpu_run/job/log").write_text("one\ntwo\nthree\nunfinish")
    worker = ["bash", str(SCRIPTS / "tpu" / "worker.sh"), "log"]
    env = {**os.environ, "HOME": str(home)}
    answers = [
        subprocess.run([*worker, seen], env=env, capture_output=True, text=True, check=True).stdout
        for seen in ("0", "2", "3")
    ]
    mark = "\n@@tpu_run log@@\n"
    assert answers == [mark + "one\ntwo\nthree\n", mark + "three\n", mark]
    # A broken answer, as gcloud repeats it.
    (place.fake / "twice").write_text(mark + "one\ntw" + answers[0])
    stream = re.search(r"awk '(.*@@tpu_run log@@.*)'", (SCRIPTS / "tpu_run.sh").read_text())
    assert stream is not None
    awk = ["awk", stream[1], place.fake / "twice"]
    done = subprocess.run(awk, capture_output=True, text=True, check=True)
    assert done.stdout == "one\ntwo\nthree\n"


def test_a_queued_resource_is_waited_for_and_taken_away_at_the_end(place):
    waiting = "WAITING_FOR_RESOURCES"
    place.set({"queue states": [waiting, waiting, "ACTIVE"]}, "exit 0")
    out = place.succeeds("--queued", "--spot", "--project=p")
    assert out.count("resnet is queued: WAITING_FOR_RESOURCES") == 1
    create = next(call for call in place.asked() if "create" in call)
    assert create[3:] == [
        *("queued-resources", "create", "resnet", "--node-id=resnet", "--accelerator-type=v4-16"),
        *("--runtime-version=tpu-ubuntu2204-base", "--labels=made_by=tpu_run", "--spot"),
        *("--zone=us-central1-a", "--project=p", "--quiet"),
    ]
    assert place.verbs("create", "delete") == ["create", "delete"]
    assert place.runs() == place.runs(1) == 1 and place.left() == set()


def test_a_request_that_failed_is_said_and_taken_away(place):
    place.set({"queue states": ["WAITING_FOR_RESOURCES", "FAILED"]})
    code, out = place.run("--queued")
    assert code == 1, out
    assert "tpu_run: resnet: its queued resource failed: without a reason\n" in out
    assert place.left() == set()


def test_who_stops_while_queued_takes_the_request_back(place):
    place.set({"queue states": ["WAITING_FOR_RESOURCES"]})
    process = place.start("--queued")
    place.wait_for(lambda: place.verbs().count("describe") > 6, process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 143, out
    assert place.left() == set() and place.runs() == 0
