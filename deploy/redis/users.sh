#!/bin/sh
# Prints the ACL file: users.acl with the digest of each user's password, one user on a line.
#   users.sh <users.acl> <directory of the secrets redis_<user>_password>
set -eu
template=$1 secrets=$2
program=''
for user in $(sed -n 's/^user .* #@\([a-z]*\)@.*/\1/p' "$template"); do
    file=$secrets/redis_${user}_password
    [ -r "$file" ] || { echo "redis: the secret $file is missing: deploy/secrets.sh makes it" >&2; exit 2; }
    password=$(cat "$file")
    [ -n "$password" ] || { echo "redis: the secret $file is empty: remove it, and deploy/secrets.sh makes it anew" >&2; exit 2; }
    program="$program;s/#@$user@/#$(printf %s "$password" | sha256sum | cut -c1-64)/"
done
sed "/^#/d;/^\$/d$program" "$template" | awk '/^ / { sub(/^ +/, " "); line = line $0; next } line { print line } { line = $0 } END { print line }'
