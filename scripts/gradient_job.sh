#!/usr/bin/env bash
# Runs a whole job: stage, check, train, prune, write metadata, delete the staged input.
#
#   TPU_MODEL_DIR=gs://BUCKET/JOB bash scripts/gradient_job.sh [--config=FILE] [flags of main.py]
#
# Reads $TPU_MODEL_DIR/input_data, writes $TPU_MODEL_DIR/output_data. Typed again it resumes, or
# says that the job is finished. KEEP_INPUT=1 keeps the
# input, STAGE_FROM=DIR copies the records of DIR into input_data first. See docs/gradient.md.
#
# Python is that of the active venv, else of .venv, else python3, whichever first has the packages;
# if none has, .venv is made from requirements-tpu.txt (or REQUIREMENTS=requirements.txt).
set -euo pipefail

CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

. scripts/find_python.sh
find_python google.cloud.storage
if [[ -z "$python" ]]; then
  if [[ -z "${TPU_MODEL_DIR:-}" ]]; then
    echo "ERROR: TPU_MODEL_DIR is not set: give the job's folder, gs://BUCKET/FOLDER or /FOLDER" >&2
    exit 1
  fi
  bash scripts/setup.sh gradient_job.sh "${REQUIREMENTS:-requirements-tpu.txt}"
  python="$PWD/.venv/bin/python"
fi
exec "$python" -m scripts.job.run "$@"
