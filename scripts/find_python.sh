# Sourced by other scripts.
# shellcheck shell=bash

# find_python MODULE... sets `python` to the first Python (3.11 to 3.13) that has the training packages
# and these modules: those of the active venv, of $VENV or .venv, or python3; '' if none.
find_python() {
  local names="jax flax optax orbax.checkpoint clu tensorflow $*"
  for python in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "${VENV:-$PWD/.venv}/bin/python" python3; do
    if [[ -n "$python" ]] && "$python" -c 'import importlib.util as util, sys
sys.exit(not (3, 11) <= sys.version_info < (3, 14) or not all(map(util.find_spec, sys.argv[1].split())))' \
      "$names" >/dev/null 2>&1; then
      return
    fi
  done
  python=''
}

# first_python MINOR... prints the first Python 3.MINOR that can make a venv, on PATH or of pyenv;
# nothing if there is none.
first_python() {
  local minor name
  for minor in "$@"; do
    for name in "python3.$minor" "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/3.$minor".*/bin/python; do
      if "$name" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        printf '%s\n' "$name"
        return
      fi
    done
  done
}
