#!/usr/bin/env bash
# Accuracy of a running service: AISBench with verdict and manifest, by dsv41 eval accuracy. On node 0 of a recipe.
# Settings below, or in the environment; more options of dsv41 eval accuracy go behind the script's name.
#
#   scripts/aisbench-accuracy.sh                      # GPQA diamond at effort 100, as the model card has it
#   DATASET=gsm8k EFFORT=25 scripts/aisbench-accuracy.sh --limit 200
set -euo pipefail

URL="${URL:-http://127.0.0.1:8000}"                        # of the service; a key: DSV41_API_KEY
DATASET="${DATASET:-gpqa}"                                 # gsm8k, gpqa, aime2025, ceval, mmlu_pro, livecodebench, NAME.jsonl
DATA="${DATA:-${AIS_BENCH_DATASETS_CACHE:-$PWD}}"          # folder that holds ais_bench/datasets
EFFORT="${EFFORT:-100}"                                    # 1 to 100, or off
CONCURRENCY="${CONCURRENCY:-32}"                           # requests at once; a3x2 and a2x4 take 4 replicas x max-num-seqs
OUTPUT="${OUTPUT:-eval-runs}"
MODEL_PATH="${MODEL_PATH:-}"                               # the checkpoint on this machine, for the manifest
STARTUP_REPORT="${STARTUP_REPORT:-${DSV41_STARTUP_REPORT:-}}" # that dsv41 serve --startup-report FILE wrote
IMAGE_DIGEST="${IMAGE_DIGEST:-}"                           # docker image inspect --format '{{index .RepoDigests 0}}' IMAGE

options=(--url "$URL" --dataset "$DATASET" --data "$DATA" --effort "$EFFORT" --concurrency "$CONCURRENCY" --output "$OUTPUT")
[[ -z $MODEL_PATH ]] || options+=(--checkpoint "$MODEL_PATH")
[[ -z $STARTUP_REPORT ]] || options+=(--startup-report "$STARTUP_REPORT")
[[ -z $IMAGE_DIGEST ]] || options+=(--image-digest "$IMAGE_DIGEST")
exec dsv41 eval accuracy "${options[@]}" "$@"
