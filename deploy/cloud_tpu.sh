#!/usr/bin/env bash
# A run on a TPU slice of the Cloud TPU API (v2 to v6e), by hand and without restarts.
# Set what stands below. --version is v2-alpha-tpuv5 for v5p, v2-alpha-tpuv6e for v6e and
# tpu-ubuntu2204-base for v2 to v4. See docs/run.md.
#
#   bash deploy/cloud_tpu.sh          makes the slice, starts the run on all hosts, shows its log
#   bash deploy/cloud_tpu.sh delete   deletes the slice; nobody else does
#
# The first command also starts the run again; a slice that exists stays. Not verified: nobody here
# has a Google Cloud project.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/../scripts/usage.sh"
usage "${1:-}"
[[ "$*" == @(|delete) ]] || { echo "ERROR: $*: give nothing or delete (--help)" >&2; exit 2; }

name=run1 zone=us-central1-a type=v5litepod-16 version=v2-alpha-tpuv5-lite
command="python main.py --config=configs/resnet50.py --workdir=gs://my-bucket/run1
  --config.data_dir=gs://my-bucket/imagenet"
tpu='gcloud compute tpus tpu-vm'

if [[ "${1:-}" == delete ]]; then
  $tpu delete $name --zone=$zone
  exit
fi
if ! $tpu describe $name --zone=$zone >/dev/null 2>&1; then
  $tpu create $name --zone=$zone --accelerator-type=$type --version=$version --spot
fi

git bundle create code.bundle HEAD
$tpu scp code.bundle $name: --zone=$zone --worker=all
$tpu ssh $name --zone=$zone --worker=all --command="
  test -d resnet || git clone code.bundle resnet
  git -C resnet fetch -q ../code.bundle HEAD && git -C resnet checkout -q FETCH_HEAD
  bash resnet/scripts/on_worker.sh ${command//$'\n'/ }"
$tpu ssh $name --zone=$zone --worker=0 --command='tail -f resnet/logs/worker.log'
