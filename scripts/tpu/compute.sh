# shellcheck shell=bash disable=SC2034,SC2154
# Asks Compute Engine for tpu_run.sh, after gcloud.sh. A slice of one host is an instance. A slice of
# several is a managed instance group with an instance template and a workload policy, which has the
# topology; all three have the run's name. Flags: Google's pages "Create a TPU VM instance", "Create
# a MIG with multi-host TPU slice" and "Request TPU Spot VMs".

instances=("$name") # by name, the workers in order
chips=$((size / 2)) family=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e per_host=4
case "$type" in
  v5litepod-1 | v5litepod-[48]) chips="$size" per_host="$size" wanted="ct5lp-hightpu-${size}t" ;;
  v5litepod-*) fail "--type=$type: Compute Engine has no v5litepod with several hosts: leave out --compute_engine" ;;
  v5p-*) wanted=ct5p-hightpu-4t ;;
  v6e-*)
    chips="$size"
    if ((size <= 8)); then per_host="$size"; fi
    wanted="ct6e-standard-${per_host}t"
    ;;
  tpu7x-*) wanted=tpu7x-standard-4t family=ubuntu-accel-2404-amd64-tpu-tpu7x ;;
  *) fail "--type=$type: Compute Engine has no such TPU: leave out --compute_engine" ;;
esac
[[ -z "$queued" ]] || fail "--queued is of the Cloud TPU API: leave it out, Compute Engine waits by itself"
((expected_hosts == 1)) || [[ -n "$project" ]] ||
  fail "no project: $type has several hosts, whose workload policy is named by project; give --project=ID"
: "${version:=$family}"
region="${zone%-*}"

topology() { # the grid of the chips, with sides as equal as powers of two can be: 4x4, 2x2x4
  local power=0 dimensions=3 i sides=()
  while ((1 << power < chips)); do power=$((power + 1)); done
  if [[ "$type" == v6e-* ]]; then dimensions=2; fi
  for ((i = 0; i < dimensions; i++)); do sides+=($((1 << (power + i) / dimensions))); done
  if ((dimensions == 3 && power == 2)); then sides=(2 2 1); fi
  local IFS=x
  printf '%s' "${sides[*]}"
}
instance() { ask "--zone=$zone" compute instances "$@"; }
group() { ask "--zone=$zone" compute instance-groups managed "$@"; }
template() { ask '' compute instance-templates "$@"; }
policy() { ask "--region=$region" compute resource-policies "$@"; }

