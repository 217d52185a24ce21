#!/usr/bin/env bash
# The tests. Arguments go to pytest: scripts/test.sh -m long runs the long ones.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/environment.sh"
environment
cd "$root"
echo "tests: $venv/bin/python -m pytest $*"
exec "$venv/bin/python" -m pytest "$@"
