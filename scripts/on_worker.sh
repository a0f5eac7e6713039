#!/usr/bin/env bash
# Runs a command on one host of a TPU slice, in the background: it goes on when ssh ends.
#
#   bash scripts/on_worker.sh python main.py --config=configs/resnet50.py --workdir=gs://my-bucket/run1
#
# It first installs the packages for TPUs into .venv, and takes tcmalloc where the host has it. The
# output goes to logs/worker.log; its last line is the exit code. While a command runs, a second one is
# not started: gcloud repeats a command when its connection breaks. To stop it, which saves first:
#
#   kill -TERM -- "-$(cat logs/worker.pid)"
set -euo pipefail

. "$(dirname -- "${BASH_SOURCE[0]}")/usage.sh"
usage "${1:-}"
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
(($#)) || { echo "on_worker: no command: give python main.py and its flags" >&2; exit 1; }

mkdir -p logs
exec 9>logs/worker.lock # the processes below hold it
flock -n 9 || { echo "on_worker: $(hostname): a command runs already, see $PWD/logs/worker.log"; exit 0; }
malloc="$(PATH="$PATH:/sbin" ldconfig -p | awk '/libtcmalloc(_minimal)?\.so/ && !n++ { print $NF }' || true)"
# tcmalloc would report every large allocation, and batches and weights are large.
# shellcheck disable=SC2016
setsid bash -c '
  trap : TERM INT # a signal to the group is for the command; this shell then writes the exit code
  bash scripts/setup.sh tpu && env PATH="$PWD/.venv/bin:$PATH" PYTHONUNBUFFERED=1 \
    TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD=1000000000000 ${0:+LD_PRELOAD="$0"} "$@"
  echo "on_worker: ended with code $?"' "$malloc" "$@" >>logs/worker.log 2>&1 </dev/null &
echo $! >logs/worker.pid
echo "on_worker: $(hostname): started; the output is in $PWD/logs/worker.log"
