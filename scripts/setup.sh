#!/usr/bin/env bash
# Makes .venv at the root of the repository from the locks of requirements, with every hash checked.
#
#   bash scripts/setup.sh                      for what this machine has: tpu, cuda, or else dev
#   bash scripts/setup.sh tpu                  for the TPUs of a TPU VM, and for --mode=preflight
#   bash scripts/setup.sh cuda                 for NVIDIA GPUs
#   bash scripts/setup.sh dev                  for the CPU, the quickstart and the tests
#   bash scripts/setup.sh parity               for test.sh --parity, 8 GB
#   bash scripts/setup.sh tpu dev              for both
#   PYTHON=python3.12 bash scripts/setup.sh    with this interpreter, from 3.11 to 3.13
#   VENV=.venv-3.12 bash scripts/setup.sh      in another folder; quickstart.sh and test.sh know VENV too
#
# Without PYTHON it takes python3 or another Python from 3.11 to 3.13 that can make a venv. Where there
# is none, or no Python at all, it fetches Python 3.12 by uv. With a complete .venv it returns at once. A
# changed lock file, another PYTHON or another argument makes .venv again; it keeps the packages of
# the arguments of before. If that fails, the .venv of before stays. test.sh and quickstart.sh call it.
set -euo pipefail

. "$(dirname -- "${BASH_SOURCE[0]}")/usage.sh"
. "$(dirname -- "${BASH_SOURCE[0]}")/find_python.sh"
usage "$@"
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
venv="${VENV:-.venv}"
venv="${venv%/}"
[[ "$venv" == /* ]] || venv="$PWD/$venv"
stamp="$venv/.setup-stamp" # "incomplete PID" at first, then the key below; and the kinds of packages
log="$venv.log"
# The command that the user typed, for hints.
typed="bash scripts/${SETUP_CALLER:-setup.sh${*:+ $*}}"
again="${VENV:+VENV=$(printf '%q' "$VENV") }$typed"

say() { printf 'setup: %s\n' "$*"; }
fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

# Sets kinds to what this machine has.
detect() {
  # The PCI ids of Google's TPUs, as in engine/devices.py.
  if [[ -e /dev/accel0 ]] || grep -qsE '^PCI_ID=1AE0:(0027|005E|0062|0063|006F|0076)$' \
    /sys/bus/pci/devices/*/uevent; then
    kinds=tpu here=' (this machine has a TPU)'
  elif [[ -e /dev/nvidia0 ]] || nvidia-smi -L >/dev/null 2>&1; then
    kinds=cuda here=' (this machine has an NVIDIA GPU)'
  else
    kinds=dev here=' (this machine has no TPU and no NVIDIA GPU)'
  fi
}

# Sets target and the hashes of uv's wheel and archive for this machine. The wheels' hashes are the
# package index's, the archives' are those of astral-sh/setup-uv. The download is not verified.
uv_version=0.12.5
check_platform() {
  case "$(uname -sm)" in
    'Linux x86_64')
      target=x86_64-unknown-linux-gnu
      wheel=3e195ccf1ed60c8bb24a6447ce306441a4181d54b602407e09bc56e963911c15
      archive=68a509da24b06b4223a1c0175fb5eb5bc79342b76cbeff0cfe51ac3f5b17b6b2
      return
      ;;
    'Linux aarch64')
      target=aarch64-unknown-linux-gnu
      wheel=2d65b7b3bc3fd28678f62aa7fb5d90f106ad9782c1354af60b6cecdf9ea9ecd9
      archive=9bf43b4d1a07665bf64d4c4e710930b382321a785e0eb10aac07f46471f86a31
      ;;
    'Darwin arm64')
      target=aarch64-apple-darwin
      wheel=d87156bc174d94fae890bb7a261e2867140abb9fe1e9de81a5295e582fb9d0f5
      archive=5bb0e5fe008a773c3dbcb97ff79cd89e1241464fe9d2f986d52ad8f1b037bd62
      ;;
    *) fail "this program does not run on $(uname -sm): take Linux on x86-64 (on Windows: WSL)" ;;
  esac
  case "$(uname -s) $kinds " in
    *' tpu '*) fail "libtpu has wheels for Linux on x86-64 only, not for $(uname -sm): leave tpu out" ;;
    'Darwin '*' cuda '*) fail "jax has no CUDA for $(uname -sm): leave cuda out" ;;
  esac
  say "the locks resolve for $(uname -sm), but nobody has tried them there: tensorflow-cpu has no" \
    "wheel for it, and the lock takes tensorflow"
}

