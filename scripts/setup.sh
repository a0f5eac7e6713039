#!/usr/bin/env bash
# Makes .venv at the root of the repository from requirements-dev.txt, with every hash checked.
#
#   bash scripts/setup.sh                      with python3, or another Python from 3.11 to 3.13
#   PYTHON=python3.12 bash scripts/setup.sh    with this interpreter
#   VENV=.venv-3.12 bash scripts/setup.sh      in another folder; quickstart.sh and test.sh know VENV too
#   bash scripts/setup.sh CALLER LOCK          from another file of requirements; hints name CALLER
#
# test.sh and quickstart.sh call it first. With a complete .venv it returns at once. A changed lock
# file or another PYTHON makes .venv again. If that fails, the .venv of before stays.
set -euo pipefail

. "$(dirname -- "${BASH_SOURCE[0]}")/usage.sh"
. "$(dirname -- "${BASH_SOURCE[0]}")/find_python.sh"
usage "$@"
caller="${1:-setup.sh}"
if [[ "$caller" == -* ]]; then
  echo "setup: $caller: there is no such flag (--help)" >&2
  exit 2
fi
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
venv="${VENV:-.venv}"
venv="${venv%/}"
[[ "$venv" == /* ]] || venv="$PWD/$venv"
lock="$PWD/${2:-requirements-dev.txt}"
stamp="$venv/.setup-stamp" # "incomplete PID" at first; the key below after the installation
log="$venv.log"

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
version_of() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null; }
fits() { [[ "$1" =~ ^3\.(11|12|13)\. ]]; }

choose_python() { # sets python and version
  python="${PYTHON:-python3}"
  local again="PYTHON=python3.13 bash scripts/$caller" other
  if [[ -n "${PYTHON:-}" ]]; then
    if ! version="$(version_of "$python")"; then
      other=''
      if [[ "$python" =~ ^python3\.(11|12|13)$ ]]; then other="$(first_python "${BASH_REMATCH[1]}")"; fi
      [[ -n "$other" ]] ||
        fail "'$python' does not run as a Python interpreter here; install it or choose another: $again"
      python="$other" version="$(version_of "$other")"
    fi
  elif version="$(version_of python3)" && fits "$version"; then
    return
  else
    other="$(first_python 13 12 11)"
    if [[ -n "$other" ]]; then python="$other" && version="$(version_of "$other")" && return; fi
    version="$(version_of python3)" || fail "there is no Python here: install Python 3.13, then: $again"
  fi
  fits "$version" ||
    fail "'$python' is Python $version, but tensorflow-cpu has wheels for Python 3.11 to 3.13 only:" \
      "install Python 3.13, then: $again"
}

installed='' pip=''
finish() { # a failed or interrupted installation leaves nothing but the .venv of before
  if [[ -n "$pip" ]] && kill "$pip" 2>/dev/null; then wait "$pip" || true; fi
  if [[ -z "$installed" ]]; then
    rm -rf -- "$venv"
    if [[ -e "$venv.old" ]]; then mv -- "$venv.old" "$venv"; fi
  fi
  rm -rf -- "$venv.old" "$venv.new" "$log"
}

why() { # the reason of a failed installation, in one line; the words are pip's
  local network='NewConnection|NameResolution|Timeout|ProxyError|unreachable|SSLError|RemoteDisconnected|Connection(Reset|Error)'
  if grep -q 'No space left' "$log"; then
    echo "the disk is full: .venv needs about 3 GB"
  elif grep -q 'DO NOT MATCH THE HASHES' "$log"; then
    echo "a package is not the one of the lock: $(grep -m 1 -A 1 'DO NOT MATCH' "$log" | tail -n 1 | xargs)"
  elif grep -qE "$network" "$log"; then
    echo "the package index does not answer: check the network, HTTPS_PROXY and pip's settings"
  else
    grep -m 1 '^ERROR' "$log" || tail -n 1 "$log"
  fi
}

count() { grep -cE '^[a-zA-Z0-9]' "$lock"; }

install() { # pip's output goes to a file; a terminal sees how far it is
  local all
  all="$(count)"
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
    --require-hashes -r "$lock" >"$log" 2>&1 &
  pip=$!
  trap 'exit 130' INT TERM HUP
  while [[ -t 1 ]] && kill -0 "$pip" 2>/dev/null; do
    printf '\rsetup: %s of about %s packages found, %s s ' \
      "$(grep -c '^Collecting' "$log")" "$all" "$((SECONDS - started))"
    sleep 1
  done
  if [[ -t 1 ]]; then printf '\r\033[K'; fi
  wait "$pip"
}
is_at_work() { # $1: the process of another setup.sh
  if command -v ps >/dev/null; then [[ "$(ps -o args= -p "$1")" == *setup.sh* ]]; else kill -0 "$1"; fi
} 2>/dev/null

{ # bash reads the group before it runs it, so that a changed script disturbs no installation
  [[ -f "$lock" ]] || fail "there is no $lock to install from"

  # Without PYTHON any finished .venv will do, whichever interpreter it was made with.
  if [[ -z "${PYTHON:-}" && -x "$venv/bin/python" ]] && is_complete_for "$venv/bin/python"; then
    exit 0
  fi
  choose_python
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "'$python' (Python $version) lacks the venv module: install it (Debian, Ubuntu:" \
      "apt install python${version%.*}-venv), then: bash scripts/$caller"
  if is_complete_for "$python"; then exit 0; fi
  if [[ (-e "$venv" || -L "$venv") && ! -f "$stamp" ]]; then
    fail "$venv was not made by this script: move it away, or choose another: VENV=.venv-own bash scripts/$caller"
  fi
  if [[ -f "$stamp" ]]; then
    read -r state owner _ <"$stamp" || true
    if [[ "$state" == incomplete ]] && is_at_work "${owner:-0}"; then
      fail "another setup.sh (process $owner) makes $venv: wait until it is done, then: bash scripts/$caller"
    fi
  fi

  say "making ${venv##*/} with Python $version and installing about $(count) packages, takes minutes"
  started=$SECONDS
  # An active venv's own python would vanish with it.
  python="$("$python" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))')"
  trap finish EXIT
  rm -rf -- "$venv.new"
  if [[ "${state:-}" == incomplete ]]; then rm -rf -- "$venv"; else rm -rf -- "$venv.old"; fi
  if [[ -e "$venv" ]]; then mv -- "$venv" "$venv.old"; fi
  # Renaming makes sure that .venv has its stamp even if this script is killed.
  mkdir -p -- "$venv.new"
  echo "incomplete $$" >"$venv.new/${stamp##*/}"
  mv -- "$venv.new" "$venv"
  "$python" -m venv "$venv"
  install || fail "the installation failed: $(why); the same command starts it again"
  key "$venv/bin/python" >"$stamp.new"
  mv -- "$stamp.new" "$stamp"
  installed=yes
  say "done in $((SECONDS - started)) s"
  exit
}
