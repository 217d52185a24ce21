#!/usr/bin/env bash
# A container on Atlas 800 A2 in which scripts/serve-*.sh run. Never run on hardware; devices and mounts are the guide's.
# Made by `python -m vllm_ascend_dsv41.deploy.render` from the recipes: change vllm_ascend_dsv41/deploy/render.py.
#
# IMAGE: made from docker/Dockerfile. MODEL_ROOT: the checkpoint's folder, at the same path inside. DRY_RUN=1 prints.
# What follows the script's name runs inside (default: bash).
set -euo pipefail

IMAGE="${IMAGE:-vllm-ascend-dsv41:a2}"
MODEL_ROOT="${MODEL_ROOT:-/data/weights}"
NAME="${NAME:-deepseek-v41}"

COMMAND=(
    docker run --rm
    --name "$NAME"
    --net=host
    --shm-size=512g
    --ulimit memlock=-1 --ulimit nofile=65535:65535
    --privileged=true
    --device /dev/davinci0
    --device /dev/davinci1
    --device /dev/davinci2
    --device /dev/davinci3
    --device /dev/davinci4
    --device /dev/davinci5
    --device /dev/davinci6
    --device /dev/davinci7
    --device /dev/davinci_manager
    --device /dev/devmm_svm
    --device /dev/hisi_hdc
    -v /usr/local/dcmi:/usr/local/dcmi
    -v /usr/local/Ascend/driver/tools/hccn_tool:/usr/local/Ascend/driver/tools/hccn_tool
    -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi
    -v /usr/local/Ascend/driver/lib64:/usr/local/Ascend/driver/lib64
    -v /usr/local/Ascend/driver/version.info:/usr/local/Ascend/driver/version.info
    -v /etc/ascend_install.info:/etc/ascend_install.info
    -v /etc/hccn.conf:/etc/hccn.conf
    -v "$MODEL_ROOT:$MODEL_ROOT"
)
if [[ -t 0 ]]; then
    COMMAND+=(-it)
fi
# what is set for the server is handed on by name: values do not show in the list of processes
while read -r name; do
    case $name in
        NODE_RANK | NODE0_IP | LOCAL_IP | NIC_NAME | MODEL_PATH | SKIP_DOCTOR | DOCTOR_OPTIONS | \
            DSV41_* | VLLM_* | HCCL_* | ASCEND_RT_* | GLOO_* | TP_* | PYTORCH_* | TASK_QUEUE_ENABLE | OMP_*)
            COMMAND+=(-e "$name")
            ;;
    esac
done < <(compgen -e)
if (($# == 0)); then
    set -- bash
fi
COMMAND+=("$IMAGE" "$@")

if [[ ${DRY_RUN:-0} != 0 ]]; then
    printf '%q ' "${COMMAND[@]}"
    echo
    exit 0
fi
for path in /usr/local/Ascend/driver/tools/hccn_tool /usr/local/bin/npu-smi /usr/local/Ascend/driver/version.info /etc/ascend_install.info /etc/hccn.conf; do
    if [[ ! -f $path ]]; then # docker would make a folder of that name, and the driver's tools would fail in it
        echo "$(basename "$0"): $path is not a file on this server: install the driver first" >&2
        exit 2
    fi
done
exec "${COMMAND[@]}"
