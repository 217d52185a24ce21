#!/usr/bin/env bash
# Style, types and the directions of imports.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/environment.sh"
environment
cd "$root"
echo "lint: ruff"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
# ops/ and quant/ only lie inside the package once it is installed: both tools look at an installed copy
temporary=$(mktemp -d)
copy=$temporary
trap 'rm -rf "$temporary"' EXIT
git ls-files -z | xargs -0 cp --parents --target-directory "$copy" 2>/dev/null || cp -r "$root"/. "$copy"
"$venv/bin/pip" install --quiet --no-deps --no-build-isolation --target "$copy/installed" "$copy"
copy=$copy/installed
cd "$copy"
echo "lint: mypy"
"$venv/bin/mypy" --config-file "$root/pyproject.toml" -p vllm_ascend_dsv41
echo "lint: mypy --strict on native, ops, quant, layer_plan, reference, verify"
"$venv/bin/mypy" --config-file "$root/pyproject.toml" --strict -p vllm_ascend_dsv41.native \
    -p vllm_ascend_dsv41.ops -p vllm_ascend_dsv41.quant -p vllm_ascend_dsv41.reference -p vllm_ascend_dsv41.verify -m vllm_ascend_dsv41.layer_plan
echo "lint: import-linter"
PYTHONPATH=$copy "$venv/bin/lint-imports" --no-cache "$root/pyproject.toml"
