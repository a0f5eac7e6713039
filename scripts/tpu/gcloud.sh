# shellcheck shell=bash disable=SC2034,SC2154
# Calls gcloud for tpu_run.sh, which sets name, zone, type, project, waits, dry_run and scratch.

stops=0 # the number of requests to stop
made='' # in a dry run: whether the VM would exist by now

await() { # PID: waits for the process; a signal interrupts `wait`, so it waits again
  local code before=-1
  while [[ "$stops" != "$before" ]]; do
    before="$stops" code=0
    wait "$1" || code=$?
  done
  return "$code"
}
pause() {
  sleep "$1" &
  wait $! || true
}
cloud() { # VERB ARGUMENTS...: the answer is in $scratch/out and $scratch/err
  set -- gcloud compute tpus tpu-vm "$@" "--zone=$zone" ${project:+"--project=$project"} --quiet
  if [[ -n "$dry_run" ]]; then
    printf '%s\n' "$(quoted "$@")"
    pretend "$5 $*"
    return
  fi
  # In the background Ctrl-C does not reach gcloud.
  "$@" </dev/null >"$scratch/out" 2>"$scratch/err" &
  await $!
}
pretend() { # gcloud's answer in a dry run: no VM exists at first, and every command succeeds
  case "$1" in
    create*) made=yes ;;
    describe*) if [[ -n "$made" ]]; then echo "READY,$type,$expected_hosts,tpu_run"; else echo ABSENT,,0,; fi ;;
    ssh*' status '*) for ((i = 0; i < hosts; i++)); do echo "@status host$i ended 0 $id $token"; done ;;
  esac >"$scratch/out"
}
reason() { # gcloud's last error and the lines that explain it, as one line; else its last line
  awk '/ERROR|rror:/ { text = ""; error = 1 }
       NF { $1 = $1; text = error && text ? text " " $0 : $0 }
       END { print substr(text, 1, 1000) }' "$scratch/err"
}
look() { # sets state (ABSENT without a VM), kind, hosts and maker
  local format='csv[no-heading](state,acceleratorType,networkEndpoints.len(),labels.made_by)'
  if cloud describe "$name" --format="$format"; then
    IFS=, read -r state kind hosts maker <"$scratch/out"
  elif grep -q NOT_FOUND "$scratch/err"; then
    state=ABSENT kind='' hosts=0 maker=''
  else
    return 1
  fi
}
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
everywhere() { cloud ssh "$name" --worker=all --command="$1"; }
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
