#!/usr/bin/env bash
# The library as a user gets it: the packages as they would be published, unpacked, and a crate outside of this repository with the library as
# its only dependency and no toolchain file. It is the program of the README, and one that looks for GPUs. It builds on an ordinary compiler,
# compiles few crates, and runs; so it does with the feature `cuda` and the crates beside the library, by the lines of the README, without a toolkit
# and a driver. With these it compiles every example of their documentation, too.
# With a TOOLCHAIN it is only checked.
#
#     tests/consumer/run.sh [TOOLCHAIN]     # [builds with stable, or else what rustup uses outside of this repository]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
# Crates that may be compiled, the consumer itself included.
most=40
# The published packages, in this order.
packages=(epoxide-macros epoxide-simt epoxide-gpu epoxide-vgpu epoxide-base epoxide-group epoxide epoxide-launch epoxide-nccl)

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# With the compiler of the repository: what unpacks and builds below is the user's.
flags=()
for package in "${packages[@]}"; do flags+=(--package "$package"); done
(cd "$root" && CARGO_TARGET_DIR="$folder/package" cargo package --quiet --no-verify --allow-dirty "${flags[@]}")
# The examples, as JSON. In a folder of its own, which `cargo xtask public-api` shares: builds for which
# RUSTC_BOOTSTRAP is set are not those of other commands.
(($#)) || (
    cd "$root"
    for package in epoxide epoxide-group epoxide-launch epoxide-nccl; do
        RUSTC_BOOTSTRAP=1 cargo rustdoc --quiet --package "$package" --lib \
            --target-dir "${CARGO_TARGET_DIR:-target}/public-api" \
            -- -Z unstable-options --output-format doctest --cap-lints allow
        echo
    done
) >"$folder/examples.json"
mkdir "$folder/packages"
for crate in "$folder"/package/package/*.crate; do tar -xzf "$crate" -C "$folder/packages"; done
for package in "${packages[@]}"; do
    for file in README.md LICENSE-MIT LICENSE-APACHE; do
        test -s "$folder/packages/$package"-[0-9]*/"$file" || { printf '%s: no %s in the package\n' "$package" "$file" >&2; exit 1; }
    done
done

if (($#)); then
    export RUSTUP_TOOLCHAIN=$1
elif rustup toolchain list 2>/dev/null | grep -q '^stable-'; then
    export RUSTUP_TOOLCHAIN=stable
fi
# Flags and folders of this repository's own builds are none of a user's.
unset RUSTFLAGS CARGO_ENCODED_RUSTFLAGS CARGO_BUILD_TARGET CARGO_TARGET_DIR CUDA_LIBRARY_PATH
# Nothing here is debugged, or built again after a change.
export CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0
# Lines of cargo are searched below, whatever its user prefers.
export CARGO_TERM_COLOR=never

mkdir -p "$folder/consumer/src/bin"
cd "$folder/consumer"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -1)
{
    cat <<END
[package]
name = "consumer"
version = "0.1.0"
edition = "2024"

[features]
cuda = ["epoxide/cuda", "dep:epoxide-group", "dep:epoxide-launch", "dep:epoxide-nccl"]
default = []

[dependencies]
epoxide = "$version"
epoxide-group = { version = "$version", optional = true }
epoxide-launch = { version = "$version", optional = true }
epoxide-nccl = { version = "$version", optional = true }

[patch.crates-io]
END
    for package in "${packages[@]}"; do printf '%s = { path = "../packages/%s-%s" }\n' "$package" "$package" "$version"; done
} >Cargo.toml
# The part of the README about the library: its program, and what it says of the feature `cuda`.
sed -n '/^## As a library/,/^## [^A]/p' "$root/README.md" >library.md
sed -n '/^```rust/,/^```$/p' library.md | sed '/^```/d' >src/main.rs
sed -n '/^```sh/,/^```$/p' library.md | sed '/^```/d' >cuda.sh
test -s src/main.rs && test -s cuda.sh
cp "$root/tests/consumer/main.rs" src/bin/gpus.rs
# The versions that everything else here is tested with.
cp "$root/Cargo.lock" Cargo.lock
cargo --version
cargo fetch --quiet

if (($#)); then
    # Whatever the compiler: what it accepts runs as what the other one built.
    cargo check
    sed -i 's/^default = .*/default = ["cuda"]/' Cargo.toml
    sed 's/cargo build/cargo check/' cuda.sh | bash -e
    exit
fi

start=$SECONDS
cargo build 2>&1 | tee build.log
printf 'built in %s s\n' $((SECONDS - start))
crates=$(grep -c '^ *Compiling ' build.log)
printf '%s crates compiled, at most %s may be\n' "$crates" "$most"
((crates <= most))
target/debug/consumer
target/debug/gpus

# A program of each example, by rustdoc's rules: with the function main around it, unless it has one.
python3 - "$folder/examples.json" src/bin <<'END'
import json, pathlib, sys

crates = [json.loads(line) for line in open(sys.argv[1]) if line.strip()]
examples = [e for crate in crates for e in crate["doctests"] if e["doctest_attributes"]["rust"]]
compiled = [e for e in examples if not e["doctest_attributes"]["compile_fail"]]
for number, example in enumerate(compiled):
    parts = example["doctest_code"]
    wrapper = parts["wrapper"] or {"before": "", "after": ""}
    program = "".join([parts["crate_level"], wrapper["before"], parts["code"], wrapper["after"]])
    text = f"// {example['name']}\n{program}\n"
    pathlib.Path(sys.argv[2], f"example_{number}.rs").write_text(text)
assert len(compiled) >= 10, f"only {len(compiled)} examples were found"
print(f"{len(compiled)} examples of the documentation")
END
# Builds these programs, too.
sed -i 's/^default = .*/default = ["cuda"]/' Cargo.toml
bash -e cuda.sh
target/debug/gpus
