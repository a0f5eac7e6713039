#!/usr/bin/env bash
# Trains NeuMF on made-up ratings on this machine, and compares it with the best possible score.
#
#   bash scripts/ncf_synthetic.sh       into data/ratings and runs/ncf; delete both to start again
set -euo pipefail

CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh ncf_synthetic.sh
.venv/bin/python -m scripts.data.ratings --out data/ratings
.venv/bin/python main.py --config=configs/ncf_synthetic.py --workdir=runs/ncf
.venv/bin/python -m scripts.data.compare_ratings data/ratings runs/ncf