create() {
  local machine=("--machine-type=$wanted" "--image-family=$version" --boot-disk-size=200GB
    --image-project=ubuntu-os-accelerator-images --maintenance-policy=TERMINATE
    --scopes=cloud-platform --labels=made_by=tpu_run)
  if [[ -n "$spot" ]]; then machine+=(--provisioning-model=SPOT --instance-termination-action=STOP); fi
  if ((expected_hosts == 1)); then
    instance create "$name" "${machine[@]}"
    return
  fi
  policy create workload-policy "$name" --type=HIGH_THROUGHPUT "--accelerator-topology=$(topology)" &&
    template create "$name" "${machine[@]}" &&
    group create "$name" "--template=$name" "--size=$expected_hosts" --description=made_by=tpu_run \
      --target-size-policy-mode=bulk --default-action-on-vm-failure=do-nothing \
      "--workload-policy=projects/$project/regions/$region/resourcePolicies/$name" && return
  cp -- "$scratch/err" "$scratch/why" # the first reason, for the message
  remove_group || true
  cp -- "$scratch/why" "$scratch/err"
  return 1
}
delete() {
  if ((expected_hosts == 1)); then instance delete "$name"; else remove_group; fi
}
remove_group() { # in this order, because each is in use by the one before it
  group delete "$name" || is_missing || return
  template delete "$name" || is_missing || return
  policy delete "$name" || is_missing
}
to_delete() {
  local to=(gcloud compute)
  local of="${project:+ --project=$project}"
  if ((expected_hosts == 1)); then
    quoted "${to[@]}" instances delete "$name" "--zone=$zone"
    printf '%s' "$of"
  else
    printf '%s' "$(quoted "${to[@]}" instance-groups managed delete "$name" "--zone=$zone")$of && " \
      "$(quoted "${to[@]}" instance-templates delete "$name")$of && " \
      "$(quoted "${to[@]}" resource-policies delete "$name" "--region=$region")$of"
  fi
}
look() {
  state=ABSENT kind='' hosts=0 maker='' detail=''
  if ((expected_hosts > 1)); then
    look_at_group
  elif instance describe "$name" --format='csv[no-heading](status,machineType.basename(),labels.made_by)'; then
    IFS=, read -r state kind maker <"$scratch/out"
    hosts=1
    case "$state" in
      RUNNING) state=READY ;;
      PENDING | PROVISIONING | STAGING) detail="$state" state=WAITING ;;
    esac
  else
    is_missing
  fi
}
look_at_group() {
  local count action vm status lost='' busy='' running=0
  if ! group describe "$name" --format='csv[no-heading](targetSize,description)'; then
    is_missing
    return
  fi
  IFS=, read -r count maker <"$scratch/out"
  if [[ "$count" == ABSENT ]]; then return; fi # in a dry run
  maker="${maker#made_by=}" kind="$wanted"
  if ((count != expected_hosts)); then kind="group of $count hosts"; fi
  group list-instances "$name" --format='csv[no-heading](instance.basename(),instanceStatus,currentAction)' || return
  instances=()
  while IFS=, read -r vm status action; do
    instances+=("$vm")
    if [[ "$action" != NONE ]]; then busy=yes; elif [[ "$status" == RUNNING ]]; then
      running=$((running + 1))
    else lost=yes; fi
  done < <(sort "$scratch/out")
  hosts="${#instances[@]}"
  if ((running == count || count != expected_hosts)); then state=READY; elif [[ -n "$busy" || "$hosts" == 0 ]]; then
    state=WAITING detail="waiting: $running of $count hosts run"
  else state=PREEMPTED; fi
}
pretend_ready() {
  if ((expected_hosts == 1)); then echo "RUNNING,$wanted,tpu_run"; else echo "$expected_hosts,made_by=tpu_run"; fi
}
at() { # NUMBER VERB ARGUMENTS... of `gcloud compute`, where @ is the worker's name
  local vm="${instances[$1]}" verb="$2"
  shift 2
  ask "--zone=$zone" compute "$verb" "${@/#@/$vm}"
}
at_all() { # the same on all workers at once; fails with the first code that is not 0
  local i code result=0 pids=() whole="$scratch" answers=''
  if ((hosts == 1)); then
    at 0 "$@"
    return
  fi
  for ((i = 0; i < hosts; i++)); do
    mkdir -p -- "$whole/$i"
    if [[ -n "$dry_run" ]]; then
      at "$i" "$@"
      answers+="$(cat -- "$scratch/out")"$'\n'
    else
      scratch="$whole/$i" # of the subshell alone
      rm -f -- "$scratch/code"
      (trap '' INT TERM && at "$i" "$@") &
      pids+=($!)
      scratch="$whole"
    fi
  done
  if [[ -n "$dry_run" ]]; then
    printf '%s' "$answers" >"$scratch/out"
    return
  fi
  for i in "${!pids[@]}"; do
    code=0
    await "${pids[i]}" "$scratch/$i" || code=$?
    if ((code && !result)); then result="$code"; fi
  done
  cat -- "$scratch"/*/out >"$scratch/out"
  cat -- "$scratch"/*/err >"$scratch/err"
  return "$result"
}
everywhere() { at_all ssh @ --command="$1"; }
on_worker() { at "$1" ssh @ --command="$2"; }
send() { at_all scp "$1" "@:$2"; }
fetch() { at "$1" scp "@:$2" "$3"; }
find_speaker() { # process 0 says the steps; libtpu may have put it on another instance than the first
  local i
  ((hosts > 1)) && everywhere "grep -q '^step ' tpu_run/job/log && echo @steps || true" || return 0
  for ((i = 0; i < hosts; i++)); do
    if grep -qs '^@steps' "$scratch/$i/out"; then
      ((i == speaker)) || speak "$i"
      return
    fi
  done
}
