#!/usr/bin/env bash
# Runs a complete job: stage, check, train, write metadata, delete what was staged.
#
#   TPU_MODEL_DIR=gs://BUCKET/JOB bash scripts/gradient_job.sh [--config=FILE] [flags of main.py]
#
# The job reads $TPU_MODEL_DIR/input_data and writes $TPU_MODEL_DIR/output_data. The same command
# resumes the job or reports that the job is finished. STAGE_FROM=DIR first copies the data of the
# benchmark from DIR into staged_data and reads these; they are deleted at the end, unless
# KEEP_INPUT=1 is set. DELETE_INPUT=1 deletes input_data, too. EXPORT_MODEL=1 leaves the trained
# classifier in output_data/export/savedmodel, for TensorFlow Serving. See docs/run.md.
#
# The script uses the first Python that has the packages: the active venv's, .venv's, or python3. If
# none has them, it makes .venv by scripts/setup.sh for what the machine has: TPU, GPU or CPU.
set -euo pipefail

. "$(dirname -- "${BASH_SOURCE[0]}")/usage.sh"
usage "$@"
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

. scripts/find_python.sh
find_python google.cloud.storage
if [[ -z "$python" ]]; then
  if [[ -z "${TPU_MODEL_DIR:-}" ]]; then
    echo "ERROR: TPU_MODEL_DIR is not set: give the job's folder, gs://BUCKET/FOLDER or /FOLDER" >&2
    exit 1
  fi
  SETUP_CALLER=gradient_job.sh bash scripts/setup.sh
  python="${VENV:-$PWD/.venv}/bin/python"
fi
exec "$python" -m scripts.gradient "$@"
