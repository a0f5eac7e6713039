#!/usr/bin/env bash
# Runs a command on every host of a TPU VM slice, and restarts it after each preemption.
#
#   bash scripts/tpu_run.sh --name=resnet --zone=us-central1-a --type=v5litepod-16 -- \
#     python main.py --config=configs/resnet50.py --workdir=gs://my-bucket/run1
#
#   --project=ID      the Google Cloud project; default: gcloud's own
#   --version=IMAGE   the runtime; default: the one that Google names for the type
#   --spot            a VM that costs less and may be taken away at any time
#   --queued          asks by a queued resource, and waits until Google has the VM
#   --keep            leave the VM at the end; else it is deleted if this script created it
#   --recreate        also delete a preempted VM of this name that this script did not create
#   --max_restarts=N  give up after N restarts in a row that brought no new step; default 10
#   --dry_run         print the gcloud commands of a run without faults, and run none
#
# The same command again joins a run in progress. Environment, all in seconds:
#   TPU_RUN_POLL=20   between two questions to the workers
#   TPU_RUN_WAITS     between tries where capacity, ssh or Google's API fails; after the last it gives
#                     up. By default "30 60 120 240 480 900 900 900 900 900": an hour and a half
#   TPU_RUN_GRACE=300 until the other workers of a failed one get SIGTERM, and then until SIGKILL
set -euo pipefail

CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
worker='bash tpu_run/code/scripts/tpu/worker.sh'
poll="${TPU_RUN_POLL:-20}" grace="${TPU_RUN_GRACE:-300}"
read -ra waits <<<"${TPU_RUN_WAITS:-30 60 120 240 480 900 900 900 900 900}"
name='' zone='' type='' project='' version='' spot='' queued='' keep='' recreate='' dry_run=''
max_restarts=10
scratch="$(mktemp -d)"
: >"$scratch/err"
trap 'rm -rf -- "$scratch"' EXIT

say() { # prints a message; in a dry run as a comment of one line
  local text="$*"
  printf '%s %s\n' "${dry_run:+#}tpu_run:" "${text//$'\n'/ }"
}
fail() {
  printf 'tpu_run: %s\n' "$*" >&2
  exit 1
}
quoted() { # quotes words for a shell, here or on a worker
  local word quote="'\\''" plain='^[A-Za-z0-9_./:=,@%+-]+$' words=()
  for word in "$@"; do
    if [[ "$word" =~ $plain ]]; then words+=("$word"); else words+=("'${word//\'/"$quote"}'"); fi
  done
  printf '%s' "${words[*]}"
}

# ---- the arguments

while (($#)); do
  case "$1" in
    --name=* | --zone=* | --type=* | --project=* | --version=* | --max_restarts=*)
      flag="${1%%=*}"
      printf -v "${flag#--}" '%s' "${1#*=}"
      ;;
    --spot | --queued | --keep | --recreate | --dry_run) printf -v "${1#--}" yes ;;
    -h | --help) exec sed -n '2,/^set /{s/^# \{0,1\}//;/^set /d;p}' "scripts/${BASH_SOURCE[0]##*/}" ;;
    --) break ;;
    *) fail "unknown argument '$1': flags are --name=VALUE (see --help); the command comes after --" ;;
  esac
  shift
done
[[ $# -gt 1 ]] || fail "no command: end with -- python main.py --config=configs/resnet50.py --workdir=gs://..."
shift
[[ "$name" =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]] ||
  fail "--name='$name': give the VM a name of lower-case letters, digits and hyphens, such as --name=resnet"
[[ -n "$zone" ]] || fail "no zone: give --zone=us-central1-a (where you have quota for the type)"
type="${type/#v5e-/v5litepod-}"
size="${type#*-}" hosts=1
[[ "$type" != tpu7x-* ]] || fail "--type='$type': the Cloud TPU API has no TPU7x; take GKE, see docs/run.md"
[[ "$type" =~ ^(v2|v3|v4|v5p|v5litepod|v6e)-[1-9][0-9]{0,4}$ ]] &&
  { ((size % 8 == 0)) || [[ "$type" =~ ^(v5litepod|v6e)-[14]$ ]]; } ||
  fail "--type='$type': there is no such slice; give v2-8, v3-32, v4-16, v5p-8, v5litepod-16, v6e-8 or the like"
[[ "$max_restarts" =~ ^[0-9]+$ ]] || fail "--max_restarts=$max_restarts: give a whole number, such as 10"
if ((size > 8)); then # types v2 to v4 and v5p count cores, two per chip
  case "$type" in v5litepod-* | v6e-*) hosts=$((size / 4)) ;; *) hosts=$((size / 8)) ;; esac
