#!/bin/sh
# Compiles kernels of another project, runs them on virtual GPUs, and compares the reports with the
# list in this folder. Needs Python 3 with venv and pip, g++ and cargo; no GPU. README.md has more.
#
#   vgpu/peers/check.sh one-sided [WORK]
#
# WORK keeps what is downloaded and compiled; without it, it is a folder that goes away.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
project=${1:?usage: check.sh one-sided [WORK]}
case $project in one-sided) ;; *) echo "no project '$project': there is one-sided" >&2; exit 2 ;; esac

if [ $# -gt 1 ]; then
    mkdir -p "$2"
    work=$(cd "$2" && pwd)
else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
# The versions of the list.
flashinfer=flashinfer-python==0.7.2.post1
[ -x "$work/venv/bin/nvcc-found" ] || {
    python3 -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet \
        nvidia-cuda-nvcc==13.5.37 nvidia-cuda-crt==13.5.37 nvidia-nvvm==13.5.37 \
        nvidia-cuda-runtime==13.5.37 nvidia-cuda-cccl==13.3.5.0.6
    ln -s "$("$work/venv/bin/python" -c 'import nvidia.cu13 as m; print(list(m.__path__)[0])')/bin/nvcc" \
        "$work/venv/bin/nvcc-found"
}
cuda=$(dirname "$(dirname "$(readlink "$work/venv/bin/nvcc-found")")")
wheel=$work/flashinfer
[ -d "$wheel" ] || {
    "$work/venv/bin/pip" download --quiet --no-deps -d "$work/wheels" "$flashinfer"
    "$work/venv/bin/python" -m zipfile -e "$work"/wheels/flashinfer_python-*.whl "$wheel.part"
    mv "$wheel.part" "$wheel"
}
data=$wheel/flashinfer/data

kernels=csrc/nv_internal/tensorrt_llm/kernels/communicationKernels/moeAlltoAllKernels.cu
steps=$("$work/venv/bin/python" "$here/one_sided.py" "$data/$kernels" "$work/$project")
arguments=
for step in $steps; do
    ptx=$work/$project/$step/kernels.ptx
    # Line information says which line a report is at; the path of the header stays the wheel's.
    "$cuda/bin/nvcc" -std=c++17 -arch=sm_90a -ptx -lineinfo -w --expt-relaxed-constexpr \
        -DENABLE_BF16 -DENABLE_FP8 -I"$cuda/include/cccl" -I"$data/include" -I"$data/csrc" \
        -I"$data/csrc/nv_internal" -I"$data/csrc/nv_internal/include" -I"$data/spdlog/include" \
        -o "$ptx" "$work/$project/$step/$(basename "$kernels")"
    arguments="$arguments $step=$ptx"
done
cd "$here/../.."
# shellcheck disable=SC2086 # One word for each step.
cargo run --quiet --release -p epoxide-vgpu --example peers -- \
    "$project" "$here/$project.txt" $arguments
