#!/usr/bin/env bash
# Trains to MLPerf's target quality, several times, and leaves logs that its checkers accept.
#
#   MLP_GCS_MODEL_DIR=gs://BUCKET/RUNS MLP_PATH_GCS_IMAGENET=gs://BUCKET/imagenet \
#     bash run_and_time.sh [--benchmark=resnet50] [--config=FILE[:NAME]] [--runs=5] [--seed=N]
#     [flags of main.py]
#
# MLP_GCS_MODEL_DIR    where everything goes: a new folder
# MLP_PATH_GCS_IMAGENET    the train-* and validation-* records
#
# --help says more, and docs/mlperf.md. Every run has its own seed and folder; results/ and systems/
# lie beside them. Then: python -m scripts.mlperf.check $MLP_GCS_MODEL_DIR. On a slice of several
# hosts it is started on each of them, with the same --seed=N. Python is that of the active venv,
# else of .venv, else python3, whichever first has the packages.
set -euo pipefail

CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

. scripts/find_python.sh
find_python mlperf_logging
if [[ -n "$python" ]]; then
  exec "$python" -m scripts.mlperf.run "$@"
fi
echo "ERROR: no Python from 3.11 on here has the packages: pip install --require-hashes -r" \
  "requirements-tpu.txt (or requirements.txt), in an active venv" >&2
exit 1
