#!/usr/bin/env bash
# Installs what the interop tests talk to: PyTorch into target/torch-venv, and Open MPI's mpirun into the system.
# Does nothing where they are there already. Afterwards:
#     EPOXIDE_REQUIRE_INTEROP=1 cargo test --release --test interop
set -euo pipefail
cd "$(dirname "$0")/../.."

torch_version=2.15.0
venv=${EPOXIDE_TORCH_VENV:-target/torch-venv}

have_torch() {
    "$venv/bin/python" -W ignore -c "
import torch, torch.distributed
assert torch.__version__.split('+')[0] == '$torch_version', torch.__version__
assert torch.distributed.is_available()" 2>/dev/null
}

if ! have_torch; then
    printf 'installing torch %s into %s\n' "$torch_version" "$venv"
    python3 -m venv "$venv" || {
        # Debian has it in a package of its own.
        apt-get -qq update
        apt-get -qq install --yes --no-install-recommends python3-venv
        python3 -m venv --clear "$venv"
    }
    # Without a cache: the wheels are large, and needed once. Its CUDA libraries are linked to and must be there.
    "$venv/bin/python" -m pip install --quiet --no-cache-dir --disable-pip-version-check "torch==$torch_version"
    have_torch || {
        printf 'torch %s in %s does not import torch.distributed\n' "$torch_version" "$venv" >&2
        exit 1
    }
fi

if ! command -v mpirun >/dev/null; then
    printf 'installing openmpi-bin\n'
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends openmpi-bin
fi
"$venv/bin/python" -W ignore -c 'import torch; print("torch", torch.__version__)'
mpirun --version | head -n 1
