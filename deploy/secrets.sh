#!/bin/sh
# Makes the secrets that `docker compose up` reads, one file each; keeps those that are there.
#   deploy/secrets.sh [directory]      default: $MILLRACE_SECRETS, or .millrace/secrets
# The directory is its owner's alone (0700). The files in it are readable, because compose mounts each into its container as it is, and the
# users there are others; they are written whole or not at all.
set -eu
directory=${1:-${MILLRACE_SECRETS:-.millrace/secrets}}
umask 077
mkdir -p "$directory"
chmod 0700 "$directory"
for name in gateway_token internal_token grafana_password redis_gateway_password redis_rollout_password redis_reward_password redis_environment_password redis_learner_password; do
    file=$directory/$name
    [ ! -s "$file" ] || continue
    head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$file.$$"
    chmod 0444 "$file.$$"
    mv "$file.$$" "$file"
    echo "secrets: made $file"
done
