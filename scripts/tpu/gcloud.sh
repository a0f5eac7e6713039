# shellcheck shell=bash disable=SC2034,SC2154
# Asks the Cloud TPU API for tpu_run.sh, which sets name, zone, type, hosts, version, spot, queued,
# project, waits, dry_run and scratch.

stops=0 # the number of requests to stop
vm="ABSENT,,$hosts," # in a dry run: what gcloud would say of the VM

pause() { sleep "$1" & wait $! || true; }
ask() { # ARGUMENTS... of gcloud: the answer is in $scratch/out and $scratch/err
  set -- gcloud compute tpus "$@" "--zone=$zone" ${project:+"--project=$project"} --quiet
  if [[ -n "$dry_run" ]]; then
    printf '%s\n' "$(quoted "$@")"
    pretend "$*" >"$scratch/out"
    return
  fi
  rm -f -- "$scratch/code"
  { # in the background, where Ctrl-C does not reach gcloud
    local code=0
    "$@" </dev/null >"$scratch/out" 2>"$scratch/err" || code=$?
    echo "$code" >"$scratch/code"
  } 2>/dev/null & # without a word when this script has ended before gcloud
  # The result of `wait` can be wrong after a signal, even for a process that has ended.
  while [[ ! -s "$scratch/code" ]] && kill -0 $! 2>/dev/null; do wait $! || true; done
  local result=''
  read -r result 2>/dev/null <"$scratch/code" || true
  return "${result:-1}"
}
cloud() { ask tpu-vm "$@"; }
queue() { ask queued-resources "$@"; }
pretend() { # gcloud's answer in a dry run: no VM exists at first, and every command succeeds
  case "$1" in
    *' create '*) vm="READY,$type,$hosts,tpu_run" ;;
    *' describe '*) echo "$vm" ;;
    *' --worker=all '*' status '*) seq -f "@status host%g ended 0 $id $token" "$hosts" ;;
  esac
}
reason() { # gcloud's last error and the lines that explain it, as one line
  tr -s '[:space:]' ' ' <"$scratch/err" | sed 's/.*ERROR/ERROR/; s/ $//' | cut -c 1-1000
}
is_missing() { grep -q -e NOT_FOUND -e 'was not found' "$scratch/err"; } # by gcloud's last answer
# Sets state (ABSENT without a VM), kind, maker, hosts of a VM, and of WAITING and FAILED the detail.
look() {
  local fields='state,acceleratorType,networkEndpoints.len(),labels.made_by'
  if cloud describe "$name" --format="csv[no-heading]($fields)"; then
    IFS=, read -r state kind hosts maker <"$scratch/out"
  else
    state=ABSENT kind='' maker=''
    is_missing || return
  fi
  [[ "$state" != ABSENT || -z "$queued" ]] || look_at_queue
}
look_at_queue() { # a queued resource has no VM before it is ACTIVE, and after its VM was preempted
  local node='tpu.nodeSpec[0].node' fields why
  fields="state.state,$node.acceleratorType,$node.labels.made_by,state.failedData.error.message"
  queue describe "$name" --format="csv[no-heading]($fields)" || { is_missing; return; }
  IFS=, read -r state kind maker why <"$scratch/out"
  case "$state" in
    ABSENT | SUSPENDED) ;;
    FAILED) detail="its queued resource failed: ${why:-without a reason}" ;;
    *) detail="queued: $state" state=WAITING ;;
  esac
}
create() {
  local start=(cloud create "$name") image=--version
  if [[ -n "$queued" ]]; then start=(queue create "$name" "--node-id=$name") image=--runtime-version; fi
  "${start[@]}" "--accelerator-type=$type" "$image=$version" --labels=made_by=tpu_run ${spot:+--spot}
}
delete() { # with --force a queued resource goes together with its VM
  if [[ -n "$queued" ]] && { queue delete "$name" --force || ! is_missing; }; then return; fi
  cloud delete "$name" || { [[ -n "$queued" ]] && is_missing; }
}
everywhere() { cloud ssh "$name" --worker=all --command="$1"; }

# ---- tries

pause_or_fail() { # TROUBLE [NOTE]: the next of the waits that are `left`; fails if there is none
  ((${#left[@]})) || return 1
  say "$1; again in ${left[0]} s${2:-}"
  pause "${left[0]}"
  left=("${left[@]:1}")
}
retry() { # WHAT COMMAND...: until it succeeds or a signal comes
  local what="$1" left=("${waits[@]}") before="$stops"
  shift
  until "$@"; do
    pause_or_fail "$what: $(reason)" && ((stops == before)) || return 1
  done
}
look_again() { retry "cannot ask for $name" look || detach "cannot ask for $name: $(reason)"; }
reach() { # WHAT COMMAND...: retries a command on the workers; fails once the VM is not READY
  local what="$1" left=("${waits[@]}") code trouble
  shift
  until "$@"; do
    code=$?
    trouble="$what: $(reason)"
    if ((code == 64)); then # the worker's own failure; ssh has 255, gcloud 1
      cat -- "$scratch/out" "$scratch/err" | tail -n 20 # with the reason
      finish 1 "$what"
    fi
    look_again
    [[ "$state" == READY ]] || return 1
    pause_or_fail "$trouble" || detach "$trouble; gave up"
  done
}
