#!/usr/bin/env bash
# Trains benchmarks several times to MLPerf's target quality, and writes MLPerf's logs.
#
#   MLP_GCS_MODEL_DIR=gs://BUCKET/RUNS MLP_PATH_GCS_IMAGENET=gs://BUCKET/imagenet \
#     bash run_and_time.sh [NAME ...] [--config=FILE[:NAME]] [--runs=5] [--seed=N]
#     [flags of main.py]
#
# MLP_GCS_MODEL_DIR is a new folder for all results. Without NAME it runs every benchmark whose data
# variable is set, one after the other; several have a folder each, MLP_GCS_MODEL_DIR/NAME. --help
# lists the benchmarks and the variable that names the data of each. Every run has its own seed and
# folder. Afterwards, check the logs: python -m scripts.mlperf.check $MLP_GCS_MODEL_DIR. See
# docs/mlperf.md.
#
# On a slice of several hosts, start it on each host with the same --seed=N. It uses the first
# Python that has the packages: that of the active venv, of .venv, or python3; without one it makes
# .venv (scripts/setup.sh).
set -euo pipefail

. "$(dirname -- "${BASH_SOURCE[0]}")/scripts/usage.sh"
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

. scripts/find_python.sh
find_python mlperf_logging
if [[ -z "$python" ]]; then
  usage "$@"
  bash scripts/setup.sh
  find_python mlperf_logging
fi
if [[ -z "$python" ]]; then
  echo "ERROR: the Python that scripts/setup.sh made lacks packages: remove .venv and type the" \
    "command again" >&2
  exit 1
fi
exec "$python" -m scripts.mlperf.run "$@"
