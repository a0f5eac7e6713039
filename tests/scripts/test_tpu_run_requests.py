"""scripts/tpu_run.sh with queued resources and with Compute Engine, against a stand-in for gcloud.

The stand-in refuses flags and values that Google's reference does not have.
"""

import json
import re
import signal

import pytest

from tests.helpers.fake_gcloud import COMMANDS, UNTIL_TOLD, timeless

GROUP = {"kind": "tpu7x-16"}  # two hosts


def commands(place):
    """The calls, as the names in COMMANDS without "compute"."""
    names = []
    for call in place.asked():
        words = " ".join(word for word in call[1:] if not word.startswith("-"))
        longest = max((c for c in COMMANDS if words.startswith(f"{c} ")), key=len)
        names.append(longest.removeprefix("compute "))
    return names


def changes(place):
    """Of these those that make or remove something."""
    return [name for name in commands(place) if "create" in name or "delete" in name]


QUEUE = "tpus queued-resources"
NEW_GROUP = [
    "resource-policies create workload-policy",
    "instance-templates create",
    "instance-groups managed create",
]
DELETED = "instance-groups managed", "instance-templates", "resource-policies"
NO_GROUP = [f"{kind} delete" for kind in DELETED]


@pytest.mark.parametrize(
    ("flags", "options", "hosts"),
    [
        (["--queued", "--spot"], {}, "2"),
        (["--compute_engine", "--spot"], {"kind": "v6e-8"}, "1"),
        (["--project=p"], GROUP, "2"),
    ],
)
def test_dry_run_prints_what_a_run_asks(place, flags, options, hosts):
    env = {"HOSTS": hosts}
    shown = place.succeeds("--dry_run", *flags, env=env, **options)
    assert place.asked() == []
    place.set({"wait": []}, "exit 0")
    place.succeeds(*flags, env=env, **options)
    # Google names the instances of a group, and they are asked at once.
    named = [
        [re.sub("resnet-[ab]([01])x", r"resnet-\1", word) for word in call]
        for call in timeless(place.asked())
    ]
    assert sorted(named) == sorted(place.printed(shown))
    assert place.left() == set()


def test_a_queued_resource_is_waited_for_and_taken_away_at_the_end(place):
    waiting = "WAITING_FOR_RESOURCES"
    place.set({"queue states": [waiting, waiting, "ACTIVE"]}, "exit 0")
    out = place.succeeds("--queued", "--spot", "--project=p")
    assert out.count("resnet is queued: WAITING_FOR_RESOURCES") == 1
    create = next(call for call in place.asked() if "create" in call)
    assert create[5:] == [
        *("resnet", "--node-id=resnet", "--accelerator-type=v4-16"),
        *("--runtime-version=tpu-ubuntu2204-base", "--labels=made_by=tpu_run", "--spot"),
        *("--zone=us-central1-a", "--project=p", "--quiet"),
    ]
    assert changes(place) == [f"{QUEUE} create", f"{QUEUE} delete"]
    assert place.runs() == place.runs(1) == 1 and place.left() == set()


@pytest.mark.parametrize("event", ["PREEMPTED", "SUSPENDED"])
def test_a_preempted_vm_is_queued_for_again(place, event):
    place.set({"status": ["", event]}, UNTIL_TOLD, "exit 0")
    place.succeeds("--queued", "--spot")
    assert changes(place) == [f"{QUEUE} create", f"{QUEUE} delete"] * 2
    assert place.runs() == 2 and place.left() == set()


def test_a_request_that_failed_is_said_and_taken_away(place):
    place.set({"queue states": ["WAITING_FOR_RESOURCES", "FAILED"]})
    code, out = place.run("--queued")
    assert code == 1, out
    assert "tpu_run: resnet: its queued resource failed: without a reason\n" in out
    assert place.left() == set()


