#!/usr/bin/env bash
# The template for kernels of one's own (examples/own-kernels), as a user gets it who has nothing of this repository: a copy in
# another folder, on the packages as they would be published, without a toolchain file. Its tests pass on stable Rust. The builder,
# installed from its package, compiles its kernels to the PTX that is committed. An edit of a kernel is noticed until it is built.
# Then the same with the crate that docs/OWN-KERNELS.md writes, with its lines for the crate `epoxide`, and with the kernel and the test
# that docs/KERNELS.md begins with.
#
#     tests/own-kernels/run.sh
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
packages=(
    epoxide-macros epoxide-simt epoxide-vgpu epoxide-vgpu-cuda epoxide-build-ptx epoxide-gpu epoxide-base epoxide-group epoxide
)
fail() {
    printf '%s\n' "$*" >&2
    exit 1
}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
flags=()
for package in "${packages[@]}"; do flags+=(--package "$package"); done
(cd "$root" && CARGO_TARGET_DIR="$folder/package" cargo package --quiet --no-verify --allow-dirty "${flags[@]}")
mkdir "$folder/packages"
for crate in "$folder"/package/package/*.crate; do tar -xzf "$crate" -C "$folder/packages"; done
for package in "${packages[@]}"; do
    for file in README.md LICENSE-MIT LICENSE-APACHE; do
        test -s "$folder/packages/$package"-[0-9]*/"$file" || fail "$package: no $file in the package"
    done
done

if rustup toolchain list 2>/dev/null | grep -q '^stable-'; then
    export RUSTUP_TOOLCHAIN=stable
fi
# Flags and folders of this repository's own builds are none of a user's.
unset RUSTFLAGS CARGO_ENCODED_RUSTFLAGS CARGO_BUILD_TARGET CUDA_LIBRARY_PATH
# The template, the builder and the tutorial share what they all compile. No build here is debugged or
# repeated with a small change of a large crate.
export CARGO_TARGET_DIR=$folder/target CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0
# Lines of cargo are searched below, whatever its user prefers.
export CARGO_TERM_COLOR=never

version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -1)
# In place of the registry: the packages that are named.
patches() {
    printf '\n[patch.crates-io]\n'
    for package in "$@"; do printf '%s = { path = "%s" }\n' "$package" "$folder/packages/$package-$version"; done
}

cp -r "$root/examples/own-kernels" "$folder/copy"
cd "$folder/copy"
rm -rf target
sed -i 's/, path = "[^"]*"//' Cargo.toml
if grep -q 'path *=' Cargo.toml; then fail "a path is left in the template's Cargo.toml"; fi
# The virtual GPU at the level of the repository's own tests: the template's takes twice as long to
# compile.
sed -i 's/^opt-level = 3$/opt-level = 1/' Cargo.toml
patches epoxide-macros epoxide-simt epoxide-vgpu >>Cargo.toml
cargo --version

start=$SECONDS
EPOXIDE_VGPU_COVERAGE=$folder/coverage cargo test 2>&1 | tee test.log
printf 'built and tested in %s s\n' $((SECONDS - start))
# A warning here would be one in every crate of kernels.
if grep '^warning' test.log; then fail 'the template has warnings'; fi
# Its tests and examples for a GPU compile where there is none, and no CUDA.
cargo check --features cuda --tests --examples 2>&1 | tee cuda.log
if grep '^warning' cuda.log; then fail 'the template has warnings with the feature cuda'; fi

builder=$folder/packages/epoxide-build-ptx-$version
patches epoxide-vgpu >>"$builder/Cargo.toml"
cargo install --quiet --path "$builder" --root "$folder/installed" --debug
export PATH="$folder/installed/bin:$PATH"
cp ptx/own_kernels.sm_80.ptx committed.ptx
# Neither the user's folder for builds nor an earlier product in cargo's own folders changes what is written.
mkdir -p .cargo target/ptx/sm_80-in-tree/nvptx64-nvidia-cuda/ptx/deps
printf '[build]\nbuild-dir = "elsewhere"\n' >.cargo/config.toml
printf 'of an earlier build\n' | tee target/ptx/sm_80-in-tree/own_kernels.s \
    >target/ptx/sm_80-in-tree/nvptx64-nvidia-cuda/ptx/deps/own_kernels.s
