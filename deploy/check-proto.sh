#!/bin/sh
# Fails when the committed protobuf code is not what proto/ generates.
set -eu
python=$1
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
"$python" -m grpc_tools.protoc -Iservices/common/pb=proto --python_out="$fresh" --pyi_out="$fresh" --grpc_python_out="$fresh" proto/*.proto
for file in "$fresh"/services/common/pb/*; do
    cmp -s "$file" "services/common/pb/$(basename "$file")" || {
        echo "lint: services/common/pb/$(basename "$file") is not what proto/ generates: run make proto" >&2
        exit 1
    }
done
