#!/bin/sh
# Compiles kernels of another project, runs them on virtual GPUs, and compares the reports with the
# list in this folder. Needs Python 3 with venv and pip, g++ and cargo; no GPU. README.md has more.
#
#   vgpu/peers/check.sh one-sided [WORK]
#   vgpu/peers/check.sh tensor-cores [WORK]
#   vgpu/peers/check.sh cuda-cores [WORK]
#   vgpu/peers/check.sh deepep [WORK] CHECKOUT
#   vgpu/peers/check.sh deepep-ll [WORK] CHECKOUT
#   vgpu/peers/check.sh mscclpp [WORK] CHECKOUT
#   vgpu/peers/check.sh mscclpp-nvls [WORK] CHECKOUT
#   vgpu/peers/check.sh nccl-ep [WORK] CHECKOUT
#   vgpu/peers/check.sh nccl-allreduce [WORK] CHECKOUT
#
# WORK keeps what is downloaded and compiled; without it, it is a temporary folder. CHECKOUT is a
# git repository of the project, with or without a work tree.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
usage='usage: check.sh one-sided|tensor-cores|cuda-cores [WORK]
       check.sh deepep|deepep-ll|mscclpp|mscclpp-nvls|nccl-ep|nccl-allreduce [WORK] CHECKOUT'