cargo build-ptx
# The header has a hash of sources, which packages have in other files.
compared() { grep -v -e '^// sources: ' "$1"; }
diff <(compared committed.ptx) <(compared ptx/own_kernels.sm_80.ptx) || fail 'another PTX than the committed one'
cargo build-ptx --check
rm -r .cargo
# The tests have executed every line of a kernel, and the report names the crate's own files.
cargo build-ptx --coverage "$folder/coverage" --missed | tee coverage.log
grep -qE '^vector_add .* 100\.0$' coverage.log || fail 'the tests of vector_add miss lines of it'
# Its tests notice single faults in its PTX.
settings=(CARGO_TARGET_DIR="$CARGO_TARGET_DIR" CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0)
if [[ ${RUSTUP_TOOLCHAIN-} ]]; then settings+=(RUSTUP_TOOLCHAIN="$RUSTUP_TOOLCHAIN"); fi
(
    cd "$root"
    unset CARGO_TARGET_DIR CARGO_PROFILE_DEV_DEBUG CARGO_INCREMENTAL RUSTUP_TOOLCHAIN
    cargo xtask mutate --ptx "$folder/copy/ptx/own_kernels.sm_80.ptx" --only exchange/release --at-least 1 -- \
        env "${settings[@]}" cargo test --quiet --manifest-path "$folder/copy/Cargo.toml"
)

# Dynamic shared memory that the attribute does not name; and code that does not compile.
cp src/softmax.rs softmax.rs.kept
sed -i 's/ shared = RowScratch::BYTES + columns \* 4,//' src/softmax.rs
if cargo build-ptx >shared.log 2>&1; then fail 'a kernel without `shared` builds'; fi
grep -q '`softmax` uses dynamic shared memory' shared.log || fail "$(cat shared.log)"
sed -i 's/let _ = rows;/let _ = row;/' src/softmax.rs
if cargo build-ptx >compile.log 2>&1; then fail 'a kernel with an unknown name builds'; fi
grep -q 'cannot find value `row`' compile.log || fail "$(cat compile.log)"
if grep -q 'RUSTC_BOOTSTRAP' compile.log; then fail 'the command stands behind a compile error'; fi
mv softmax.rs.kept src/softmax.rs

# An edit that was not built yet.
sed -i 's/a.ld(i) + b.ld(i)/a.ld(i) - b.ld(i)/' src/vector_add.rs
if cargo test vectors >edited.log 2>&1; then fail 'the test passes with PTX of another source'; fi
grep -q 'run `cargo build-ptx`' edited.log || fail "$(cat edited.log)"
if cargo build-ptx --check >/dev/null 2>&1; then fail 'a stale PTX passes the check'; fi

# The tutorial: the crate that its text gives, for the template's architecture, as its last section says. It takes the template's folder
# and the builder's builds there: the builder names folder and architecture in the compiler's flags, so that `core` for the GPU would be
# compiled once more for others.
mv "$folder/copy" "$folder/template"
cargo new --quiet --lib --vcs none --name scale "$folder/copy"
cd "$folder/copy"
mkdir target
mv "$folder/template/target/ptx" target/ptx
mkdir tests
python3 - "$root/docs/OWN-KERNELS.md" <<'END'
import re, sys

