#!/usr/bin/env bash
# Trains the short rows of docs/results.md again, and fails if a run's score is outside of its band,
# which is wider than the scores of all seeds so far. It is no part of CI: these rows with three
# seeds take 45 minutes of CPU time.
#
#   bash scripts/results.sh                  all short rows, seeds 0 to 2
#   bash scripts/results.sh bccd ml-100k     only these rows
#   SEEDS='3 4 5' bash scripts/results.sh    other seeds
#
# Data that are not in data/ are downloaded. Runs are in runs/results/COMMIT, where a finished one is
# not repeated.
set -euo pipefail

. "$(dirname -- "${BASH_SOURCE[0]}")/usage.sh"
usage "$@"
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

# Row, folder in data/, score, which evaluation counts, band, recipe and flags.
rows=(
  "ml-latest-small-random ml-latest-small hr_at_10 best 0.82 0.88 ncf --config.eval_holdout=random --config.eval_negatives=99"
  "ml-latest-small ml-latest-small hr_at_10 best 0.71 0.79 ncf --config.eval_negatives=99"
  "ml-100k ml-100k hr_at_10 best 0.60 0.65 ncf --config.eval_negatives=99"
  "ml-100k-all ml-100k hr_at_10 best 0.075 0.12 ncf --config.eval_negatives=all"
  "ml-latest-small-all ml-latest-small hr_at_10 best 0.045 0.10 ncf --config.eval_negatives=all"
  "bccd BCCD_Dataset AP50 last 0.86 0.90 ssd --config.train_batch_size=8 --config.eval_batch_size=8 --config.train_steps=900 --config.warmup_steps=90 --config.steps_per_eval=90 --config.steps_per_checkpoint=90"
)
for name; do
  if [[ " ${rows[*]%% *} " != *" $name "* ]]; then
    echo "ERROR: results.sh $name: give nothing, or some of ${rows[*]%% *}" >&2
    exit 2
  fi
done
SETUP_CALLER=results.sh bash scripts/setup.sh dev
program="${VENV:-.venv}/bin/python"
commit="$(git rev-parse --short HEAD)"

prepare() { # a folder in data/
  [[ ! -d "data/$1" ]] || return 0
  case "$1" in
    BCCD_Dataset) # its train and val are trained on, its test is held out
      if [[ ! -d data/raw/$1 ]]; then
        git clone --depth=1 "https://github.com/Shenggan/$1" "data/raw/$1"
        (cd "data/raw/$1/BCCD/ImageSets/Main" && mv trainval.txt train.txt && mv test.txt val.txt)
      fi
      "$program" -m scripts.prepare "data/raw/$1" --untimed
      ;;
    *) "$program" -m scripts.prepare download "$1" --untimed ;;
  esac
}

failed=''
for row in "${rows[@]}"; do
  # shellcheck disable=SC2206 # words
  words=($row)
  name="${words[0]}" data="${words[1]}" runs=()
  [[ $# == 0 || " $* " == *" $name "* ]] || continue
  prepare "$data"
  for seed in ${SEEDS:-0 1 2}; do
    runs+=("runs/results/$commit/$name-$seed")
    "$program" main.py "--config=configs/small.py:${words[6]}" "--config.data_dir=data/$data" \
      "${words[@]:7}" "--config.seed=$seed" "--workdir=${runs[-1]}"
  done
  "$program" - "${words[@]:0:6}" "${runs[@]}" <<'END' || failed=yes
import json, pathlib, statistics, sys
name, _, score, which, low, high, *runs = sys.argv[1:]
lines = [(pathlib.Path(run) / "metrics.jsonl").read_text().splitlines() for run in runs]
rows = [[row[score] for row in map(json.loads, run) if row["split"] == "eval"] for run in lines]
scores = [max(row) if which == "best" else row[-1] for row in rows]
good = all(float(low) <= one <= float(high) for one in scores)
print(f"\n{name}: {score} {statistics.mean(scores):.3f} ({min(scores):.3f} to {max(scores):.3f}), "
      f"band {low} to {high}: {'ok' if good else 'OUTSIDE'}\n")
sys.exit(not good)
END
done
[[ ! "$failed" ]]
