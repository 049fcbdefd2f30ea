#!/bin/bash
# Starts a service with CANN's environment:  ascend.sh <module>
set -eo pipefail
for part in ascend-toolkit nnal/atb; do
    script=/usr/local/Ascend/$part/set_env.sh
    # shellcheck disable=SC1090  CANN's own
    if [ -f "$script" ]; then source "$script"; fi
done
# vLLM-Ascend's image has jemalloc and preloads it in ~/.bashrc, which no service reads.
for library in "/usr/lib/$(uname -m)-linux-gnu/libjemalloc.so.2" /usr/lib64/libjemalloc.so.2; do
    if [ -f "$library" ]; then export LD_PRELOAD="$library${LD_PRELOAD:+:$LD_PRELOAD}" && break; fi
done
mkdir -p "${ASCEND_CACHE_PATH:-/tmp/ascend/cache}" "${ASCEND_WORK_PATH:-/tmp/ascend/work}" "${ASCEND_PROCESS_LOG_PATH:-/tmp/ascend/log}"
exec python3 -m "$1"
