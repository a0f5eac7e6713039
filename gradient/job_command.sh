#!/usr/bin/env bash
# The job as the Gradient CLI of 2018 started it on a TPU; retired, see README.md beside this.
#
# It gives the job the repository that this clone came from. The single quotes matter: this shell
# must not touch the variables, which only the job's host has.
set -euo pipefail

paperspace jobs create --machineType TPU --container python:3.12 --command '
  echo "TPU_NAME=$TPU_NAME TPU_GRPC_URL=$TPU_GRPC_URL TPU_MODEL_DIR=$TPU_MODEL_DIR" &&
  bash scripts/gradient_job.sh --config=configs/resnet50.py
' --workspace "git+$(git -C "$(dirname -- "$0")" remote get-url origin)"
