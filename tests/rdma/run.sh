#!/usr/bin/env bash
# The verbs transport on a real verbs stack, Soft-RoCE in virtual machines: right results, faults, bandwidth. Non-zero where anything
# fails; 77 where this machine cannot have the VMs. With arguments, only the tests of those names.
#
#     tests/rdma/setup.sh && tests/rdma/run.sh
set -uo pipefail
cd "$(dirname "$0")/../.."

cargo build --release --package epoxide --features rdma --bin epoxide --example rdma_probe || exit 1
bin=${CARGO_TARGET_DIR:-target}/release
probe=$bin/examples/rdma_probe
only=("$@")
passed=0
failed=()

# check NAME OPTIONS OF RDMA-VM..: runs one test.
check() {
    local name=$1 code start=$SECONDS
    shift
    if ((${#only[@]})) && [[ " ${only[*]} " != *" $name "* ]]; then return; fi
    printf '\n--- %s\n' "$name"
    cargo xtask rdma-vm "$@"
    code=$?
    if ((code == 77)); then exit 77; fi
    if ((code == 0)); then
        passed=$((passed + 1))
        printf -- '--- %s: passed, %s s\n' "$name" $((SECONDS - start))
    else
        failed+=("$name")
        printf -- '--- %s: FAILED with exit code %s\n' "$name" $code
    fi
}

# A packet waits 67 ms for its acknowledgement instead of a second: lost ones are soon sent again.
quick=(--env EPOXIDE_RDMA_TIMEOUT=14)
# And is given up after half a second. (7 is "never" on Soft-RoCE.)
impatient=("${quick[@]}" --env EPOXIDE_RDMA_RETRY_COUNT=6)

check doctor --devices 2 -- "$bin/epoxide" doctor
check puts-one-device -- "$probe" puts --large
check puts-two-devices --devices 2 -- "$probe" puts --ranks 3 --large
check puts-two-vms --vms 2 -- "$probe" puts --large
check puts-four-vms --vms 4 --cpus 1 -- "$probe" puts --puts 50 --queues 1
check puts-small-mtu --devices 2 --env EPOXIDE_RDMA_PATH_MTU=1024 --env EPOXIDE_RDMA_QUEUE_DEPTH=4 -- "$probe" puts --puts 100
check loss --devices 2 "${quick[@]}" --with "$probe" -- tests/rdma/lossy.sh 'loss 5%' ./rdma_probe puts --puts 100
check reordering --devices 2 "${quick[@]}" --with "$probe" -- \
    tests/rdma/lossy.sh 'delay 1ms reorder 95%' ./rdma_probe puts --puts 100
check loss-and-reordering --vms 2 "${quick[@]}" --with "$probe" -- \
    tests/rdma/lossy.sh 'delay 1ms reorder 95% loss 5%' ./rdma_probe puts --puts 100 --timeout 100
check link-down-for-2-s --vms 2 "${quick[@]}" -- "$probe" link-down --puts 800
check link-down-for-good --vms 2 "${impatient[@]}" -- "$probe" link-lost
check link-down-for-good-until-the-deadline --vms 2 "${quick[@]}" -- "$probe" link-lost --timeout 20
check interface-down --vms 2 "${impatient[@]}" -- "$probe" interface-down
check wrong-key --devices 2 -- "$probe" wrong-key
check small-region --devices 2 -- "$probe" small-region
check peer-killed --devices 2 "${impatient[@]}" -- "$probe" peer-killed --ranks 3
check peer-killed-other-vm --vms 2 "${impatient[@]}" -- "$probe" peer-killed
check peer-killed-until-the-deadline --devices 2 -- "$probe" peer-killed --timeout 20
check bandwidth --devices 2 --with "$probe" -- tests/rdma/bandwidth.sh

printf '\n%s passed' "$passed"
if ((${#failed[@]})); then
    printf ', failed: %s\n' "${failed[*]}"
    exit 1
fi
printf '\n'