def test_who_stops_while_queued_takes_the_request_back(place):
    place.set({"queue states": ["WAITING_FOR_RESOURCES"]})
    process = place.start("--queued")
    place.wait_for(lambda: commands(place).count(f"{QUEUE} describe") > 3, process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 143, out
    assert place.left() == set() and place.runs() == 0


def test_a_vm_that_was_not_queued_is_deleted_all_the_same(place):
    place.vm(labels="tpu_run")
    place.succeeds("--queued")
    assert changes(place) == [f"{QUEUE} delete", "tpus tpu-vm delete"]
    assert place.left() == set()


@pytest.mark.parametrize(
    ("kind", "machine", "image"),
    [
        ("v5litepod-8", "ct5lp-hightpu-8t", "2204-amd64-tpu-v5e-v5p-v6e"),
        ("v5p-8", "ct5p-hightpu-4t", "2204-amd64-tpu-v5e-v5p-v6e"),
        ("v6e-1", "ct6e-standard-1t", "2204-amd64-tpu-v5e-v5p-v6e"),
        ("tpu7x-8", "tpu7x-standard-4t", "2404-amd64-tpu-tpu7x"),
    ],
)
def test_one_host_is_an_instance_of_compute_engine(place, kind, machine, image):
    shown = place.succeeds("--dry_run", "--compute_engine", kind=kind, env={"HOSTS": "1"})
    create = next(call for call in place.printed(shown) if "create" in call)
    assert create[1:] == [
        *("compute", "instances", "create", "resnet", f"--machine-type={machine}"),
        *(f"--image-family=ubuntu-accel-{image}", "--boot-disk-size=200GB"),
        *("--image-project=ubuntu-os-accelerator-images", "--maintenance-policy=TERMINATE"),
        *("--scopes=cloud-platform", "--labels=made_by=tpu_run"),
        *("--zone=us-central1-a", "--quiet"),
    ]


@pytest.mark.parametrize(
    ("kind", "topology"),
    [
        *(("tpu7x-32", "2x2x4"), ("tpu7x-128", "4x4x4")),
        *(("v5p-16", "2x2x2"), ("v5p-64", "2x4x4"), ("v6e-16", "4x4"), ("v6e-32", "4x8")),
    ],
)
def test_the_topology_of_several_hosts(place, kind, topology):
    out = place.succeeds("--dry_run", "--compute_engine", "--project=p", kind=kind)
    assert f"--accelerator-topology={topology} --region=us-central1 " in out


def test_several_hosts_are_a_group_of_compute_engine(place):
    place.set({}, 'echo "step 9/9  done by $(hostname)"; exit 0')
    out = place.succeeds("--project=p", "--spot", **GROUP)
    policy, template, group = [call[1:-2] for call in place.asked() if "create" in call]
    assert policy[1:] == [
        *("resource-policies", "create", "workload-policy", "resnet", "--type=HIGH_THROUGHPUT"),
        *("--accelerator-topology=2x2x2", "--region=us-central1"),
    ]
    assert "--machine-type=tpu7x-standard-4t" in template
    assert template[-2:] == ["--provisioning-model=SPOT", "--instance-termination-action=STOP"]
    assert group[1:] == [
        *("instance-groups", "managed", "create", "resnet", "--template=resnet", "--size=2"),
        *("--description=made_by=tpu_run", "--target-size-policy-mode=bulk"),
        "--default-action-on-vm-failure=do-nothing",
        "--workload-policy=projects/p/regions/us-central1/resourcePolicies/resnet",
        "--zone=us-central1-a",
    ]
    assert changes(place) == NEW_GROUP + NO_GROUP
    assert "done by worker0" in out and "done by worker1" not in out
    for worker in (0, 1):
        (log,) = place.logs(worker)
        assert f"done by worker{worker}" in log.read_text()
    assert place.left() == set()


def test_the_steps_are_those_of_process_0_wherever_it_is(place):
    """Restarts that bring new steps are not bounded, also where the first instance says none."""
    jobs = [
        f"""h=$(hostname); [ "$h" = worker1 ] && echo "step {step}/9  of $h"; exit {code}"""
        for step, code in ((3, 75), (4, 75), (9, 0))
    ]
    place.set({}, *jobs)
    out = place.succeeds("--project=p", "--max_restarts=1", **GROUP)
    assert [out.count(f"step {step}/9  of worker1\n") for step in (3, 4, 9)] == [1] * 3
    for worker in (0, 1):
        said = [log.read_text().count("/9  of worker") for log in place.logs(worker)]
        assert said == [worker] * 3


def test_a_group_is_waited_for(place):
    place.set({"group states": ["STAGING,CREATING", ",CREATING"]}, "exit 0")
    out = place.succeeds("--project=p", **GROUP)
    assert out.count("resnet is waiting: 0 of 2 hosts run; Ctrl-C takes the request back") == 1
    assert place.runs() == place.runs(1) == 1


def test_a_preempted_instance_is_made_anew(place):
    place.set({"status": ["", "TERMINATED"]}, UNTIL_TOLD, 'echo "step 9/9  x"; exit 0')
    flags = "--compute_engine", "--spot"
    place.succeeds(*flags, kind="v6e-8", env={"HOSTS": "1"})
    assert changes(place) == ["instances create", "instances delete"] * 2
    assert place.runs() == 2 and place.left() == set()


@pytest.mark.long
def test_a_group_of_which_a_host_was_preempted_is_made_anew(place):
    place.set({"status": ["", "", "TERMINATED"]}, UNTIL_TOLD, "exit 0")
    place.succeeds("--project=p", "--spot", **GROUP)
    assert changes(place) == (NEW_GROUP + NO_GROUP) * 2
    assert place.runs() == place.runs(1) == 2 and place.left() == set()


def test_what_a_failed_request_has_made_is_removed_and_its_reason_is_shown(place):
    place.set({"managed create": ["1 Invalid value for size"]})
    code, out = place.run("--project=p", **GROUP)
    assert code == 1 and out.splitlines()[-1].endswith("ERROR: (create) Invalid value for size")
    assert changes(place) == NEW_GROUP + NO_GROUP and place.left() == set()


def test_one_worker_that_does_not_answer_is_asked_again(place):
    place.set({"scp": ["", "255 ssh"], "status": ["", "255 ssh"]}, "exit 0")
    out = place.succeeds("--project=p", **GROUP)
    assert "cannot copy to resnet" in out and "no answer from the workers" in out
    assert place.runs() == place.runs(1) == 1


def test_groups_of_others_are_left_alone(place):
    for what in ("policy", "template"):
        (place.fake / what).write_text(json.dumps({"state": "READY", "type": "", "labels": ""}))
    place.vm(kind="2")
    out = place.succeeds("--project=p", **GROUP)
    assert changes(place) == [] and place.left() == {"vm", "template", "policy"}
    place.vm(kind="4")
    code, out = place.run("--project=p", **GROUP)
    assert code == 1 and "resnet is a group of 4 hosts, not a tpu7x-standard-4t" in out


def test_the_second_signal_names_all_that_is_left(place):
    place.set({}, 'trap "" TERM; echo "step 3/9  x"; while :; do sleep 0.05; done')
    process = place.start("--project=p", **GROUP)
    place.wait_for(lambda: place.logs(0) and "step 3/9" in place.logs(0)[0].read_text(), process)
    process.send_signal(signal.SIGINT)
    place.wait_for(lambda: place.questions("signal"), process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 130, out
    assert out.splitlines()[-1].endswith(
        "gcloud compute instance-groups managed delete resnet --zone=us-central1-a --project=p && "
        "gcloud compute instance-templates delete resnet --project=p && "
        "gcloud compute resource-policies delete resnet --region=us-central1 --project=p"
    )


@pytest.mark.parametrize(
    ("flags", "kind", "words"),
    [
        (["--compute_engine"], "v4-8", ["--type=v4-8"]),
        (["--compute_engine"], "v5litepod-16", ["no v5litepod with several hosts"]),
        (["--queued"], "tpu7x-8", ["--queued"]),
        ([], "tpu7x-16", ["--project=ID"]),
        ([], "tpu7x-4", ["--type='tpu7x-4'"]),
        ([], "tpu9-8", ["--type='tpu9-8'"]),
    ],
)
def test_what_cannot_work_is_said_in_one_line(place, flags, kind, words):
    place.refuses(flags, words, kind=kind)
