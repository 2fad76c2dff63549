#!/bin/sh
# Compiles a GEMM of CUTLASS in clusters of two blocks, whose loads are multicasts, and a grouped GEMM
# whose blocks change tensor maps. Runs both on the libcuda.so.1 of virtual GPUs, in fast and in check
# mode, with several seeds. Needs Python 3 with venv and pip, g++ and cargo; no GPU.
#
#   vgpu/peers/cutlass.sh WORK CHECKOUT
#
# WORK keeps what is downloaded and compiled; it is made anew where this file, which has the
# versions and the flags, or the source is newer. CHECKOUT is a work tree of CUTLASS (7107b05).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
usage='usage: cutlass.sh WORK CHECKOUT'
mkdir -p "${1:?$usage}"
work=$(cd "$1" && pwd)
checkout=$(cd "${2:?$usage}" && pwd)
git -C "$checkout" diff --quiet 7107b05 -- include || {
    echo "cutlass.sh: $checkout/include is not that of CUTLASS 7107b05" >&2
    exit 2
}

# newer FILE THAN..: whether FILE is there, and newer than each of the others.
newer() {
    file=$1
    shift
    for than; do [ "$file" -nt "$than" ] || return 1; done
}

newer "$work/venv/installed" "$here/cutlass.sh" || {
    python3 -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet \
        nvidia-cuda-nvcc==13.5.37 nvidia-cuda-crt==13.5.37 nvidia-nvvm==13.5.37 \
        nvidia-cuda-runtime==13.5.37 nvidia-cuda-cccl==13.3.5.0.6
    touch "$work/venv/installed"
}
cuda=$("$work/venv/bin/python" -c 'import nvidia.cu13 as m; print(list(m.__path__)[0])')

cargo build --quiet --release --manifest-path "$here/../libcuda/Cargo.toml"
target=$(cargo metadata --format-version 1 --no-deps --manifest-path "$here/../libcuda/Cargo.toml" |
    sed 's/.*"target_directory":"\([^"]*\)".*/\1/')
mkdir -p "$work/lib"
for name in libcuda.so libcuda.so.1; do
    ln -sf "$target/release/libepoxide_vgpu_cuda.so" "$work/lib/$name"
done
export LD_LIBRARY_PATH="$work/lib"

# compile NAME SUFFIX FLAG..
compile() {
    made=$work/$1.$2 source=$here/$1.cu
    shift 2
    newer "$made" "$source" "$here/cutlass.sh" || {
        "$cuda/bin/nvcc" -std=c++17 -w --expt-relaxed-constexpr "-I$cuda/include/cccl" "-I$checkout/include" \
            -DCUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL=1 -DCLUSTER_M=2 -DCLUSTER_N=1 "$@" -o "$made.part" "$source"
        mv "$made.part" "$made"
    }
}
for program in cutlass cutlass_grouped; do
    compile $program ptx -arch=sm_90a -ptx -lineinfo
    compile $program o -arch=compute_90a -c
    g++ -o "$work/$program" "$work/$program.o" "-L$work/lib" -lcuda "$cuda/lib/libcudart_static.a" -ldl -lrt -lpthread
done

# runs PROGRAM KERNELS SEEDS: the sums are right with each seed.
runs() {
    for seed in $(seq "$3"); do
        EPOXIDE_VGPU_SEED=$seed "$work/$1" "$work/$2.ptx" >"$work/out" 2>&1 || { cat "$work/out"; exit 1; }
    done
}
# reported WHAT TEXT: check mode reports this.
reported() {
    if EPOXIDE_VGPU_SEED=1 "$work/cutlass" "$work/$1.ptx" >"$work/out" 2>&1 || ! grep -q "$2" "$work/out"; then
        cat "$work/out"
        echo "check mode does not report: $2" >&2
        exit 1
    fi
}

runs cutlass cutlass 20
runs cutlass_grouped cutlass_grouped 20
echo "fast mode: 20 seeds, all sums of both are right"
export EPOXIDE_VGPU_CHECK=1
runs cutlass_grouped cutlass_grouped 20
echo "check mode: the grouped GEMM has no report with 20 seeds"
# The epilogue moves a register that only a load of C would write, and nothing loads C.
reported cutlass 'which nothing has written'
register=$(sed -n "s/.*reads register '\(%r[0-9]*\)'.*/\1/p" "$work/out")
sed "0,/ld.param/s//mov.b32 $register, 0;\n ld.param/" "$work/cutlass.ptx" >"$work/written.ptx"
# `ClusterBarrier::arrive(cta_id)` names no scope.
reported written 'arrival at the mbarrier of another block with scope .cta'
export EPOXIDE_VGPU_ASSUME=ClusterArrivals
runs cutlass written 20
echo "check mode: two reports of the source as it is; with both mended or assumed, 20 seeds without a report"
