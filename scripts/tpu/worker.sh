#!/usr/bin/env bash
# Works on one worker of a slice for tpu_run.sh, in ~/tpu_run. Every command may be repeated: gcloud
# runs a command again when its connection breaks, even if the worker has already executed it.
#
#   bash worker.sh install                      makes a venv with requirements-tpu.txt
#   bash worker.sh start ID TOKEN COMMAND...    starts COMMAND in the background, once per ID
#   bash worker.sh status                       prints @status HOST none|running|ended CODE ID TOKEN
#   bash worker.sh log SEEN                     prints the job's output after its first SEEN lines
#   bash worker.sh signal NAME                  signals the command and its children
set -euo pipefail

home="$HOME/tpu_run"
job="$home/job" venv="$home/venv"
code="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
boot=/proc/sys/kernel/random/boot_id

say() { printf 'tpu_worker %s: %s\n' "$(hostname)" "$*"; }

# Prints "none -", "running -" or "ended CODE". The code is `lost` if the process left none. It is
# `rebooted` if the machine has restarted since, because then no user asked for the stop.
state() {
  local code='' alive=''
  [[ -f "$job/pid" ]] || { echo none -; return; }
  ! kill -0 "$(cat "$job/pid")" 2>/dev/null || alive=yes # before its code is read
  code="$(cat "$job/exit_code" 2>/dev/null)" || true
  if [[ "$code" != [01] && "$(cat "$boot")" != "$(cat "$job/boot")" ]]; then code=rebooted; fi
  if [[ -z "$code" && -n "$alive" ]]; then echo running -; else echo "ended ${code:-lost}"; fi
}

start() { # ID TOKEN COMMAND...
  local id="$1 $2"
  shift 2
  if [[ -f "$job/pid" && "$(cat "$job/id")" == "$id" ]]; then return; fi
  if [[ "$(state)" == running* ]]; then
    say "another command is running here"
    return 3
  fi
  rm -rf -- "$job"
  mkdir -- "$job"
  printf '%s\n' "$id" >"$job/id"
  cp -- "$boot" "$job/boot"
  setsid nohup bash "${BASH_SOURCE[0]}" run "$@" >"$job/log" 2>&1 </dev/null 9>&- &
  echo $! >"$job/pid.new"
  mv -- "$job/pid.new" "$job/pid"
}

run() { # COMMAND...
  local result=0 malloc
  # A signal to the group is for the command; this shell stays to note the exit code.
  trap : TERM INT HUP
  malloc="$(ldconfig -p | awk '/libtcmalloc(_minimal)?\.so/ { print $NF; exit }')"
  say "malloc: ${malloc:-glibc (no libtcmalloc here)}"
  cd -- "$code"
  # tcmalloc would report every large allocation, and batches and weights are large.
  env PATH="$venv/bin:$PATH" PYTHONUNBUFFERED=1 ${malloc:+LD_PRELOAD="$malloc"} \
    ${malloc:+TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD=1000000000000} "$@" || result=$?
  trap '' TERM INT HUP # a late signal must not end mv
  printf '\ntpu_worker: the command ended with code %d\n' "$result"
  echo "$result" >"$job/exit_code.new"
  mv -- "$job/exit_code.new" "$job/exit_code"
}

# Prints complete lines only. If gcloud repeats the command, the mark shows where the answer begins.
log() { # SEEN
  local line
  printf '\n@@tpu_run log@@\n'
  [[ -f "$job/log" ]] || return 0
  tail -n "+$(($1 + 1))" -- "$job/log" | while IFS= read -r line; do printf '%s\n' "$line"; done
}

mkdir -p -- "$home"
case "$1" in install | start) exec 9>"$home/lock" && flock 9 ;; esac
case "$1" in
  install) VENV="$venv" bash "$code/scripts/setup.sh" tpu ;;
  start | run | log) "$@" ;;
  status) echo "@status $(hostname) $(state) $(cat "$job/id" 2>/dev/null || echo - -)" ;;
  signal) if [[ "$(state)" == running* ]]; then kill -s "$2" -- "-$(cat "$job/pid")"; fi ;;
esac