blocks = re.findall(r"^```(\w+)\n(.*?)^```$", open(sys.argv[1]).read(), re.S | re.M)
rust = [text for language, text in blocks if language == "rust"]
assert len(rust) == 2, f"{len(rust)} programs: a kernel and its test were expected"
assert "scale.sm_90.ptx" in rust[0]
open("src/lib.rs", "w").write(rust[0].replace("sm_90", "sm_80"))
open("tests/smooth.rs", "w").write(rust[1])
profile = [text for language, text in blocks if language == "toml"]
arch = [text for language, text in blocks if language == "text" and "package.metadata.ptx" in text]
assert len(arch) == 1, f"{len(arch)} ways to name the architecture: one was expected"
open("Cargo.toml", "a").write("\n".join(["", *profile, *arch]))
END
sed -i 's/^opt-level = 3$/opt-level = 1/' Cargo.toml
# The same for the kernel of docs/KERNELS.md, whose crate is this repository's.
python3 - "$root/docs/KERNELS.md" <<'END'
import re, sys, textwrap

blocks = re.findall(r"^ *```rust\n(.*?)^ *```$", open(sys.argv[1]).read(), re.S | re.M)
kernel, test = [textwrap.dedent(block) for block in blocks][:2]
shipped = "Kernel::shipped::<AddBias>(&device, 0)"
assert "use crate::simt::*;" in kernel and shipped in test
open("src/add_bias.rs", "w").write(kernel.replace("use crate::simt::*;", "use epoxide_simt::*;"))
uses = """use epoxide::TypedTensor;
use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::driver::{Module, Stream};
use epoxide_vgpu::for_each_seed;
use scale::add_bias::AddBias;

"""
of_module = "Module::load(&device, scale::PTX).unwrap().kernel(AddBias::INFO.name, 0)"
open("add_bias_test.rs", "w").write(uses + test.replace(shipped, of_module))
END
patches epoxide-macros epoxide-simt epoxide-vgpu >>Cargo.toml
# The lines of the tutorial, for the registry.
sed -i "s/^\[dependencies\]$/[dependencies]\nepoxide-simt = \"$version\"\n\n[dev-dependencies]\nepoxide-vgpu = \"$version\"/" Cargo.toml
cp ../template/Cargo.lock .
# A second kernel, in a file of its own. No list has it: Rust's `mod` is enough for the builder, its lints and the single faults.
cat >src/doubled.rs <<'END'
//! Doubles numbers.

use epoxide_simt::*;

const FACTOR: u32 = include!("../factor.in");

/// `out[i] = 2 * x[i]` for an even number of elements.
#[kernel(threads = 256, requires(len >= 1))]
pub unsafe fn doubled(x: Global<u32>, out: Global<u32>, mut len: u32) {
    len -= len % 2;
    grid_stride!(i in 0..len => { out.st(i, FACTOR * x.ld(i)) });
}

/// `out[row]` is the sum of 32 numbers: each warp has a row.
#[kernel(threads = 256, block = 256, grid = rows.div_ceil(8), requires(rows >= 1, rows <= 1 << 24))]
pub unsafe fn row_sums(x: Global<f32>, out: Global<f32>, rows: u32) {
    let row = (ctaid() * 256 + tid()) / 32;
    if row < rows {
        let sum = warp_sum_f32(x.ld(row_major(row, 32, laneid())));
        if laneid() == 0 {
            out.st(row, sum);
        }
    }
}

/// `out[lane]` is the largest of 32 numbers as that lane gets it.
#[kernel(threads = 32, block = 32, grid = 1)]
pub unsafe fn largest(x: Global<f32>, out: Global<f32>) {
    out.st(laneid(), warp_max_f32(x.ld(laneid())));
}
END
cat >tests/largest.rs <<'END'
use epoxide_simt::Global;
use epoxide_vgpu::{GridConfig, Machine, Module};
use scale::PTX;
use scale::doubled::Largest;

