#!/usr/bin/env bash
# Trains NeuMF on made-up ratings and compares it with the best that is possible, on this machine.
#
#   bash scripts/ncf_synthetic.sh       into data/ratings and runs/ncf; delete both to begin anew
set -euo pipefail

CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh ncf_synthetic.sh
.venv/bin/python -m scripts.data.ratings --out data/ratings
.venv/bin/python main.py --config=configs/ncf_synthetic.py --workdir=runs/ncf
.venv/bin/python -m scripts.data.compare_ratings data/ratings runs/ncf
