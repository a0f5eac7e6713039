#!/usr/bin/env bash
# The old name of: bash scripts/quickstart.sh ncf
exec bash "$(dirname -- "${BASH_SOURCE[0]}")/quickstart.sh" ncf "$@"
