#!/usr/bin/env bash
# Installs what the feature `rdma` builds with, where it is lacking: ibverbs-sys makes its bindings with cmake and libclang, and links
# to the system's libibverbs. The virtual machines of tests/rdma/run.sh need no installation.
set -euo pipefail

packages=(cmake pkg-config clang libclang-dev libibverbs-dev libnl-3-dev libnl-route-3-dev)
# Any python3 will do, such as one of pyenv.
command -v python3 >/dev/null || packages+=(python3)
missing=()
for package in "${packages[@]}"; do
    dpkg-query --show --showformat '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
if ((${#missing[@]})); then
    printf 'installing %s\n' "${missing[*]}"
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends "${missing[@]}"
fi
