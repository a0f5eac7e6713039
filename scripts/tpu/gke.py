"""Starts a run on a TPU slice of GKE: fills in deploy/jobset.yaml and applies it with kubectl.

python -m scripts.tpu.gke --name=resnet --type=v6e-16 --image=IMAGE --spot -- \\
    --config=configs/resnet50.py --workdir=gs://my-bucket/run1

What comes after -- are the flags of main.py. Needs kubectl, which knows the cluster, and in the
cluster a node pool of the slice's chips and topology.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import yaml

from common import console, entry
from common.errors import ConfigError, UserError
from engine.aot import topology

_MANIFEST = "deploy/jobset.yaml"
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Values of the node label cloud.google.com/gke-tpu-accelerator, by chip: "Plan TPUs in GKE".
_LABELS = {
    **{"v4": "tpu-v4-podslice", "v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice"},
    **{"v6e": "tpu-v6e-slice", "tpu7x": "tpu7x"},
}
_API = "jobsets.jobset.x-k8s.io"


def main(arguments: Sequence[str] | None = None) -> int:
    """Applies the manifest, or prints it with --dry_run; returns the exit code."""
    try:
        flags = _flags(sys.argv[1:] if arguments is None else arguments)
        text = yaml.safe_dump(manifest(flags), sort_keys=False)
        if flags.dry_run:
            print(text, end="")
            return 0
        _check_cluster()
        _kubectl("apply", "--filename=-", text=text)
    except UserError as error:
        print(f"gke: {error}", file=sys.stderr)
        return 1
    pods = f"--selector=jobset.sigs.k8s.io/jobset-name={flags.name}"
    print(f"gke: watch it: kubectl logs --follow {pods}")
    print(f"gke: stop it: kubectl delete jobset {flags.name}")
    return 0


def manifest(flags: argparse.Namespace) -> dict[str, Any]:
    """The JobSet of a run.

    Args:
      flags: name, type, image, spot (bool), service_account and command, the flags of main.py.

    Raises:
      ConfigError: GKE has no such slice, or the workdir would be lost with the pods.
    """
    slices = topology.parse_slices(flags.type, "--type")
    (one,) = slices if len(slices) == 1 else [None]
    if one is None or (label := _LABELS.get(one.chip.name)) is None:
        raise ConfigError(f"--type={flags.type}: give one slice of {', '.join(_LABELS)}")
    if not re.fullmatch("[a-z]([a-z0-9-]{0,38}[a-z0-9])?", flags.name):
        raise ConfigError(f"--name={flags.name}: up to 40 lower-case letters, digits and hyphens")
    if not re.fullmatch(r"[\w.:/@-]+", flags.image):
        raise ConfigError(f"--image={flags.image}: give REGISTRY/NAME:TAG, see docs/launch.md")
    if not any(re.match("--?workdir=gs://.", word) for word in flags.command):
        raise ConfigError("no --workdir=gs://BUCKET/RUN after --: the disk of a pod ends with it")
    with open(os.path.join(_ROOT, _MANIFEST)) as file:
        whole = yaml.safe_load(file)
    whole["metadata"]["name"] = flags.name
    job = whole["spec"]["replicatedJobs"][0]["template"]["spec"]
    count, _ = topology.machines(one)
    job["parallelism"] = job["completions"] = count
    pod = job["template"]["spec"]
    pod["nodeSelector"] = {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": "x".join(map(str, one.shape)),
    }
    if flags.spot:
        pod["nodeSelector"]["cloud.google.com/gke-spot"] = "true"
    if flags.service_account:
        pod["serviceAccountName"] = flags.service_account
    (container,) = pod["containers"]
    container["image"], container["args"] = flags.image, flags.command
    chips = {"google.com/tpu": one.chips // count}
    container["resources"] = {"requests": chips, "limits": dict(chips)}
    return whole


def _check_cluster() -> None:
    """Refuses a machine without kubectl and a cluster without JobSets.

    Raises:
      ConfigError: with the fix.
    """
    if shutil.which("kubectl") is None:
        raise ConfigError("there is no kubectl here: gcloud components install kubectl")
    known = _kubectl("api-resources", "--api-group=jobset.x-k8s.io", "--output=name")
    if _API not in known.split():
        raise ConfigError(
            "the cluster has no JobSet API: install it, see https://jobset.sigs.k8s.io, or name "
            "another cluster: gcloud container clusters get-credentials CLUSTER"
        )


def _kubectl(*arguments: str, text: str = "") -> str:
    """The output of kubectl.

    Raises:
      ConfigError: it failed; the message is its last line.
    """
    done = subprocess.run(["kubectl", *arguments], input=text, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"kubectl {arguments[0]}: {lines[-1]}")
    return done.stdout


def _flags(arguments: Sequence[str]) -> argparse.Namespace:
    parser = console.Parser(
        prog="python -m scripts.tpu.gke",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--name", required=True, help="of the run and its pods")
    parser.add_argument("--type", required=True, help="the slice: v6e-16, tpu7x-8, v5e:4x4")
    parser.add_argument("--image", required=True, help="built from the Dockerfile and pushed")
    parser.add_argument("--spot", action="store_true", help="nodes that may be taken away")
    parser.add_argument("--service_account", default="", help="of Kubernetes, for gs://")
    parser.add_argument("--dry_run", action="store_true", help="print the manifest only")
    parser.add_argument("command", nargs="*", help="the flags of main.py, after --")
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(f"unknown argument {unknown[0]}: the flags of main.py come after --")
    return flags


if __name__ == "__main__":
    entry.run(main)
