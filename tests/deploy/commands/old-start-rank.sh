#!/usr/bin/env bash
# The form that circulated in September 2026: a start rank on every node, Engram switches of the first images.
NODE_RANK=0
vllm serve /data/weights \
  --host 127.0.0.1 --port 8000 $([[ $NODE_RANK != 0 ]] && echo --headless) \
  --data-parallel-address 10.0.0.1 --data-parallel-rpc-port 13399 \
  --data-parallel-size 4 --data-parallel-size-local 2 --data-parallel-start-rank $((NODE_RANK * 2)) \
  --tensor-parallel-size 8 --enable-expert-parallel --quantization ascend \
  --additional-config '{"enable_engram":true,"engram_storage":"int8"}'