# Identifies the locks, the Python and the folder of .venv, which installed commands contain.
key() {
  "$1" - "$venv" "${locks[@]}" <<'PY'
import hashlib, platform, sys
venv, *locks = sys.argv[1:]
text = b"".join(open(lock, "rb").read() for lock in locks)
print(hashlib.sha256(text).hexdigest(), platform.python_version(), venv)
PY
}
is_complete_for() { # $1: an interpreter
  [[ -x "$venv/bin/python" && -f "$stamp" && "$(key "$1")"$'\n'"$kinds" == "$(cat -- "$stamp")" ]]
}
version_of() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null; }
fits() { [[ "$1" =~ ^3\.(11|12|13)\. ]]; }

has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

# Sets python and version. Where uv must make the venv, by_uv is set, and python may be "3.12".
choose_python() {
  python="${PYTHON:-python3}" by_uv=''
  local other=''
  version="$(version_of "$python")" || version=''
  if [[ -n "${PYTHON:-}" ]]; then
    if [[ -z "$version" && "$python" =~ ^python3\.(11|12|13)$ ]]; then
      other="$(first_python "${BASH_REMATCH[1]}")"
    fi
    [[ -n "$version$other" ]] ||
      fail "'$python' does not run as a Python interpreter here: install it, or without PYTHON: $again"
  elif ! fits "$version" || ! has_venv "$python"; then
    other="$(first_python 13 12 11)"
    if [[ -z "$other" ]] && ! fits "$version"; then python=3.12 version=3.12.x; fi
  fi
  if [[ -n "$other" ]]; then python="$other" version="$(version_of "$other")"; fi
  fits "$version" ||
    fail "'$python' is Python $version, but tensorflow-cpu has wheels for Python 3.11 to 3.13 only:" \
      "without PYTHON this script looks for one, or fetches it: $again"
  has_venv "$python" || { by_uv=yes && python="$(command -v "$python" || echo 3.12)"; }
}

fetch_uv() { # sets uv to that of PATH, or to one in $venv.uv
  if uv="$(command -v uv)" && "$uv" --version; then return; fi # pyenv's shim may not run
  uv="$venv.uv/bin/uv"
  if python3 -m pip install --quiet --no-input --only-binary=:all: --target "$venv.uv" --upgrade \
    --require-hashes -r /dev/stdin <<<"uv==$uv_version --hash=sha256:$wheel"; then return; fi
  local url="https://github.com/astral-sh/uv/releases/download/$uv_version/uv-$target.tar.gz"
  mkdir -p -- "$venv.uv/bin"
  if command -v curl; then curl -fsSL -o "$venv.uv/tgz" "$url"; else wget -qO "$venv.uv/tgz" "$url"; fi &&
    printf '%s  %s\n' "$archive" "$venv.uv/tgz" | { sha256sum -c - || shasum -a 256 -c -; } &&
    tar -xzf "$venv.uv/tgz" -C "$venv.uv/bin" --strip-components=1
}

make_venv() {
  if [[ -z "$by_uv" ]]; then
    "$python" -m venv "$venv"
  elif fetch_uv; then
    "$uv" venv --quiet --seed --allow-existing --python "$python" "$venv"
  else
    return 1
  fi
}

