#!/usr/bin/env bash
# The verbs transport on a real verbs stack, Soft-RoCE in virtual machines: right results and
# faults. Exits with non-zero where anything fails, and with 77 where this machine cannot have the
# VMs. With arguments, only the tests of those names run.
#
# `tests/rdma/run.sh bandwidth` is a measurement and runs only where it is named. It fails where
# `bench wire` does not reach 0.9 of perftest, so run it on an idle machine.
#
#     tests/rdma/setup.sh && tests/rdma/run.sh [NAME..]
set -uo pipefail
cd "$(dirname "$0")/../.."

cargo build --release --features "${EPOXIDE_FEATURES:-rdma}" --bin epoxide --example rdma_probe || exit 1
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

# A packet waits 67 ms for its acknowledgement instead of half a second: lost ones are soon sent again.
quick=(--env EPOXIDE_RDMA_TIMEOUT=14)
# And is given up after half a second. (7 is "never" on Soft-RoCE.)
impatient=("${quick[@]}" --env EPOXIDE_RDMA_RETRY_COUNT=6)
# Small, for a virtual GPU on an emulated processor.
roundtrip=(roundtrip --transport verbs --timeout 120 --tokens 32 --hidden 256 --num-sms 8)
# A VM that is two nodes, or one of them.
nodes=(--timeout 300 --with "$bin/epoxide" -- tests/rdma/nodes.sh)

check doctor --devices 2 -- "$bin/epoxide" doctor

# Whole round trips: dispatch, combine and cached dispatch, every bit.
check roundtrip-two-devices --devices 2 "${nodes[@]}" 2 "${roundtrip[@]}" --nodes 2 --random --iterations 12
check roundtrip-fp8 --devices 2 "${nodes[@]}" 2 "${roundtrip[@]}" --nodes 2 --dtype fp8 --queues 3
check roundtrip-low-latency --devices 2 "${nodes[@]}" 2 roundtrip --mode low-latency --transport verbs --timeout 120 --tokens 16 --hidden 256 --num-sms 4 \
    --nodes 2 --random --iterations 10
check roundtrip-two-cards --devices 2 --env CARDS=2 "${nodes[@]}" 1 "${roundtrip[@]}" --nodes 2 --queues 2 --random --iterations 5
check roundtrip-two-vms --vms 2 "${nodes[@]}" 2 "${roundtrip[@]}" --nodes 2 --queues 2
check roundtrip-four-vms --vms 4 --cpus 1 -- "$bin/epoxide" "${roundtrip[@]}" --nodes 4
check roundtrip-loss --devices 2 "${quick[@]}" --with "$bin/epoxide" --with tests/rdma/nodes.sh -- \
    tests/rdma/lossy.sh 'loss 5%' ./nodes.sh 1 "${roundtrip[@]}" --nodes 2 --random --iterations 5
check roundtrip-reordering --devices 2 "${quick[@]}" --with "$bin/epoxide" --with tests/rdma/nodes.sh -- \
    tests/rdma/lossy.sh 'delay 1ms reorder 95%' ./nodes.sh 1 "${roundtrip[@]}" --nodes 2 --random --iterations 5
check roundtrip-link-down-for-2-s --vms 2 --with "$bin/epoxide" -- \
    tests/rdma/outage.sh 4 ./epoxide "${roundtrip[@]}" --nodes 2 --random --iterations 20

# A buffer whose peer is lost: errors inside the deadline, and the others go on.
check killed-in-dispatch --devices 2 -- "$probe" killed-in-dispatch --ranks 3
check killed-in-combine --devices 2 "${impatient[@]}" -- "$probe" killed-in-combine --ranks 3
check killed-in-combine-other-vm --vms 2 -- "$probe" killed-in-combine
check unplugged --vms 2 -- "$probe" unplugged

# Queues by themselves.
check puts-two-devices --devices 2 -- "$probe" puts --ranks 3 --large
check puts-two-vms --vms 2 -- "$probe" puts --large
check puts-small-mtu --devices 2 --env EPOXIDE_RDMA_PATH_MTU=1024 --env EPOXIDE_RDMA_QUEUE_DEPTH=4 -- "$probe" puts --puts 100
check loss-and-reordering --devices 2 "${quick[@]}" --with "$probe" -- \
    tests/rdma/lossy.sh 'delay 1ms reorder 95% loss 5%' ./rdma_probe puts --puts 100 --timeout 100
check link-down-for-2-s --vms 2 -- "$probe" link-down --puts 800
check link-down-for-good --vms 2 "${impatient[@]}" -- "$probe" link-lost
check interface-down --vms 2 "${impatient[@]}" -- "$probe" interface-down
check interrupted --vms 2 --env EPOXIDE_RDMA_QUEUE_DEPTH=4 -- "$probe" interrupted
check goodbye --devices 2 -- "$probe" goodbye
check wrong-key --devices 2 -- "$probe" wrong-key
check small-region --devices 2 -- "$probe" small-region
check peer-killed --devices 2 "${impatient[@]}" -- "$probe" peer-killed --ranks 3
if [[ " ${only[*]} " == *" bandwidth "* ]]; then
    check bandwidth --devices 2 --timeout 300 --with "$bin/epoxide" -- tests/rdma/bandwidth.sh
fi

if ((passed + ${#failed[@]} == 0)); then
    printf 'no test is called %s\n' "$*"
    exit 2
fi
printf '\n%s passed' "$passed"
if ((${#failed[@]})); then
    printf ', failed: %s\n' "${failed[*]}"
    exit 1
fi
printf '\n'
