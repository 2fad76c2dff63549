#!/usr/bin/env bash
# On a machine with a GPU and nvcc: the template's tests, its times, those of times.cu, and one table of
# both. Rust is not needed there.
#
#     comparison/run.sh TESTS TIMES [FOLDER]
#
# TESTS and TIMES are the programs that
#     cargo test --release --features cuda --no-run
#     cargo build --release --features cuda --example times
# build (tests/kernels.rs and examples/times.rs), also as .gz; FOLDER takes what the script makes.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
folder=${3:-$(mktemp -d)}
mkdir -p "$folder"

program() {
    case $1 in
    *.gz) gzip -dc "$1" >"$folder/$2" ;;
    *) cp "$1" "$folder/$2" ;;
    esac
    chmod +x "$folder/$2"
}
program "$1" tests
program "$2" rust
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
"$nvcc" -O3 -std=c++17 -arch=native -o "$folder/cuda" "$here/times.cu"

"$folder/tests"

# Three rounds by turns, and the best of each: the clocks of a GPU change.
for round in 1 2 3; do
    "$folder/rust" >"$folder/rust.$round"
    "$folder/cuda" >"$folder/cuda.$round"
done
printf '\n%-20s %-16s %12s %16s %12s %16s %8s\n' kernel size 'Rust us' '' 'C++ us' '' 'Rust/C++'
awk -F'\t' '
    { own = FILENAME ~ /rust\.[0-9]$/; key = $1 "\t" $2 }
    !(key in seen) { seen[key] = ++count; keys[count] = key }
    own && (!(key in rust) || $3 + 0 < rust[key] + 0) { rust[key] = $3; rust_rate[key] = $4 }
    !own && (!(key in cuda) || $3 + 0 < cuda[key] + 0) { cuda[key] = $3; cuda_rate[key] = $4 }
    END {
        for (n = 1; n <= count; n++) {
            key = keys[n]
            split(key, name, "\t")
            printf "%-20s %-16s %12s %16s %12s %16s %8.3f\n", name[1], name[2], rust[key], rust_rate[key],
                cuda[key], cuda_rate[key], rust[key] / cuda[key]
        }
    }' "$folder"/rust.[123] "$folder"/cuda.[123]
