#!/usr/bin/env bash
# Trains a small ResNet on 1,437 handwritten digits on this machine, installation included.
#
#   bash scripts/quickstart.sh                           into runs/digits
#   bash scripts/quickstart.sh --workdir=runs/other      arguments are main.py's
set -euo pipefail

CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh quickstart.sh

# main.py takes the last --workdir, and the hints below must name the same.
workdir=runs/digits
previous=''
for argument in "$@"; do
  case "$argument" in
    --workdir=* | -workdir=*) workdir="${argument#*=}" ;;
    *) case "$previous" in --workdir | -workdir) workdir="$argument" ;; esac ;;
  esac
  previous="$argument"
done

.venv/bin/python -m scripts.data.digits --out data/digits
.venv/bin/python main.py --config=configs/digits.py --workdir=runs/digits "$@"

printf -v quoted '%q' "$workdir"
cat <<EOF

Next:
  curves                .venv/bin/tensorboard --logdir=$quoted
  evaluate again        .venv/bin/python main.py --config=configs/digits.py --workdir=$quoted --mode=eval
  your data, and TPUs   README.md
EOF
