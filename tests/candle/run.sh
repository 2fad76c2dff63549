#!/usr/bin/env bash
# The example over candle (examples/candle_adapter): its tests on the CPU, its lints, and the types of its CUDA part. candle compiles
# its CUDA kernels by nvcc, which this script replaces by a program that writes empty files: what it checks then cannot run.
#
#     tests/candle/run.sh
set -euo pipefail
cd "$(dirname "$0")/../../examples/candle_adapter"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/nvcc" <<'END'
#!/bin/sh
case $1 in
--version) printf 'nvcc\n\n\nCuda compilation tools, release 12.8, V12.8.93\n'; exit ;;
--list-gpu-code) printf 'sm_90\n'; exit ;;
esac
for source; do :; done
while [ $# -gt 1 ]; do
    case $1 in
    -o) : >"$2" ;;
    --output-directory) : >"$2/$(basename "$source" .cu).ptx" ;;
    esac
    shift
done
END
chmod +x "$folder/nvcc"
# Flags of this repository's own builds are none of the example's.
unset RUSTFLAGS CARGO_ENCODED_RUSTFLAGS CARGO_BUILD_TARGET CARGO_TARGET_DIR

cargo fmt --check
cargo test --locked
cargo clippy --locked --all-targets -- -D warnings
export NVCC=$folder/nvcc CUDARC_CUDA_VERSION=12080 CUDA_COMPUTE_CAP=90
cargo clippy --locked --features cuda --all-targets -- -D warnings
printf 'the example over candle passes\n'
