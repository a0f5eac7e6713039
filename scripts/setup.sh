#!/usr/bin/env bash
# Makes .venv at the root of the repository from requirements-dev.txt (or from the file that the
# second argument names), with every hash checked.
#
#   bash scripts/setup.sh                      with python3 (3.11 or newer)
#   PYTHON=python3.12 bash scripts/setup.sh    with another interpreter
#
# test.sh and quickstart.sh call it first. With a complete .venv it returns at once. A changed lock
# file or another PYTHON makes .venv again. The first argument is the name of the calling script, for
# the hints. Both are optional.
set -euo pipefail

caller="${1:-setup.sh}"
root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
lock="$root/${2:-requirements-dev.txt}"
stamp="$venv/.setup-stamp" # "incomplete" at first; the key below after the installation

say() { printf 'setup: %s\n' "$*"; }
fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

# Identifies the lock file, the Python and the folder of .venv, which installed commands contain.
key() {
  "$1" - "$lock" "$venv" <<'PY'
import hashlib, platform, sys
lock, venv = sys.argv[1:]
print(hashlib.sha256(open(lock, "rb").read()).hexdigest(), platform.python_version(), venv)
PY
}
is_complete_for() { # $1: an interpreter
  [[ -x "$venv/bin/python" && -f "$stamp" && "$(key "$1")" == "$(cat -- "$stamp")" ]]
}

[[ -f "$lock" ]] || fail "there is no $lock to install from"

# Without PYTHON any finished .venv will do, whichever interpreter it was made with.
if [[ -z "${PYTHON:-}" && -x "$venv/bin/python" ]] && is_complete_for "$venv/bin/python"; then
  exit 0
fi

python="${PYTHON:-python3}"
hint="choose another with: PYTHON=python3.12 bash scripts/$caller"
command -v -- "$python" >/dev/null || fail "no Python called '$python' here; $hint"
version="$("$python" -c 'import platform; print(platform.python_version())' 2>/dev/null)" ||
  fail "'$python' does not run as a Python interpreter; $hint"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "'$python' is Python $version, but 3.11 or newer is needed; $hint"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  fail "'$python' (Python $version) lacks the venv module: install it (Debian, Ubuntu:" \
    "apt install python${version%.*}-venv) or $hint"

if is_complete_for "$python"; then exit 0; fi
if [[ -e "$venv" && ! -f "$stamp" ]]; then
  fail "$venv was not made by this script: move it away or delete it, then try again"
fi

say "making .venv with Python $version and installing about 130 packages; takes 1 to 3 minutes"
started=$SECONDS
# Renaming makes sure that .venv has its stamp even if this script is killed during rm.
rm -rf -- "$venv.old" "$venv.new"
if [[ -e "$venv" ]]; then mv -- "$venv" "$venv.old"; fi
mkdir -- "$venv.new"
echo incomplete >"$venv.new/${stamp##*/}"
mv -- "$venv.new" "$venv"
rm -rf -- "$venv.old"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-input \
  --require-hashes -r "$lock" ||
  fail "the installation failed (pip's reason is above); the same command starts it again"
key "$venv/bin/python" >"$stamp.new"
mv -- "$stamp.new" "$stamp"
say "done in $((SECONDS - started)) s"
