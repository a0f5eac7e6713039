#!/usr/bin/env bash
# Writes the seven requirements files from pyproject.toml, all from one resolution; only the page to
# try a model has an older Pillow, because Gradio wants it.
#
#   bash scripts/lock.sh               keeps the versions that still fit
#   bash scripts/lock.sh --upgrade     takes the newest versions; arguments are uv's
#
# Needs uv (https://docs.astral.sh/uv). The files hold hashes and no index address. They serve Python
# 3.11 to 3.13 in two branches: jax and numpy are newer from 3.12 on.
set -euo pipefail

. "$(dirname -- "${BASH_SOURCE[0]}")/usage.sh"
usage "$@"
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
command -v uv >/dev/null || { echo "lock.sh: there is no uv here: pip install uv" >&2; exit 1; }
lock() {
  uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate \
    --no-emit-index-url --no-emit-find-links pyproject.toml "$@"
}
all="$(mktemp -d)"
trap 'rm -rf -- "$all"' EXIT
# uv keeps the versions of an output file that exists.
cat requirements-*.txt >"$all/lock.txt"
lock --extra labels --extra dev --extra tpu --extra cuda --extra parity --extra wandb \
  --output-file "$all/lock.txt" "$@"
awk '/^[^ ]/ { keep = !/^pillow==/ } keep' "$all/lock.txt" >"$all/demo.txt"
for extra in '' dev tpu cuda parity wandb demo; do
  also='' versions="$all/lock.txt"
  if [[ "$extra" == demo ]]; then versions="$all/demo.txt"; fi
  if [[ "$extra" == parity ]]; then also='--extra dev'; fi # parity's tests need pytest as well
  # shellcheck disable=SC2086
  lock --extra labels ${extra:+--extra "$extra"} $also --constraint "$versions" \
    --output-file "requirements${extra:+-$extra}.txt" "$@"
done
