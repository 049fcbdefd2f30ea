#!/bin/sh
# Starts the server with the users that the secrets allow.
set -eu
umask 077
probe=/data/.room
head -c 1048576 /dev/zero 2>/dev/null >"$probe" || { rm -f "$probe"; echo "redis: the volume at /data has no room, or cannot be written" >&2; exit 2; }
rm -f "$probe"
sh /etc/millrace/users.sh /etc/millrace/users.acl /run/secrets >/run/redis/users.acl
exec redis-server /etc/millrace/redis.conf
