#!/usr/bin/env bash
# Style, types and the directions of imports.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
environment
cd "$root"
echo "lint: ruff"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
# ops/ and quant/ only lie inside the package once it is installed: both tools look at an installed copy
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
"$venv/bin/pip" install --quiet --no-deps --no-build-isolation --target "$copy" "$root"
rm -rf "$root/build"
cd "$copy"
echo "lint: mypy"
"$venv/bin/mypy" --config-file "$root/pyproject.toml" -p vllm_ascend_dsv41
echo "lint: mypy --strict on ops, quant, layer_plan, reference"
"$venv/bin/mypy" --config-file "$root/pyproject.toml" --strict -p vllm_ascend_dsv41.ops -p vllm_ascend_dsv41.quant \
    -p vllm_ascend_dsv41.reference -m vllm_ascend_dsv41.layer_plan
echo "lint: import-linter"
PYTHONPATH=$copy "$venv/bin/lint-imports" --no-cache "$root/pyproject.toml"
