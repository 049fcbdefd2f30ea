#!/bin/sh
# Makes the virtual environment and installs the locked packages into it. Quick when nothing changed.
#   deploy/install.sh <venv> <lock file>      PYTHON, TORCH_INDEX: see the Makefile
set -eu
venv=$1 lock=$2
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
stamp=$venv/.installed
wanted=$(cat "$lock" "$root/pyproject.toml" | sha256sum | cut -c1-64)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && exit 0

"$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || {
    echo "install: Python 3.11 or 3.12 is needed, and '$python' is $("$python" --version 2>&1). Name one: make PYTHON=/path/to/python3.11" >&2
    exit 1
}
started=$(date +%s)
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check --no-input"
# Half the processor time of the one that came with Python, where it can be had.
$pip install -qq --no-deps "pip>=26" 2>/dev/null || true
torch=$(grep '^torch==' "$lock") || torch=
cuda=${lock%.txt}-cuda.txt

install_torch() {
    echo "install: 1/3 $torch"
    $pip install -qq --no-deps "$torch" 2>"$venv/torch.log" || $pip install -qq --no-deps --index-url "$TORCH_INDEX" "$torch" 2>>"$venv/torch.log" || {
        [ -f "$cuda" ] && echo "install: there is no CPU build to be had: taking the CUDA build, which computes on a CPU too (4 GB)" &&
            $pip install -qq --no-deps --progress-bar off -r "$cuda"
    } || {
        cat "$venv/torch.log" >&2
        echo "install: neither the configured package sources nor TORCH_INDEX=$TORCH_INDEX have $torch (a CPU build of PyTorch)." >&2
        echo "install: put the wheel in a directory and run: PIP_FIND_LINKS=/that/directory make setup" >&2
        exit 1
    }
}
[ -z "$torch" ] || install_torch
count=$(grep -c '==' "$lock")
echo "install: 2/3 $count packages of $lock"
# pip reads the sources' lists on one core: two of them, each with half of the packages, take half as long.
grep -v '^torch==' "$lock" | awk -v to="$venv/part" '{ print > (to NR % 2) }'
$pip install -qq --no-deps --progress-bar off -r "$venv/part0" &
other=$!
failed=0
$pip install -qq --no-deps --progress-bar off -r "$venv/part1" || failed=1
wait "$other" || failed=1
[ "$failed" = 0 ]
echo "install: 3/3 millrace"
# As a path, not as a finder of modules: beside a clone named millrace, `import millrace` would find the folder and not the package.
$pip install -qq --no-deps --no-build-isolation --config-settings editable_mode=compat -e "$root"
echo "$wanted" >"$stamp"
echo "install: done in $(($(date +%s) - started)) s"