#[test]
fn lanes_agree_on_the_larger_of_two_zeros() {
    let module = Module::parse(PTX).unwrap();
    let mut machine = Machine::checked(1, 1);
    let x: Vec<f32> = (0..32).map(|lane| [-0.0, -1.0, 0.0][lane % 3]).collect();
    let (from, out) = (machine.upload(0, "x", &x).unwrap(), machine.alloc::<f32>(0, "out", 32).unwrap());
    let call = Largest::call(Global::new(from.addr()), Global::new(out.addr())).unwrap();
    machine.launch(0, &module, call.name(), GridConfig::new(1, 32, 0), call.param()).unwrap();
    machine.run().unwrap();
    let bits: Vec<u32> = out.download().unwrap().into_iter().map(f32::to_bits).collect();
    assert_eq!(bits, [0; 32]);
}
END
printf '2\n' >factor.in
printf '\npub mod add_bias;\npub mod doubled;\n' >>src/lib.rs
cargo build-ptx
grep -q '^\.visible \.entry doubled(' ptx/scale.sm_80.ptx || fail 'the second kernel was not built'
grep -q '^// kernel doubled: threads=256 ' ptx/scale.sm_80.ptx || fail 'the PTX does not describe the second kernel'
# A check finds an edit of a file that Rust includes, and one of the PTX itself; and it never ends well with a compiler that is missing.
grep -qx '// file: factor.in' ptx/scale.sm_80.ptx || fail 'the header does not name the included file'
printf '3\n' >factor.in
if cargo build-ptx --check >check.log 2>&1; then fail 'an edit of an included file passes the check'; fi
grep -q 'is stale: the kernel sources' check.log || fail "$(cat check.log)"
printf '2\n' >factor.in
cp ptx/scale.sm_80.ptx scale.kept
sed -i 's/mul.rn.f32/add.rn.f32/' ptx/scale.sm_80.ptx
if cargo build-ptx --check >check.log 2>&1; then fail 'an edited PTX passes the check'; fi
grep -q 'its text was edited' check.log || fail "$(cat check.log)"
cp scale.kept ptx/scale.sm_80.ptx
# With another compiler than the header names, no rebuild can be compared.
sed -i 's#^// compiler: .*#// compiler: rustc 1.94.0#' ptx/scale.sm_80.ptx
code=0
cargo build-ptx --check >check.log 2>&1 || code=$?
((code == 77)) || fail "a check with another compiler ends with $code: $(cat check.log)"
mv scale.kept ptx/scale.sm_80.ptx
if EPOXIDE_KERNEL_RUSTC=/typo cargo build-ptx --check >check.log 2>&1; then fail 'a check without the compiler that is named passes'; fi
grep -q 'EPOXIDE_KERNEL_RUSTC' check.log || fail "$(cat check.log)"
# A dependency that needs std: the error says where it belongs.
cargo new --quiet --lib --vcs none "$folder/host-only"
printf 'pub use std::vec::Vec;\n' >"$folder/host-only/src/lib.rs"
cp Cargo.toml Cargo.toml.kept
sed -i "s#^\[dependencies\]\$#[dependencies]\nhost-only = { path = \"$folder/host-only\" }#" Cargo.toml
if cargo build-ptx >std.log 2>&1; then fail 'a dependency with std builds for the GPU'; fi
grep -q 'compiled for the GPU too: host-only' std.log || fail "$(cat std.log)"
sed "/^host-only/d" Cargo.toml >Cargo.toml.without
printf '\n[target.%scfg(not(target_arch = "nvptx64"))%s.dependencies]\nhost-only = { path = "%s" }\n' "'" "'" "$folder/host-only" \
    | cat Cargo.toml.without - >Cargo.toml
cargo build-ptx
mv Cargo.toml.kept Cargo.toml
# PTX for another architecture, of earlier sources, is named.
sed 's#^// sources: .*#// sources: 00#' ptx/scale.sm_80.ptx >ptx/scale.sm_90.ptx
cargo build-ptx 2>&1 | tee other.log
grep -q '^warning: ptx/scale.sm_90.ptx is of other sources' other.log || fail 'earlier PTX for other GPUs is not named'
rm ptx/scale.sm_90.ptx
(
    cd "$root"
    unset CARGO_TARGET_DIR CARGO_PROFILE_DEV_DEBUG CARGO_INCREMENTAL RUSTUP_TOOLCHAIN
    cargo xtask mutate --list --only smooth/ --ptx "$folder/copy/ptx/scale.sm_80.ptx"
) | tee faults.log
grep -q 'smooth/block-barrier-dropped' faults.log || fail 'mutate knows no fault of a kernel that no list has'
cargo test 2>&1 | tee test.log
grep -q '^test neighbours_are_summed ... ok' test.log || fail 'the tutorial has another test'
grep -q '^test lanes_agree_on_the_larger_of_two_zeros ... ok' test.log || fail 'lanes got other maxima, or the test did not run'
if grep '^warning' test.log; then fail 'the tutorial has warnings'; fi

