# shellcheck shell=bash disable=SC2034,SC2154
# Calls gcloud for tpu_run.sh, which sets name, zone, type, version, spot, queued, project, waits,
# dry_run and scratch. This file asks the Cloud TPU API; compute.sh replaces its functions `look`,
# `create`, `delete`, `to_delete`, `everywhere`, `on_worker`, `send`, `fetch` and `find_speaker`.

stops=0        # the number of requests to stop
made=''        # in a dry run: whether the VM would exist by now
wanted="$type" # what `look` finds as the kind of a VM of the right type

await() { # PID FOLDER: waits for a process that writes its exit code to FOLDER/code
  local code=''
  # The result of `wait` can be wrong after a signal, even for a process that has ended.
  while [[ ! -s "$2/code" ]] && kill -0 "$1" 2>/dev/null; do wait "$1" || true; done
  read -r code 2>/dev/null <"$2/code" || true
  return "${code:-1}"
}
pause() {
  sleep "$1" &
  wait $! || true
}
ask() { # LOCATION ARGUMENTS... of gcloud: the answer is in $scratch/out and $scratch/err
  local where="$1"
  shift
  set -- gcloud "$@" ${where:+"$where"} ${project:+"--project=$project"} --quiet
  if [[ -n "$dry_run" ]]; then
    printf '%s\n' "$(quoted "$@")"
    pretend "$*"
    return
  fi
  rm -f -- "$scratch/code"
  { # in the background, where Ctrl-C does not reach gcloud
    local code=0
    "$@" </dev/null >"$scratch/out" 2>"$scratch/err" || code=$?
    echo "$code" >"$scratch/code"
  } 2>/dev/null & # without a word when this script has ended before gcloud
  await $! "$scratch"
}
cloud() { ask "--zone=$zone" compute tpus tpu-vm "$@"; }
queue() { ask "--zone=$zone" compute tpus queued-resources "$@"; }
pretend() { # gcloud's answer in a dry run: no VM exists at first, and every command succeeds
  local i
  case "$1" in
    *' managed create '* | *' instances create '* | *'tpus '*' create '*) made=yes ;;
    *' describe '*) if [[ -n "$made" ]]; then pretend_ready; else echo ABSENT,,0,; fi ;;
    *" list-instances "*) for ((i = 0; i < expected_hosts; i++)); do echo "$name-$i,RUNNING,NONE"; done ;;
    *' ssh '*'--worker=all'*' status '*)
      for ((i = 0; i < hosts; i++)); do echo "@status host$i ended 0 $id $token"; done
      ;;
    *' ssh '*' status '*) echo "@status ${1#* ssh } ended 0 $id $token" | sed 's/ --command.* ended/ ended/' ;;
  esac >"$scratch/out"
}
pretend_ready() { echo "READY,$type,$expected_hosts,tpu_run"; }
reason() { # gcloud's last error and the lines that explain it, as one line; else its last line
  awk '/ERROR|rror:/ { text = ""; error = 1 }
       NF { $1 = $1; text = error && text ? text " " $0 : $0 }
       END { print substr(text, 1, 1000) }' "$scratch/err"
}
is_missing() { grep -q -e NOT_FOUND -e 'was not found' "$scratch/err"; } # by gcloud's last answer
# Sets state (ABSENT without a VM), kind, hosts, maker, and of the state WAITING the detail.
look() {
  local format='csv[no-heading](state,acceleratorType,networkEndpoints.len(),labels.made_by)'
  if cloud describe "$name" --format="$format"; then
    IFS=, read -r state kind hosts maker <"$scratch/out"
  elif is_missing; then
    state=ABSENT kind='' hosts=0 maker=''
  else
    return 1
  fi
  if [[ "$state" == ABSENT && -n "$queued" ]]; then look_at_queue; fi
}
look_at_queue() { # a queued resource has no VM before it is ACTIVE, and after its VM was preempted
  local node='tpu.nodeSpec[0].node' why
  if queue describe "$name" --format="csv[no-heading](state.state,$node.acceleratorType,$node.labels.made_by,\
state.failedData.error.message)"; then
    IFS=, read -r state kind maker why <"$scratch/out"
    case "$state" in
      ABSENT | SUSPENDED) ;;
      FAILED) detail="its queued resource failed: ${why:-without a reason}" ;;
      *) detail="queued: $state" state=WAITING ;;
    esac
  else
    is_missing
  fi
}
create() {
  if [[ -n "$queued" ]]; then
    queue create "$name" "--node-id=$name" "--accelerator-type=$type" "--runtime-version=$version" \
      --labels=made_by=tpu_run ${spot:+--spot}
  else
    cloud create "$name" "--accelerator-type=$type" "--version=$version" --labels=made_by=tpu_run \
      ${spot:+--spot}
  fi
}
delete() { # with --force a queued resource goes together with its VM
  if [[ -n "$queued" ]] && { queue delete "$name" --force || ! is_missing; }; then return; fi
  cloud delete "$name" || { [[ -n "$queued" ]] && is_missing; }
}
to_delete() { # the command that a user types
  local verbs=(tpu-vm delete "$name")
  if [[ -n "$queued" ]]; then verbs=(queued-resources delete "$name" --force); fi
  quoted gcloud compute tpus "${verbs[@]}" "--zone=$zone" ${project:+"--project=$project"}
}
find_speaker() { :; } # worker 0 is process 0
everywhere() { cloud ssh "$name" --worker=all --command="$1"; }
on_worker() { cloud ssh "$name" "--worker=$1" --command="$2"; }     # NUMBER COMMAND
send() { cloud scp "$1" "$name:$2" --worker=all; }                  # FILE TARGET, to all workers
fetch() { cloud scp "$name:$2" "$3" "--worker=$1"; }                # NUMBER FILE TARGET
retry() { # WHAT COMMAND...: after each of the waits, until it succeeds or a signal comes
  local what="$1" seconds before="$stops"
  shift
  for seconds in "${waits[@]}"; do
    if "$@"; then return; fi
    say "$what: $(reason); again in $seconds s"
    pause "$seconds"
    ((stops == before)) || return 1
  done
  "$@"
}
look_again() { retry "cannot ask for $name" look || detach "cannot ask for $name: $(reason)"; }
reach() { # WHAT COMMAND...: retries a command on the workers; fails once the VM is not READY
  local what="$1" left=("${waits[@]}") code trouble
  shift
  while :; do
    code=0
    "$@" || code=$?
    ((code)) || return 0
    trouble="$what: $(reason)"
    if ((code == 64)); then # the worker's own failure; ssh has 255, gcloud 1
      cat -- "$scratch/out" "$scratch/err" | tail -n 20 # with the reason
      say "$what"
      finish 1
    fi
    look_again
    [[ "$state" == READY ]] || return 1
    ((${#left[@]})) || detach "$trouble; gave up"
    say "$trouble; again in ${left[0]} s"
    pause "${left[0]}"
    left=("${left[@]:1}")
  done
}
# The functions of the waiting loop avoid $(...), because bash can lose a SIGINT at its end.
census() { # sets states, one line "STATE CODE ID TOKEN" per worker; fails unless each answers
  everywhere "$worker status 2>/dev/null || echo @status \$(hostname) none - - -" || return
  sort -u "$scratch/out" | sed -n 's/^@status [^ ]* //p' >"$scratch/states"
  IFS= read -r -d '' states <"$scratch/states" || true
  states="${states%$'\n'}"
  local answers=0
  while read -r _; do answers=$((answers + 1)); done <"$scratch/states"
  ((answers == hosts))
}
running() { [[ $'\n'"$states" == *$'\n''running '* ]]; } # whether any worker runs a job
