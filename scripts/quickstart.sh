#!/usr/bin/env bash
# Trains a small model on this machine, installation included; no data are downloaded.
#
#   bash scripts/quickstart.sh                           a ResNet on 1,437 handwritten digits
#   bash scripts/quickstart.sh ssd                       an SSD that finds digits on images of clutter
#   bash scripts/quickstart.sh ssd --workdir=runs/other  further arguments are main.py's
set -euo pipefail

CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
name=digits
case "${1-}" in
  '' | -*) ;;
  digits | ssd)
    name="$1"
    shift
    ;;
  *)
    echo "ERROR: quickstart.sh $1: give nothing, ssd, or flags of main.py" >&2
    exit 2
    ;;
esac
bash scripts/setup.sh quickstart.sh

case "$name" in
  digits) maker=digits recipe=digits data=data/digits ;;
  ssd) maker=digit_scenes recipe=ssd_digits data=data/digit_scenes ;;
esac

# main.py takes the last --workdir, and the hints below must name the same.
workdir="runs/$recipe"
previous=''
for argument in "$@"; do
  case "$argument" in
    --workdir=* | -workdir=*) workdir="${argument#*=}" ;;
    *) case "$previous" in --workdir | -workdir) workdir="$argument" ;; esac ;;
  esac
  previous="$argument"
done

.venv/bin/python -m "scripts.data.$maker" --out="$data"
.venv/bin/python main.py "--config=configs/$recipe.py" "--workdir=runs/$recipe" "$@"

printf -v quoted '%q' "$workdir"
picture=''
if [[ "$name" == ssd ]]; then
  .venv/bin/python main.py "--config=configs/$recipe.py" "--workdir=runs/$recipe" "$@" --mode=eval
  picture="
  what it found         $quoted/eval/detections.png, with the true boxes beside it"
fi
cat <<EOF

Next:$picture
  curves                .venv/bin/tensorboard --logdir=$quoted
  evaluate again        .venv/bin/python main.py --config=configs/$recipe.py --workdir=$quoted --mode=eval
  your data, and TPUs   README.md
EOF
