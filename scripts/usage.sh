# Sourced by other scripts, before they change the folder. usage "$@" prints the comment at the top of
# the calling script and ends it if the arguments ask for help with -h or --help; arguments after --
# are a command's own.
# shellcheck shell=bash

usage_script="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[1]}")" && pwd)/${BASH_SOURCE[1]##*/}"

usage() {
  local argument
  for argument in "$@"; do
    case "$argument" in
      --) return ;;
      -h | -help | --help) exec sed -n '2,/^[^#]/{s/^# \{0,1\}//p;}' "$usage_script" ;;
    esac
  done
}
