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

bin=${CARGO_TARGET_DIR:-target}/release
probe=$bin/examples/rdma_probe
only=("$@")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# check VMS NAME SECONDS COMMAND..: adds a test to the list of these VMs. The command runs in each of
# them, in the folder of the files below.
names=() known=()
check() {
    local vms=$1 name=$2 seconds=$3
    shift 3
    known+=("$name")
    if ((${#only[@]})) && [[ " ${only[*]} " != *" $name "* ]]; then return; fi
    names+=("$name")
    printf '%s %s %s\n' "$name" "$seconds" "$(printf '%q ' "$@")" >>"$folder/$vms"
}

# run_list VMS COUNT OPTIONS OF RDMA-VM..: runs the list of COUNT machines, which boot once. A test
# has passed if each of them says so. Where the kernel of a machine crashes, the tests that have not
# passed run once more: Debian's rdma_rxe frees a queue whose packets still lie in the ring of an
# interface that is down (rxe_skb_tx_dtor). A crash that comes each time fails.
run_list() {
    local vms=$1
    if [[ ! -e $folder/$vms ]]; then return; fi
    boot_list "$@"
    take_passed "$@"
    if [[ -s $folder/$vms ]] && grep -aq 'Kernel panic' "$folder/$vms.log"; then
        printf '%s| the kernel of a VM has crashed: the tests that are left once more\n' "$vms"
        boot_list "$@"
        take_passed "$@"
    fi
}
# Takes the tests that all machines have passed from the list.
take_passed() {
    local vms=$1 count=$2 name rest
    while read -r name rest; do
        if (($(grep -aEc "^(vm[0-9]+\| )?--- $name: passed, " "$folder/$vms.log") == count)); then
            printf '%s\n' "$name" >>"$folder/passed"
        else
            printf '%s %s\n' "$name" "$rest"
        fi
    done <"$folder/$vms" >"$folder/$vms.left"
    mv "$folder/$vms.left" "$folder/$vms"
}
boot_list() {
    local vms=$1 count=$2
    shift 2
    cargo xtask rdma-vm --vms "$count" "$@" --name "$vms" --timeout 3600 --with "$bin/epoxide" --with "$probe" --with tests/rdma/nodes.sh \
        --with tests/rdma/lossy.sh --with tests/rdma/outage.sh --with tests/rdma/bandwidth.sh --with "$folder/$vms" \
        -- tests/rdma/tests.sh "$vms" 2>&1 | tee "$folder/$vms.log" | sed -u "s/^/$vms| /"
    if ((PIPESTATUS[0] == 77)); then : >"$folder/unavailable"; fi
}

# A packet waits 67 ms for its acknowledgement instead of half a second: lost ones are soon sent again.
quick=(env EPOXIDE_RDMA_TIMEOUT=14)
# And is given up after half a second. (7 is "never" on Soft-RoCE.)
impatient=("${quick[@]}" EPOXIDE_RDMA_RETRY_COUNT=6)
# Small, for a virtual GPU on an emulated processor.
roundtrip=(roundtrip --transport verbs --timeout 120 --tokens 32 --hidden 256 --num-sms 8)
check two-devices doctor 300 ./epoxide doctor

# Whole round trips: dispatch, combine and cached dispatch, every bit.
check two-devices roundtrip-two-devices 300 ./nodes.sh 2 "${roundtrip[@]}" --nodes 2 --random --iterations 4
check two-devices roundtrip-fp8 300 ./nodes.sh 2 "${roundtrip[@]}" --nodes 2 --dtype fp8 --queues 3
check two-devices roundtrip-low-latency 300 ./nodes.sh 2 roundtrip --mode low-latency --transport verbs --timeout 120 --tokens 16 --hidden 256 --num-sms 4 --nodes 2 --random --iterations 4
check two-devices roundtrip-two-cards 300 env CARDS=2 ./nodes.sh 1 "${roundtrip[@]}" --nodes 2 --queues 2 --random --iterations 3
check two-vms roundtrip-two-vms 300 ./nodes.sh 2 "${roundtrip[@]}" --nodes 2 --queues 2
check four-vms roundtrip-four-vms 600 ./epoxide "${roundtrip[@]}" --nodes 4
check two-devices roundtrip-loss 300 "${quick[@]}" ./lossy.sh 'loss 5%' ./nodes.sh 1 "${roundtrip[@]}" --nodes 2 --random --iterations 3
check two-devices roundtrip-reordering 300 "${quick[@]}" ./lossy.sh 'delay 1ms reorder 95%' ./nodes.sh 1 "${roundtrip[@]}" --nodes 2 --random --iterations 3
check two-vms roundtrip-link-down-for-2-s 300 ./outage.sh 4 ./epoxide "${roundtrip[@]}" --nodes 2 --random --iterations 20

# A buffer whose peer is lost: errors inside the deadline, and the others go on.
check two-devices killed-in-dispatch 300 ./rdma_probe killed-in-dispatch --ranks 3
check two-devices killed-in-combine 300 "${impatient[@]}" ./rdma_probe killed-in-combine --ranks 3
check two-vms killed-in-combine-other-vm 300 ./rdma_probe killed-in-combine
check two-vms unplugged 300 ./rdma_probe unplugged

# Queues by themselves.
check two-devices puts-two-devices 300 ./rdma_probe puts --ranks 3 --large --timeout 200
check two-vms puts-two-vms 300 ./rdma_probe puts --large --timeout 200
check two-devices puts-small-mtu 300 env EPOXIDE_RDMA_PATH_MTU=1024 EPOXIDE_RDMA_QUEUE_DEPTH=4 ./rdma_probe puts --puts 100 --timeout 200
check two-devices loss-and-reordering 300 "${quick[@]}" ./lossy.sh 'delay 1ms reorder 95% loss 5%' ./rdma_probe puts --puts 100 --timeout 100
check two-vms link-down-for-2-s 300 ./rdma_probe link-down --puts 160 --timeout 200
check two-vms link-down-for-good 300 "${impatient[@]}" ./rdma_probe link-lost
check two-vms interface-down 300 "${impatient[@]}" ./rdma_probe interface-down
check two-vms interrupted 300 env EPOXIDE_RDMA_QUEUE_DEPTH=4 ./rdma_probe interrupted
check two-devices goodbye 300 ./rdma_probe goodbye
check two-devices wrong-key 300 ./rdma_probe wrong-key
check two-devices small-region 300 ./rdma_probe small-region
check two-devices peer-killed 300 "${impatient[@]}" ./rdma_probe peer-killed --ranks 3
if [[ " ${only[*]} " == *" bandwidth "* ]]; then
    check two-devices bandwidth 300 ./bandwidth.sh
else
    known+=(bandwidth)
fi

for name in "${only[@]}"; do
    if [[ " ${known[*]} " != *" $name "* ]]; then
        printf 'no test is called %s; the tests: %s\n' "$name" "${known[*]}" >&2
        exit 2
    fi
done
cargo build --release --features "${EPOXIDE_FEATURES:-rdma}" --bin epoxide --example rdma_probe || exit 1
# One list at a time: beside another one, whose processors poll as well, a round trip takes four times as long.
run_list two-devices 1 --devices 2 --cpus 2
run_list two-vms 2
run_list four-vms 4 --cpus 1
if [[ -e $folder/unavailable ]]; then exit 77; fi
failed=()
for name in "${names[@]}"; do
    grep -qx -- "$name" "$folder/passed" 2>/dev/null || failed+=("$name")
done
printf '\n%s passed' $((${#names[@]} - ${#failed[@]}))
if ((${#failed[@]})); then
    printf ', failed: %s\n' "${failed[*]}"
    exit 1
fi
printf '\n'
