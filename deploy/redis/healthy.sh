#!/bin/sh
# Health check: the server answers a user that it knows, and has loaded its data.
set -eu
REDISCLI_AUTH=$(cat /run/secrets/redis_gateway_password)
export REDISCLI_AUTH
answer=$(redis-cli --user gateway --no-auth-warning ping 2>&1)
[ "$answer" = PONG ] || { echo "$answer"; exit 1; }
