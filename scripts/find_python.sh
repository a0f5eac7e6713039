# Sourced by other scripts. find_python MODULE... sets `python` to the first Python from 3.11 on that
# has the training packages and these modules: the active venv's, .venv's, or python3; '' if none.
# shellcheck shell=bash

find_python() {
  local names="jax flax optax orbax.checkpoint clu tensorflow $*"
  for python in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "$PWD/.venv/bin/python" python3; do
    if [[ -n "$python" ]] && "$python" -c 'import importlib.util as util, sys
sys.exit(sys.version_info < (3, 11) or not all(map(util.find_spec, sys.argv[1].split())))' \
      "$names" >/dev/null 2>&1; then
      return
    fi
  done
  python=''
}