project=${1:?$usage}
shift
checkout=
case $project in
one-sided | tensor-cores | cuda-cores) ;;
deepep | deepep-ll | mscclpp | mscclpp-nvls | nccl-ep | nccl-allreduce)
    [ $# -gt 0 ] || { echo "$usage" >&2; exit 2; }
    for last; do :; done
    checkout=$last
    [ $# -gt 1 ] || set --
    ;;
*)
    echo "no project '$project'" >&2
    echo "$usage" >&2
    exit 2
    ;;
esac
if [ $# -gt 0 ]; then
    mkdir -p "$1"
    work=$(cd "$1" && pwd)
else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
python=$work/venv/bin/python
export PYTHONDONTWRITEBYTECODE=1

# Progress goes to stderr, so that stdout has the results alone.
progress() {
    echo "check.sh: $*" >&2
}

[ -x "$python" ] || python3 -m venv "$work/venv"

# is_of FILE TEXT: whether the file has this text, the packages that it was made of.
is_of() {
    [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]
}

# Downloads nvcc, which compiles all but kernels of Triton. Sets `cuda` to its folder.
compiler() {
    nvcc='nvidia-cuda-nvcc==13.5.37 nvidia-cuda-crt==13.5.37 nvidia-nvvm==13.5.37
        nvidia-cuda-runtime==13.5.37 nvidia-cuda-cccl==13.3.5.0.6'
    is_of "$work/venv/nvcc" "$nvcc" || {
        progress "downloads the compiler, nvcc 13.5.37"
        # shellcheck disable=SC2086 # One word for each package.
        "$work/venv/bin/pip" install --quiet $nvcc
        echo "$nvcc" >"$work/venv/nvcc"
    }
    cuda=$("$python" -c 'import nvidia.cu13 as m; print(list(m.__path__)[0])')
}

# The folder of a wheel's files, WORK/NAME, of a package and version.
wheel() {
    is_of "$work/$1/package" "$2" || {
        progress "downloads $2"
        rm -rf "${work:?}/$1" "$work/$1.part" "$work/$1.wheel"
        "$work/venv/bin/pip" download --quiet --no-deps -d "$work/$1.wheel" "$2"
        "$python" -m zipfile -e "$work/$1.wheel"/*.whl "$work/$1.part"
        echo "$2" >"$work/$1.part/package"
        mv "$work/$1.part" "$work/$1"
    }
}

# Compiles CUTLASS's kernels with tensor cores.
cutlass() {
    compiler
    # Versions and flags are those of this file.
    [ "$work/cutlass.ptx" -nt "$here/cutlass_gemm.cu" ] && [ "$work/cutlass.ptx" -nt "$here/check.sh" ] || {
        progress "compiles kernels of CUTLASS"
        "$cuda/bin/nvcc" -std=c++17 -arch=sm_80 -ptx -w --expt-relaxed-constexpr "-I$cuda/include/cccl" \
            "-I$work/flashinfer/flashinfer/data/cutlass/include" -o "$work/cutlass.ptx.part" \
            "$here/cutlass_gemm.cu"
        mv "$work/cutlass.ptx.part" "$work/cutlass.ptx"
    }
}

# Runs the kernels of a host side in Python, which compares with numpy.
wheels() {
    "$python" -W ignore "$here/$1" "$target/release/libepoxide_vgpu_cuda.so" "$work" "$here/$project.txt"
}

case $project in
tensor-cores | cuda-cores)
    wheel flashinfer flashinfer-python==0.7.2.post1
    wheel fla fla-core==0.6.0
    wheel sageattention sageattention==1.0.6
    progress "installs triton 3.9.0 and numpy 2.4.6"
    "$work/venv/bin/pip" install --quiet triton==3.9.0 numpy==2.4.6
    [ "$project" = cuda-cores ] || cutlass
    cd "$here/../.."
    progress "builds the virtual GPU"
    cargo build --quiet --release -p epoxide-vgpu-cuda
    target=${CARGO_TARGET_DIR:-target}
    progress "compiles kernels of Triton, and runs $project"
    if [ "$project" = tensor-cores ]; then
        wheels tensor_cores.py
    else
        wheels cuda_cores.py
        progress "runs $project in check mode"
        EPOXIDE_VGPU_CHECK=1 wheels cuda_cores.py
    fi
    exit
    ;;
esac

compiler
# The source of the list, and the flags that it needs.
case $project in
one-sided)
    wheel flashinfer flashinfer-python==0.7.2.post1
    data=$work/flashinfer/flashinfer/data
    source=$data/csrc/nv_internal/tensorrt_llm/kernels/communicationKernels/moeAlltoAllKernels.cu
    file=moeAlltoAllKernels.cu script=one_sided.py
    set -- -DENABLE_BF16 -DENABLE_FP8 "-I$data/include" "-I$data/csrc" "-I$data/csrc/nv_internal" \
        "-I$data/csrc/nv_internal/include" "-I$data/spdlog/include"
    ;;
deepep | deepep-ll)
    mkdir -p "$work/DeepEP"
    git -C "$checkout" archive 567632d csrc | tar -x -C "$work/DeepEP"
    source=$work/DeepEP/csrc/kernels
    file=intranode.cu script=deepep.py
    [ "$project" = deepep ] || file=internode_ll.cu script=deepep_ll.py
    set -- -DDISABLE_NVSHMEM
    ;;
mscclpp | mscclpp-nvls)
    mkdir -p "$work/MSCCLPP"
    git -C "$checkout" archive 1f5f065d include src | tar -x -C "$work/MSCCLPP"
    source=$work/MSCCLPP
    file=src/ext/collectives/allreduce/kernels.cu script=mscclpp.py
    [ "$project" = mscclpp ] || script=mscclpp_nvls.py
    set -- -DMSCCLPP_USE_CUDA -Iinclude -Isrc/core/include -Isrc/ext/collectives/include
    ;;
nccl-allreduce)
    mkdir -p "$work/NCCL-allreduce"
    git -C "$checkout" archive 5067397c contrib/custom_algos makefiles/version.mk \
        src/include/nccl_device src/include/nccl_device.h src/nccl.h.in | tar -x -C "$work/NCCL-allreduce"
    source=$work/NCCL-allreduce
    file=contrib/custom_algos/allreduce/peers.cu script=nccl_allreduce.py
    # Without the device code of the networks that need headers of their own.
    set -- -DNCCL_GIN_GDAKI_ENABLE=0 -DNCCL_GIN_GPI_ENABLE=0 -Isrc/include -Isrc/include/nccl_device
    ;;
nccl-ep)
    mkdir -p "$work/NCCL"
    git -C "$checkout" archive 5067397c contrib/nccl_ep/device contrib/nccl_ep/include makefiles/version.mk \
        src/include/nccl_device src/include/nccl_device.h src/nccl.h.in | tar -x -C "$work/NCCL"
    source=$work/NCCL
    file=contrib/nccl_ep/peers.cu script=nccl_ep.py
    # Without the device code of the networks that need headers of their own.
    set -- -DNCCL_GIN_GDAKI_ENABLE=0 -DNCCL_GIN_GPI_ENABLE=0 -Icontrib/nccl_ep -Icontrib/nccl_ep/include \
        -Isrc/include -Isrc/include/nccl_device
    ;;
esac

steps=$("$python" "$here/$script" "$source" "$work/$project")
arguments=
progress "compiles kernels of $project in $(echo "$steps" | wc -w) steps"
for step in $steps; do
    ptx=$work/$project/$step/kernels.ptx
    # Line information gives reports the lines of the source.
    (cd "$work/$project/$step" && "$cuda/bin/nvcc" -std=c++17 -arch=sm_90a -ptx -lineinfo -w \
        --expt-relaxed-constexpr "-I$cuda/include/cccl" "$@" -o kernels.ptx "$file")
    arguments="$arguments $step=$ptx"
done
cd "$here/../.."
progress "builds the virtual GPU"
cargo build --quiet --release -p epoxide-vgpu --example peers
progress "runs $project"
# shellcheck disable=SC2086 # One word for each step.
cargo run --quiet --release -p epoxide-vgpu --example peers -- \
    "$project" "$here/$project.txt" $arguments
