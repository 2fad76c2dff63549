#!/bin/sh
# Makes the PTX in ptx/ anew from sources/. Needs Python 3 with venv and pip, clang 14 and g++ (of Debian 12); fetches
# nvcc and Triton into a folder of its own, in the versions that made what is committed. No GPU is needed.
set -eu
cd "$(dirname "$0")"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet \
    nvidia-cuda-nvcc==13.5.37 nvidia-cuda-crt==13.5.37 nvidia-nvvm==13.5.37 \
    nvidia-cuda-runtime==13.5.37 nvidia-cuda-cccl==13.3.5.0.6 triton==3.9.0
cuda=$("$work/venv/bin/python" -c 'import nvidia.cu13 as m; print(list(m.__path__)[0])')

# titled HEADER SOURCE DESTINATION: adds a line with the compiler to the file.
titled() {
    { echo "// $1"; cat "$2"; } >"$3"
}

nvcc() {
    "$cuda/bin/nvcc" -std=c++17 -arch=sm_90 -ptx -I"$cuda/include/cccl" "$@"
}

# Without CUDA at hand clang takes an old version of PTX, which lacks the .sync forms of warp instructions.
device_clang() {
    clang -x cuda --cuda-device-only -nocudainc -nocudalib --cuda-gpu-arch=sm_80 \
        -Xclang -target-feature -Xclang +ptx72 -S "$@"
}

mkdir -p ptx/unoptimised
for name in elementwise reduce scan matmul histogram sort async sync control system cluster; do
    nvcc -o "$work/out.ptx" "sources/$name.cu"
    titled "nvcc 13.5.37" "$work/out.ptx" "ptx/$name.ptx"
done
# Without optimisation everything is a call and lies in local memory. Left out are matmul, which nvcc then does not
# compile, cluster, and async and sync, where the library then calls through pointers.
for name in elementwise reduce scan histogram sort control system; do
    nvcc -Xcicc -O0 -o "$work/out.ptx" "sources/$name.cu"
    titled "nvcc 13.5.37 -Xcicc -O0" "$work/out.ptx" "ptx/unoptimised/$name.ptx"
done
device_clang -O2 -o "$work/out.ptx" sources/plain.cu
titled "clang 14.0.6 -O2" "$work/out.ptx" ptx/plain.ptx
device_clang -O0 -o "$work/out.ptx" sources/plain.cu
titled "clang 14.0.6 -O0" "$work/out.ptx" ptx/unoptimised/plain.ptx

# An empty cache, so that this compiler makes every file.
TRITON_CACHE_DIR="$work/cache" "$work/venv/bin/python" sources/kernels.py ptx
