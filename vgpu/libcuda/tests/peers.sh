#!/bin/sh
# Runs the tests of two other crates, cudarc and cust, on the library. Their sources, and the
# compiler that cudarc's kernels need, come from package registries into the folder given.
#
#   vgpu/libcuda/tests/peers.sh FOLDER
#
# Prints the tests that failed and the sums. The README lists those that fail, with the reasons.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
work=$(cd "$1" && pwd)

cargo build --release --manifest-path "$here/Cargo.toml"
target=$(cargo metadata --format-version 1 --no-deps --manifest-path "$here/Cargo.toml" |
    sed 's/.*"target_directory":"\([^"]*\)".*/\1/')
mkdir -p "$work/cuda/lib64" "$work/fetch/src"
for name in libcuda.so libcuda.so.1; do
    ln -sf "$target/release/libepoxide_vgpu_cuda.so" "$work/cuda/lib64/$name"
done

cat >"$work/fetch/Cargo.toml" <<EOF
[package]
name = "fetch"
version = "0.0.0"
edition = "2021"
[workspace]
[dependencies]
cudarc = { version = "=0.19.0", default-features = false, features = ["std", "driver", "dynamic-loading", "cuda-12080"] }
cust = "=0.3.2"
EOF
: >"$work/fetch/src/lib.rs"
(cd "$work/fetch" && cargo vendor --versioned-dirs vendor >/dev/null 2>&1)
rm -rf "$work/cudarc" "$work/cust"
cp -r "$work/fetch/vendor/cudarc-0.19.0" "$work/cudarc"
cp -r "$work/fetch/vendor/cust-0.3.2" "$work/cust"

if [ ! -d "$work/nvrtc/nvidia" ]; then
    python3 -m pip download --quiet --no-deps --dest "$work/nvrtc" nvidia-cuda-nvrtc-cu12==12.8.93
    (cd "$work/nvrtc" && python3 -m zipfile -e ./*.whl .)
fi

export CARGO_TARGET_DIR="$work/target" CUDA_LIBRARY_PATH="$work/cuda" RUST_BACKTRACE=0
export LD_LIBRARY_PATH="$work/cuda/lib64:$work/nvrtc/nvidia/cuda_nvrtc/lib"

report() {
    grep -E '^test .*FAILED$|^test result' "$work/$1.log" || tail -n 30 "$work/$1.log"
}

echo "cudarc:"
features=std,driver,nvrtc,dynamic-loading,cuda-12080,f16
cudarc() {
    cargo test --lib --no-default-features --features $features --manifest-path "$work/cudarc/Cargo.toml" -- "$@"
}
cudarc driver --skip test_par_launch >"$work/cudarc.log" 2>&1 || true
report cudarc
for alone in test_post_alloc_memory test_device_side_assert; do
    cudarc $alone --ignored >"$work/$alone.log" 2>&1 || true
    report $alone
done

echo "cust:"
cargo test --lib --manifest-path "$work/cust/Cargo.toml" >"$work/cust.log" 2>&1 || true
report cust
