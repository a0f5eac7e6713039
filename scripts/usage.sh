# Sourced by other scripts. usage "$@" prints the comment at the top of the calling script and ends
# it if the arguments ask for help with -h or --help; arguments after -- are a command's own.
# shellcheck shell=bash

usage() {
  local argument
  for argument in "$@"; do
    case "$argument" in
      --) return ;;
      -h | -help | --help) exec sed -n '2,/^[^#]/{s/^# \{0,1\}//p;}' "${BASH_SOURCE[1]}" ;;
    esac
  done
}
