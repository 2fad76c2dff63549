#!/usr/bin/env bash
# The second back end: builds all kernels by `--backend nvvm`, which lints them, and runs round trips of all
# modes with its PTX on the virtual GPU, then the tests of what no round trip has: rows by expert in high
# throughput, and more than 8 ranks. Where a part of the back end is missing it names each and passes. With
# EPOXIDE_REQUIRE_NVVM=1 it fetches them first and fails where one cannot be had.
#
#     tests/nvvm/run.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

fetch=()
[[ ${EPOXIDE_REQUIRE_NVVM:-} ]] && fetch=(--fetch-nvvm)
code=0
cargo xtask build-ptx --backend nvvm "${fetch[@]}" || code=$?
# 77: a part is missing. A wrong command line ends with 2.
if ((code == 77)) && [[ ! ${EPOXIDE_REQUIRE_NVVM:-} ]]; then
    echo 'the nvvm back end is not on this machine: skipped'
    exit 0
fi
((code == 0)) || exit "$code"

export EPOXIDE_PTX=$PWD/target/ptx/epoxide.sm_90.nvvm.ptx
small=(--ranks-per-node 2 --tokens 24 --hidden 256 --experts 8 --topk 2 --threads)
roundtrip() { cargo run --quiet --release -- roundtrip "${small[@]}" "$@"; }
for dtype in bf16 fp8; do
    roundtrip --mode intranode --nodes 1 --num-sms 4 --dtype $dtype --check
    roundtrip --mode internode --nodes 2 --num-sms 8 --dtype $dtype --check
done
for dtype in bf16 fp8 mxfp8; do
    # Rows by expert are part of it.
    roundtrip --mode low-latency --num-sms 4 --dtype $dtype --check
    roundtrip --mode low-latency --nodes 2 --num-sms 4 --dtype $dtype --check
done
cargo xtask ptx-test "$EPOXIDE_PTX" -- --quiet --test ep -- by_expert many:: mxfp8
echo 'round trips of all modes and the tests of other kernels pass with the PTX of the nvvm back end'
