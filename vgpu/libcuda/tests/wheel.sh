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
"$work/venv/bin/pip" install --quiet --no-index "$work"/*.whl
cd "$work"
venv/bin/python "$here/tests/wheel.py" "$here/tests/driver/kernels.ptx"
