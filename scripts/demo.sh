#!/usr/bin/env bash
# Everything once, on a tiny checkpoint: environment, conversion, server, requests, comparison.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/environment.sh"
environment
exec "$venv/bin/dsv41" demo "$@"
