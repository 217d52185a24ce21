#!/usr/bin/env bash
# Speed of a running service: AISBench and vllm bench serve with real text, by dsv41 eval perf. On node 0 of a recipe.
# Settings below, or in the environment; more options of dsv41 eval perf go behind the script's name.
#
#   scripts/aisbench-perf.sh
#   TEXT=prompts.jsonl LEVELS=1,8,32 scripts/aisbench-perf.sh --max-tokens 1024 --ignore-eos
set -euo pipefail

URL="${URL:-http://127.0.0.1:8000}"                        # of the service; a key: DSV41_API_KEY
LEVELS="${LEVELS:-1,2,4,8,16}"                             # requests at once, one level after the other
TEXT="${TEXT:-}"                                           # files to make prompts of, or lines {"prompt"}: NAME.jsonl
EFFORT="${EFFORT:-50}"                                     # 1 to 100, or off
OUTPUT="${OUTPUT:-eval-runs}"
MODEL_PATH="${MODEL_PATH:-}"                               # the checkpoint on this machine, for the manifest
STARTUP_REPORT="${STARTUP_REPORT:-${DSV41_STARTUP_REPORT:-}}" # that dsv41 serve --startup-report FILE wrote
IMAGE_DIGEST="${IMAGE_DIGEST:-}"                           # docker image inspect --format '{{index .RepoDigests 0}}' IMAGE

options=(--url "$URL" --concurrency "$LEVELS" --effort "$EFFORT" --output "$OUTPUT")
[[ -z $TEXT ]] || options+=(--text "$TEXT")
[[ -z $MODEL_PATH ]] || options+=(--checkpoint "$MODEL_PATH")
[[ -z $STARTUP_REPORT ]] || options+=(--startup-report "$STARTUP_REPORT")
[[ -z $IMAGE_DIGEST ]] || options+=(--image-digest "$IMAGE_DIGEST")
exec dsv41 eval perf "${options[@]}" "$@"
