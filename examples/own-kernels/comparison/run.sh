#!/usr/bin/env bash
# On a machine with a GPU and nvcc: the template's tests, and times of its kernels beside those of
# kernels.cu. Rust is not needed there.
#
#     comparison/run.sh TESTS TIMES
#
# TESTS and TIMES are the programs that
#     cargo test --release --features cuda --no-run
#     cargo build --release --features cuda --example times
# build (tests/kernels.rs and examples/times.rs).
set -euo pipefail
[ $# -eq 2 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
cubin=$(mktemp --suffix .cubin)
trap 'rm -f "$cubin"' EXIT
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
"$nvcc" -O3 -std=c++17 -arch=native -cubin -o "$cubin" "$here/kernels.cu"

"$1"
"$2" "$cubin"
