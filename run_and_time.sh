#!/usr/bin/env bash
# Trains a benchmark several times to MLPerf's target quality, and writes MLPerf's logs.
#
#   MLP_GCS_MODEL_DIR=gs://BUCKET/RUNS MLP_PATH_GCS_IMAGENET=gs://BUCKET/imagenet \
#     bash run_and_time.sh [--benchmark=NAME] [--config=FILE[:NAME]] [--runs=5] [--seed=N]
#     [flags of main.py]
#
# MLP_GCS_MODEL_DIR is a new folder for all results. The benchmark is the one whose data variable is
# the only one that is set, else that of --benchmark. --help lists the benchmarks and the variable
# that names the data of each. Every run has its own seed and folder. Afterwards, check the logs:
# python -m scripts.mlperf.check $MLP_GCS_MODEL_DIR. See docs/mlperf.md.
#
# On a slice of several hosts, start it on each host with the same --seed=N. It uses the first
# Python that has the packages: that of the active venv, of .venv, or python3.
set -euo pipefail

. "$(dirname -- "${BASH_SOURCE[0]}")/scripts/usage.sh"
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

. scripts/find_python.sh
find_python mlperf_logging
if [[ -n "$python" ]]; then
  exec "$python" -m scripts.mlperf.run "$@"
fi
usage "$@"
echo "ERROR: no Python (3.11 to 3.13) here has the packages: pip install --require-hashes -r" \
  "requirements-tpu.txt (or requirements.txt), in an active venv" >&2
exit 1