# The lines for the crate `epoxide`, on a virtual GPU in the place of CUDA's, and the test of docs/KERNELS.md.
sed -i "s/^\[dev-dependencies\]$/[dev-dependencies]\nepoxide = \"$version\"/" Cargo.toml
for package in epoxide-gpu epoxide-base epoxide-group epoxide; do
    printf '%s = { path = "%s" }\n' "$package" "$folder/packages/$package-$version"
done >>Cargo.toml
# The versions that the crate is tested with.
cp "$root/Cargo.lock" .
mv add_bias_test.rs tests/add_bias.rs
python3 - "$root/docs/OWN-KERNELS.md" <<'END'
import re, sys

blocks = re.findall(r"^```rust,ignore\n(.*?)^```$", open(sys.argv[1]).read(), re.S | re.M)
assert len(blocks) == 1, f"{len(blocks)} blocks for the crate epoxide: one was expected"
stream = "let stream = Stream::new(&device)?;\n"
tensors = """let len = 1000;
let x = TypedTensor::from_host(&stream, &[1000], &[1f32; 1000])?;
let out = TypedTensor::from_host(&stream, &[1000], &[0f32; 1000])?;
"""
assert stream in blocks[0]
open("tests/times.rs", "w").write("""use epoxide::TypedTensor;
use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::driver::{Device, Event, Module, Stream};
use scale::Smooth;

struct CudaDevice;

impl CudaDevice {
    fn open(ordinal: u32) -> epoxide::Result<Device> {
        Ok(VirtualGpu::new(VirtConfig { ordinal, ..VirtConfig::default() }))
    }
}

#[test]
fn a_launch_is_timed() -> epoxide::Result<()> {
""" + blocks[0].replace(stream, stream + tensors) + """
assert!(begin.elapsed_ms(&end)? > 0.0);
assert_eq!(out.values(&stream)?[..3], [1.0, 1.5, 1.5]);
Ok(())
}
""")
END
cargo test --test times --test add_bias 2>&1 | tee test.log
if grep '^warning' test.log; then fail 'the pages on kernels have warnings'; fi
# That takes a minute of a processor, and gives the same.
if grep 'Compiling epoxide-vgpu ' test.log; then
    fail 'the virtual GPU is compiled once more: Cargo.lock here and in examples/own-kernels name other versions of what it needs'
fi

# One of the template's tests for a GPU, with the driver of virtual GPUs: a row takes more shared memory than a launch has without
# asking. The repository's tests build the driver, and another one takes a minute.
driver=$root/target/release/deps/libepoxide_vgpu_cuda.so
if [[ ! -e $driver ]]; then
    package=$folder/packages/epoxide-vgpu-cuda-$version
    {
        patches epoxide-vgpu
        printf '\n[profile.dev.package.epoxide-vgpu]\nopt-level = 3\n'
    } >>"$package/Cargo.toml"
    cargo build --quiet --manifest-path "$package/Cargo.toml"
    driver=$CARGO_TARGET_DIR/debug/libepoxide_vgpu_cuda.so
fi
mkdir "$folder/driver"
cp "$driver" "$folder/driver/libcuda.so.1"
cd "$folder/template"
sed -i 's/a.ld(i) - b.ld(i)/a.ld(i) + b.ld(i)/' src/vector_add.rs
LD_LIBRARY_PATH=$folder/driver cargo test --features cuda --test kernels softmax
printf 'the template and the tutorial stand alone\n'
