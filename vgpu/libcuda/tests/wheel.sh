#!/bin/sh
# Builds the Python wheel, installs it in an environment of its own and runs kernels with it.
# wheel.sh [LIBRARY]: the shared library, if it is built already.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" wheel --quiet --no-deps --wheel-dir "$work" ${1:+--config-settings library="$(realpath "$1")"} \
    "$here/python"
# pip builds in another folder.
if "$work/venv/bin/pip" wheel --no-deps --wheel-dir "$work" --config-settings library=relative.so "$here/python" \
    >"$work/refused" 2>&1 || ! grep -q 'library=relative.so: must be an absolute path' "$work/refused"; then
    cat "$work/refused"
    exit 1
fi
"$work/venv/bin/pip" install --quiet --no-index "$work"/*.whl
cd "$work"
venv/bin/python "$here/tests/wheel.py" "$here/tests/driver/kernels.ptx"
