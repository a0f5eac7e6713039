#!/usr/bin/env bash
# Writes the three requirements files from pyproject.toml, all from one resolution.
#
#   bash scripts/lock.sh               keeps the versions that still fit
#   bash scripts/lock.sh --upgrade     takes the newest versions; arguments are uv's
#
# Needs uv (https://docs.astral.sh/uv). The files hold hashes and no index address, and serve
# every Python from 3.11 on.
set -euo pipefail

CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
lock() {
  uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate \
    --no-emit-index-url --no-emit-find-links pyproject.toml "$@"
}
all="$(mktemp -d)"
trap 'rm -rf -- "$all"' EXIT
# uv keeps the versions of an output file that exists.
cat requirements-dev.txt requirements-tpu.txt >"$all/lock.txt"
lock --extra dev --extra tpu --output-file "$all/lock.txt" "$@"
for extra in '' dev tpu; do
  lock ${extra:+--extra "$extra"} --constraint "$all/lock.txt" \
    --output-file "requirements${extra:+-$extra}.txt" "$@"
done
