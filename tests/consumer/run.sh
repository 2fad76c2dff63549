#!/usr/bin/env bash
# What a user of the library gets: a crate outside of this repository, with the library as its only dependency and no toolchain file,
# builds on an ordinary compiler, compiles few crates, and runs.
#
#     tests/consumer/run.sh [TOOLCHAIN]     # [stable, or else what rustup uses outside of this repository]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
# Crates that may be compiled, the consumer itself included.
most=39

if (($#)); then
    export RUSTUP_TOOLCHAIN=$1
elif rustup toolchain list 2>/dev/null | grep -q '^stable-'; then
    export RUSTUP_TOOLCHAIN=stable
fi
# Flags and folders of this repository's own builds are none of a user's.
unset RUSTFLAGS CARGO_ENCODED_RUSTFLAGS CARGO_BUILD_TARGET CARGO_TARGET_DIR

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/src"
cat >"$folder/Cargo.toml" <<END
[package]
name = "consumer"
version = "0.1.0"
edition = "2024"

[dependencies]
epoxide = { path = "$root/host" }
END
cp "$root/tests/consumer/main.rs" "$folder/src/main.rs"
# The versions that everything else here is tested with.
cp "$root/Cargo.lock" "$folder/Cargo.lock"
cd "$folder"
cargo --version
cargo fetch --quiet

start=$SECONDS
cargo build 2>&1 | tee build.log
printf 'built in %s s\n' $((SECONDS - start))
crates=$(grep -c '^ *Compiling ' build.log)
printf '%s crates compiled, at most %s may be\n' "$crates" "$most"
((crates <= most))
target/debug/consumer
