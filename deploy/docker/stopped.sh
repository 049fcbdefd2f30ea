#!/bin/sh
# Health check of a container: `sh stopped.sh CHECK…` kills what has been stopped by a signal since the check before, then becomes CHECK.
# Docker starts again what ends, not what is unhealthy; and a stopped process can do nothing for itself.
set -eu
before=${TMPDIR:-/tmp}/.stopped
stopped=$(grep -ls '^State:.T (stopped)' /proc/[0-9]*/status) || true
for status in $stopped; do
    pid=${status#/proc/}
    pid=${pid%/status}
    if [ "$pid" = 1 ]; then
        kill -CONT 1 # init: nothing in its container can kill it
    elif grep -qsxF "$status" "$before"; then
        { echo "process $pid was stopped by a signal: killed" >/proc/1/fd/2; } 2>/dev/null || true # the container's log
        kill -KILL "$pid" 2>/dev/null || true
    fi
done
echo "$stopped" >"$before"
exec "$@"