fi
case "$type" in
  v5litepod-*) : "${version:=v2-alpha-tpuv5-lite}" ;;
  v5p-*) : "${version:=v2-alpha-tpuv5}" ;;
  v6e-*) : "${version:=v2-alpha-tpuv6e}" ;;
  *) : "${version:=tpu-ubuntu2204-base}" ;;
esac

workdir="${TPU_MODEL_DIR:-${MLP_GCS_MODEL_DIR:-}}"
if [[ "$*" =~ \ --?(workdir|model_dir)[=\ ]([^\ ]*) ]]; then workdir="${BASH_REMATCH[2]}"; fi
if [[ " $* " =~ [\ /](resnet_)?main\.py\  && "$workdir" != gs://* ]]; then
  ((hosts == 1)) ||
    fail "workdir '$workdir': $type has several hosts, which share only gs://; give --workdir=gs://BUCKET/RUN"
  [[ -n "$keep" ]] ||
    fail "workdir '$workdir' would be deleted with the VM: give --workdir=gs://BUCKET/RUN, or --keep"
fi
git rev-parse --git-dir >/dev/null 2>&1 ||
  fail "$PWD is not a git repository, or git is missing: use a clone, because only files that git tracks are copied"
[[ -n "$dry_run" ]] || command -v gcloud >/dev/null ||
  fail "there is no gcloud here: install it from https://cloud.google.com/sdk, then: gcloud auth login"

# main.py on the workers needs the folders that the environment names.
forwarded=()
for variable in TPU_MODEL_DIR "${!MLP_GCS_@}" "${!MLP_PATH_GCS_@}"; do
  if [[ -n "${!variable:-}" ]]; then forwarded+=("$variable=${!variable}"); fi
done
if ((${#forwarded[@]})); then set -- env "${forwarded[@]}" "$@"; fi
command="$(quoted "$@")"
token="$(cksum <<<"$command" | cut -d ' ' -f 1)" # identifies this command on the workers

# shellcheck source=scripts/tpu/gcloud.sh
. scripts/tpu/gcloud.sh

# ---- the steps of a run

provide() { # brings the VM from its known state to READY, and creates it if needed
  local left=("${waits[@]}") steps=0 trouble told=''
  while [[ "$state" != READY ]] && ((!stops)); do
    trouble=''
    case "$state" in
      ABSENT)
        say "creating $name: $type, $version${spot:+, spot}${queued:+, queued}"
        create || trouble="cannot create $name: $(reason)"
        [[ -z "$trouble" ]] ||
          grep -i -e capacity -e stockout -e exhausted <<<"$trouble" | grep -qvi quota || fail "$trouble"
        ;;
      WAITING) # Google keeps the request, so there is nothing to ask again and no end
        if [[ "$detail" != "$told" ]]; then say "$name is $detail; Ctrl-C takes the request back"; fi
        told="$detail" steps=0
        pause "$poll"
        ;;
      FAILED) finish 1 "$name: $detail" ;;
      PREEMPTED | TERMINATED | SUSPENDED)
        [[ "$maker" == tpu_run || -n "$recreate" ]] ||
          fail "$name is $state, and this script did not create it: delete it, or give --recreate"
        say "deleting $name, which is $state"
        delete || trouble="cannot delete $name: $(reason)"
        ;;
      STOPPED | HIDDEN) fail "$name is $state; first: gcloud compute tpus tpu-vm start $name --zone=$zone" ;;
      *) trouble="$name is $state" ;;
    esac
    # A VM that is preempted right after its creation must not be created without pause.
    if [[ -n "$trouble" ]] || ((++steps > 4)); then
      : "${trouble:="$name is $state"}"
      pause_or_fail "$trouble" " (${#left[@]} tries left)" || fail "$trouble; gave up after ${#waits[@]} waits"
    fi
    look_again
  done
  ((!stops)) || finish 143
  [[ "${kind##*/}" == "$type" ]] || fail "$name is a ${kind##*/}, not a $type: give another --name or --type"
}
start() { # copies the code, installs the packages and starts the command
  local unpack='mkdir -p tpu_run && cd tpu_run && rm -rf code.new && mkdir code.new' new
  unpack+=' && tar -xzf ../tpu_run_code.tgz -C code.new && rm -rf code && mv code.new code'
  if [[ -z "$dry_run" ]]; then
    new="$(git ls-files --others --exclude-standard | grep -vc '^logs/')" || true
    ((new == 0)) || say "WARNING: $new new files are not copied, because git does not track them (git add)"
    git ls-files -z | while IFS= read -r -d '' file; do # without deleted files
      if [[ -f "$file" || -L "$file" ]]; then printf '%s\0' "$file"; fi
    done | tar --null -T - -czf "$logs/code.tgz" || fail "cannot write $logs/code.tgz"
  fi
  say "copying what git tracks ($logs/code.tgz) to $hosts worker(s), and installing"
  reach "cannot copy to $name" cloud scp "$logs/code.tgz" "$name:tpu_run_code.tgz" --worker=all &&
    reach "cannot install on $name" everywhere "($unpack && bash code/scripts/tpu/worker.sh install) || exit 64" ||
    return
  ((!stops)) || finish 143
  id="$begun-$((++attempt))"
  say "starting: $command"
  reach "cannot start on $name" everywhere "$worker start $id $token $command || exit 64"
}

