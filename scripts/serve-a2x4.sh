#!/usr/bin/env bash
# Four Atlas 800 A2 servers: DeepSeek-V4.1-Flash, DP4/TP8/EP32.
# Written for vllm 0.30.0, vllm-ascend 0.30.0rc2, torch 2.10.0, torch-npu 2.10.0.post4, CANN 9.2.
# Made from vllm_ascend_dsv41/deploy/recipes/a2x4.yaml by `python -m vllm_ascend_dsv41.deploy.render`: change that.
#
# Run it on all 4 servers, node 0 first; node 0 answers requests. Settings below, or in the environment.
# More options for the server go behind the script's name.
# DRY_RUN=1 prints command and environment; SKIP_DOCTOR=1 starts without checks.
set -euo pipefail

NODE_RANK="${NODE_RANK:-<NODE_RANK>}"                      # this server: 0 to 3
NODE0_IP="${NODE0_IP:-<NODE0_IP>}"                         # address of node 0 on the network between the servers
LOCAL_IP="${LOCAL_IP:-<LOCAL_IP>}"                         # address of this server on that network
NIC_NAME="${NIC_NAME:-<NETWORK_INTERFACE>}"                # interface that has LOCAL_IP
MODEL_PATH="${MODEL_PATH:-<YOUR_MODEL_PATH>}"              # directory that `dsv41 quantize` wrote, the same on all servers
DSV41_HOST="${DSV41_HOST:-127.0.0.1}"                      # 0.0.0.0 opens the server to every network: then set VLLM_API_KEY, too
DSV41_PORT="${DSV41_PORT:-8000}"                           # of the API on node 0

require() {
    if [[ -z ${!1} || ${!1} == *'<'* ]]; then
        echo "$(basename "$0"): $1 is '${!1}': set it in this file or in the environment" >&2
        exit 2
    fi
}
require NODE_RANK
require NODE0_IP
require LOCAL_IP
require NIC_NAME
require MODEL_PATH
if ! [[ $NODE_RANK =~ ^(0|[1-9][0-9]*)$ ]] || ((NODE_RANK > 3)); then
    echo "$(basename "$0"): NODE_RANK is '$NODE_RANK': there are nodes 0 to 3" >&2
    exit 2
fi
if { ((NODE_RANK == 0)) && [[ $LOCAL_IP != "$NODE0_IP" ]]; } || { ((NODE_RANK > 0)) && [[ $LOCAL_IP == "$NODE0_IP" ]]; }; then
    echo "$(basename "$0"): NODE_RANK $NODE_RANK with LOCAL_IP $LOCAL_IP and NODE0_IP $NODE0_IP: equal on node 0 only" >&2
    exit 2
fi

export VLLM_ENGINE_READY_TIMEOUT_S="${VLLM_ENGINE_READY_TIMEOUT_S:-3600}"
export VLLM_USE_V2_MODEL_RUNNER="${VLLM_USE_V2_MODEL_RUNNER:-0}"
export VLLM_PLUGINS="${VLLM_PLUGINS:-dsv41,ascend_kv_connector,ascend_model_loader,ascend_service_profiling}"
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1800}"
export VLLM_HOST_IP="$LOCAL_IP"
export GLOO_SOCKET_IFNAME="$NIC_NAME"
export TP_SOCKET_IFNAME="$NIC_NAME"
export HCCL_IF_IP="$LOCAL_IP"
export HCCL_SOCKET_IFNAME="$NIC_NAME"
export ASCEND_RT_VISIBLE_DEVICES="${ASCEND_RT_VISIBLE_DEVICES:-0,1,2,3,4,5,6,7}"
for library in /usr/lib/aarch64-linux-gnu/libjemalloc.so.2 /usr/lib/x86_64-linux-gnu/libjemalloc.so.2 /usr/lib64/libjemalloc.so.2; do
    if [[ -f $library && ${LD_PRELOAD:-} != *jemalloc* ]]; then
        export LD_PRELOAD="$library${LD_PRELOAD:+:$LD_PRELOAD}"
    fi
done

NODE_OPTIONS=()
if ((NODE_RANK > 0)); then # on node 0 a start rank, even 0, would choose another way of balancing
    NODE_OPTIONS=(--headless --data-parallel-start-rank $((NODE_RANK * 1)))
fi

COMMAND=(
    dsv41 serve "$MODEL_PATH"
    --host "$DSV41_HOST"
    --port "$DSV41_PORT"
    ${NODE_OPTIONS[@]+"${NODE_OPTIONS[@]}"}
    --data-parallel-address "$NODE0_IP"
    --data-parallel-rpc-port 13399
    --data-parallel-size 4
    --data-parallel-size-local 1
    --tensor-parallel-size 8
    --enable-expert-parallel
    --served-model-name deepseek-v41
    --max-model-len 1048576
    --max-num-batched-tokens 4096
    --max-num-seqs 32
    --gpu-memory-utilization 0.9
    --block-size 128
    --tokenizer-mode deepseek_v41
    --reasoning-parser deepseek_v41
    --tool-call-parser deepseek_v41
    --enable-auto-tool-choice
    --safetensors-load-strategy lazy
    --quantization ascend
    --engram-config '{"cpu_offload":false}'
    --additional-config '{"enable_cpu_binding":true,"ascend_compilation_config":{"enable_npugraph_ex":false,"enable_static_kernel":false}}'
    --speculative-config '{"method":"dspark","num_speculative_tokens":5,"enforce_eager":true}'
    --compilation-config '{"cudagraph_mode":"FULL_DECODE_ONLY"}'
    "$@"
)

if [[ ${DRY_RUN:-0} != 0 ]]; then
    for name in VLLM_ENGINE_READY_TIMEOUT_S VLLM_USE_V2_MODEL_RUNNER VLLM_PLUGINS HCCL_CONNECT_TIMEOUT VLLM_HOST_IP GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME HCCL_IF_IP HCCL_SOCKET_IFNAME ASCEND_RT_VISIBLE_DEVICES LD_PRELOAD; do
        [[ -z ${!name:-} ]] || printf '%s=%q\n' "$name" "${!name}"
    done
    printf '%q ' "${COMMAND[@]}"
    echo
    exit 0
fi
if [[ ${SKIP_DOCTOR:-0} == 0 ]]; then
    read -ra options <<<"${DOCTOR_OPTIONS---peers}"
    dsv41 doctor a2x4 --node-rank "$NODE_RANK" --node0-ip "$NODE0_IP" --local-ip "$LOCAL_IP" --nic "$NIC_NAME" \
        ${options[@]+"${options[@]}"} -- "${COMMAND[@]}" || {
        echo "$(basename "$0"): not started; SKIP_DOCTOR=1 starts all the same" >&2
        exit 1
    }
fi
exec "${COMMAND[@]}"
