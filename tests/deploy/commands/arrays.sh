#!/usr/bin/env bash
# As people write it by hand: exports, an array that grows on headless nodes, a loop over libraries.
set -euo pipefail
NODE_RANK=0
export HCCL_SOCKET_IFNAME=enp67s0f5 VLLM_ENGINE_READY_TIMEOUT_S="${VLLM_ENGINE_READY_TIMEOUT_S:-3600}"
export HCCL_CONNECT_TIMEOUT=1800
for library in /usr/lib64/libjemalloc.so.2 /nonexistent/libjemalloc.so.2; do
  [[ -f $library ]] && export LD_PRELOAD=$library
done
MORE=()
if [[ $NODE_RANK != 0 ]]; then
  MORE+=(--headless --data-parallel-start-rank $((NODE_RANK * 1)))
fi
source /usr/local/Ascend/ascend-toolkit/set_env.sh
ulimit -n 65535
rm -rf /tmp/ascend-cache > /dev/null
nohup env TASK_QUEUE_ENABLE=1 vllm serve /data/weights \
  "${MORE[@]}" \
  --host 10.0.0.1 --api-key "$(cat /etc/key 2> /dev/null)" \
  --data_parallel_address=10.0.0.1 --data-parallel-size 4 --data-parallel-size-local=1 -tp 8 \
  --enable-expert-parallel --engram-config.cpu_offload false \
  --speculative-config '{"method": "dspark", "num_speculative_tokens": 5}' \
  > serve.log 2>&1 &