# The functions of the waiting loop avoid $(...), because bash can lose a SIGINT at its end.
census() { # writes $scratch/states, "STATE CODE ID TOKEN" per worker; fails unless each answers
  everywhere "$worker status 2>/dev/null || echo @status \$(hostname) none - - -" || return
  sort -u "$scratch/out" | sed -n 's/^@status [^ ]* //p' >"$scratch/states"
  awk -v hosts="$hosts" 'END { exit NR != hosts }' "$scratch/states"
}
running() { grep -q '^running ' "$scratch/states"; } # whether any worker runs a job
stream() { # copies the new lines of worker 0, which is process 0, to the terminal and to $log
  local seen
  read -r seen < <(wc -l <"$log")
  cloud ssh "$name" --worker=0 --command="$worker log $seen" || return 0
  awk '$0 == "@@tpu_run log@@" { text = ""; next } { text = text $0 "\n" } END { printf "%s", text }' \
    "$scratch/out" | tee -a -- "$log"
}
watch() { # waits until every worker has ended; fails if the VM is lost
  local failed_at='' sent=0 kill_with=(TERM KILL)
  while :; do
    if ((stops && !sent)) && everywhere "$worker signal TERM"; then sent=1; fi
    reach "no answer from the workers" census || return 1
    stream
    running || return 0
    # The other workers may wait for the failed one forever.
    if ((!stops)) && cut -d ' ' -f 2 "$scratch/states" | grep -qvx -e - -e 0; then : "${failed_at:=$SECONDS}"; fi
    if [[ -n "$failed_at" ]] && ((sent < 2 && SECONDS - failed_at >= grace * (sent + 1))); then
      say "a worker has failed; the others get SIG${kill_with[sent]}"
      if everywhere "$worker signal ${kill_with[sent]}"; then sent=$((sent + 1)); fi
    fi
    pause "$poll"
  done
}
collect() { # fetches the logs, and sets code to the most informative exit code of the workers
  for ((i = 0; i < hosts; i++)); do
    cloud scp "$name:tpu_run/job/log" "$logs/$id/worker-$i.log" "--worker=$i" ||
      say "could not fetch the log of worker $i: $(reason)"
  done
  say "logs: $logs/$id"
  code="$(awk '{ rank = $2 == 1 ? 8 : $2 == 75 ? 7 : $2 == "rebooted" || $2 == "-" ? 6 : $2 == "lost" ? 4 : \
         $2 == 143 || $2 == 130 ? 3 : $2 == 0 ? 1 : 5
         if (rank > best) { best = rank; code = $2 } }
       END { print best == 6 ? "gone" : code == "lost" ? 137 : code }' "$scratch/states")"
}
detach() {
  local verbs=(tpu-vm delete "$name")
  if [[ -n "$queued" ]]; then verbs=(queued-resources delete "$name" --force); fi
  say "$1"
  say "$name and its processes are left running. The same command joins the run again; or delete it:"
  say "$(quoted gcloud compute tpus "${verbs[@]}" "--zone=$zone" ${project:+"--project=$project"})"
  exit 130
}
finish() { # CODE [MESSAGE]
  if [[ -n "${2:-}" ]]; then say "$2"; fi
  if [[ -z "$keep" && "$maker" == tpu_run ]]; then
    say "deleting $name"
    retry "cannot delete $name" delete || say "WARNING: $name is still there and costs money: $(reason)"
  elif [[ "$state" != ABSENT ]]; then
    say "$name is still there and costs money"
  fi
  exit "$1"
}