installed='' pip=''
finish() { # a failed or interrupted installation leaves nothing but the .venv of before
  if [[ -n "$pip" ]] && kill "$pip" 2>/dev/null; then wait "$pip" || true; fi
  if [[ -z "$installed" ]]; then
    rm -rf -- "$venv"
    if [[ -e "$venv.old" ]]; then mv -- "$venv.old" "$venv"; fi
  fi
  rm -rf -- "$venv.old" "$venv.new" "$venv.uv" "$log"
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

count() { printf '%d' "$(cat -- "${locks[@]}" | grep -E '^[a-zA-Z0-9]' | sort -u | wc -l)"; }

install() { # pip's output goes to a file; a terminal sees how far it is
  local all
  all="$(count)"
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
    --require-hashes "${locks[@]/#/--requirement=}" >"$log" 2>&1 &
  pip=$!
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
  kinds="$*" here=''
  for kind in "$@"; do
    case "$kind" in
      tpu | cuda | dev | parity) ;;
      *)
        say "'$kind': there is no such argument: give tpu, cuda, dev, parity, or nothing (--help)" >&2
        exit 2
        ;;
    esac
  done
  if [[ $# == 0 ]]; then detect; fi
  state='' owner='' place='' before=''
  if [[ -f "$stamp" ]]; then { read -r state owner place && read -r before; } <"$stamp" || true; fi
  for kind in $kinds; do # those of before come first
    [[ " $before " == *" $kind "* ]] || before+="${before:+ }$kind"
  done
  kinds="$before"
  read -r -a locks <<<"$kinds"
  locks=("${locks[@]/#/requirements-}")
  locks=("${locks[@]/%/.txt}")

  # Without PYTHON any finished .venv will do, whichever interpreter it was made with.
  if [[ -z "${PYTHON:-}" && -x "$venv/bin/python" ]] && is_complete_for "$venv/bin/python"; then
    exit 0
  fi
  check_platform
  choose_python
  if [[ -n "${PYTHON:-}" ]] && is_complete_for "$python"; then exit 0; fi
  if [[ (-e "$venv" || -L "$venv") && ! -f "$stamp" ]]; then
    fail "$venv was not made by this script: move it away, or choose another: VENV=.venv-own $typed"
  fi
  if [[ "$state" == incomplete ]] && is_at_work "${owner:-0}"; then
    fail "another setup.sh (process $owner) makes $venv: wait until it is done, then: $again"
  fi

  if [[ "$state" && "$state" != incomplete ]]; then
    reason='the locks, the Python or the arguments are others'
    [[ "$place" == "$venv" ]] || reason="it was made as $place, a path that its commands contain"
    say "${venv##*/} is made again: $reason"
  fi
  say "making ${venv##*/} for ${kinds// / and }$here with Python $version" \
    "and installing about $(count) packages, takes minutes"
  started=$SECONDS
  if [[ -z "$by_uv" ]]; then # an active venv's own python would vanish with it
    python="$("$python" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))')"
  fi
  trap finish EXIT
  trap 'exit 130' INT TERM HUP # bash waits for the command that runs
  rm -rf -- "$venv.new"
  if [[ "$state" == incomplete ]]; then rm -rf -- "$venv"; else rm -rf -- "$venv.old"; fi
  if [[ -e "$venv" ]]; then mv -- "$venv" "$venv.old"; fi
  # Renaming makes sure that .venv has its stamp even if this script is killed.
  mkdir -p -- "$venv.new"
  printf 'incomplete %s\n%s\n' $$ "$kinds" >"$venv.new/${stamp##*/}"
  mv -- "$venv.new" "$venv"
  if [[ -n "$by_uv" ]]; then
    say "no Python 3.11 to 3.13 with the venv module here: fetching one by uv"
  fi
  make_venv >"$log" 2>&1 ||
    fail "no venv was made ($(sed -n '$s/^ *\(.*line [0-9]*: \)*//p' "$log")): install Python 3.11, 3.12" \
      "or 3.13 and its venv module (Debian, Ubuntu: apt install python3.11-venv or python3.12-venv)," \
      "or curl, and a way to github.com, where uv's Python comes from; then: $again"
  install || fail "the installation failed: $(why); the same command starts it again"
  printf '%s\n%s\n' "$(key "$venv/bin/python")" "$kinds" >"$stamp.new"
  mv -- "$stamp.new" "$stamp"
  installed=yes
  say "done in $((SECONDS - started)) s"
  exit
}
