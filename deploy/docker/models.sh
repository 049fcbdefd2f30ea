#!/bin/sh
# What `docker compose run --rm models …` does: puts a model into the models volume.
#   models tiny           makes the demo's model
#   models import NAME    copies the model directory mounted at /from
set -eu
models=/var/lib/millrace/models
case ${1:-} in
tiny) PYTHONPATH=/opt exec python -m examples.demo.models tiny --out "$models/tiny" ;;
import)
    name=${2:?models import NAME: give the model a name}
    [ -f /from/config.json ] || { echo "models: no model is mounted at /from: docker compose run --rm -v DIR:/from:ro models import $name" >&2; exit 2; }
    [ ! -e "$models/$name" ] || { echo "models: there is a model $name already" >&2; exit 2; }
    rm -rf "$models/.$name.new"
    cp -R /from "$models/.$name.new"
    chmod -R u=rwX,go=rX "$models/.$name.new"
    mv "$models/.$name.new" "$models/$name"
    echo "models: $name imported"
    ;;
*)
    echo "models: tiny | import NAME" >&2
    exit 2
    ;;
esac