# ---- the run

logs="logs/$name" log="$scratch/log" id='' attempt=0 restarts=0 best=-1
: >"$log"
if [[ -z "$dry_run" ]]; then
  mkdir -p -- "$logs"
  other="$(cat -- "$logs/pid" 2>/dev/null)" || true
  [[ -z "$other" ]] || ! kill -0 "$other" 2>/dev/null ||
    fail "process $other on this machine looks after $name; to watch it: tail -f $logs/*/worker-0.log"
  echo $$ >"$logs/pid"
  trap 'rm -rf -- "$scratch" "$logs/pid"' EXIT
fi
# Two runs within one second, or a clock that was set back, must not share a folder of logs.
while begun="$(date +%Y%m%d-%H%M%S)" && compgen -G "$logs/$begun-*" >/dev/null; do sleep 0.1; done
asked() {
  ((++stops == 1)) || detach "asked twice"
  say "asking the workers to save and stop; once more leaves them running"
}
trap asked INT TERM

look || fail "cannot ask for $name: $(reason)"
if [[ "$state" == READY ]] && reach "no answer from $name" census && running; then
  read -r _ _ id its_token <<<"$(grep -m 1 '^running' "$scratch/states")"
  [[ "$its_token" == "$token" ]] ||
    fail "$name is busy with another command: wait for it, or stop it on all workers with: $worker signal TERM"
  say "joining the run in progress"
fi

while :; do
  code=gone
  if [[ -n "$id" ]] || { provide && start; }; then
    if [[ -z "$dry_run" ]]; then
      log="$logs/$id/worker-0.log"
      mkdir -p -- "$logs/$id"
      touch -- "$log"
    fi
    if watch; then collect; fi
  fi
  say "ended: $code"
  case "$code" in
    0 | 1) finish "$code" ;;
    gone | 75) ((!stops)) || finish 143 ;;
    *) # gcloud may report a preemption later than the processes notice it
      if ((!stops)); then pause "$poll" && pause "$poll" && look_again; fi
      if ((stops)) || [[ "$state" == READY ]]; then finish "$code"; fi
      ;;
  esac
  step="$(sed -n 's|^step \([0-9,]*\)/.*|\1|p' "$log" | tail -n 1 | tr -d ,)"
  if ((${step:--1} > best)); then best="$step" restarts=0; fi
  ((restarts++ < max_restarts)) || finish 1 "gave up: no new step after $max_restarts restart(s)"
  say "restarting, for the ${restarts}. time since step $((best < 0 ? 0 : best))"
  id=''
  look_again
done
