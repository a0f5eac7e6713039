#!/usr/bin/env bash
# A run on a TPU slice of Compute Engine's instances (v5p, v6e, TPU7x), by hand and without restarts.
# Set what stands below; topology, machine and number of hosts belong together. See docs/run.md.
#
#   bash deploy/compute_engine.sh          makes the hosts, starts the run on them, shows its log
#   bash deploy/compute_engine.sh delete   deletes them; nobody else does
#
# The first command also starts the run again; hosts that exist stay. TPU7x: tpu7x-standard-4t and
# ubuntu-accel-2404-amd64-tpu-tpu7x. Not verified: nobody here has a Google Cloud project.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/../scripts/usage.sh"
usage "${1:-}"
[[ "$*" == @(|delete) ]] || { echo "ERROR: $*: give nothing or delete (--help)" >&2; exit 2; }

name=run1 zone=us-east5-b region=us-east5 project=my-project topology=4x4 count=4
machine="--machine-type=ct6e-standard-4t --image-project=ubuntu-os-accelerator-images
  --image-family=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e --boot-disk-size=200GB
  --maintenance-policy=TERMINATE --scopes=cloud-platform
  --provisioning-model=SPOT --instance-termination-action=STOP"
command="python main.py --config=configs/resnet50.py --workdir=gs://my-bucket/run1
  --config.data_dir=gs://my-bucket/imagenet"
groups='gcloud compute instance-groups managed'

if [[ "${1:-}" == delete ]]; then
  $groups delete $name --zone=$zone
  gcloud compute instance-templates delete $name
  gcloud compute resource-policies delete $name --region=$region
  exit
fi
if ! $groups describe $name --zone=$zone >/dev/null 2>&1; then
  gcloud compute resource-policies create workload-policy $name --region=$region \
    --type=HIGH_THROUGHPUT --accelerator-topology=$topology
  # shellcheck disable=SC2086 # words
  gcloud compute instance-templates create $name $machine
  $groups create $name --zone=$zone --template=$name --size=$count \
    --target-size-policy-mode=bulk --default-action-on-vm-failure=do-nothing \
    --workload-policy=projects/$project/regions/$region/resourcePolicies/$name
fi
$groups wait-until $name --zone=$zone --stable

mapfile -t hosts < <($groups list-instances $name --zone=$zone \
  --format='value(instance.basename())')
git bundle create code.bundle HEAD
for i in "${!hosts[@]}"; do
  gcloud compute scp code.bundle "${hosts[i]}:" --zone=$zone
  gcloud compute ssh "${hosts[i]}" --zone=$zone --command="
    test -d resnet || git clone code.bundle resnet
    git -C resnet fetch -q ../code.bundle HEAD && git -C resnet checkout -q FETCH_HEAD
    bash resnet/scripts/on_worker.sh ${command//$'\n'/ } \
      --coordinator=${hosts[0]}:8476 --num_processes=${#hosts[@]} --process_id=$i"
done
gcloud compute ssh "${hosts[0]}" --zone=$zone --command='tail -f resnet/logs/worker.log'
