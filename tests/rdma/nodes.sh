#!/bin/sh
# In a VM: `epoxide` ARGUMENTS.. on two nodes of RANKS ranks: nodes.sh RANKS ARGUMENTS.. One of two VMs is one node; a VM alone is
# both, each with a device of its own, and both devices must have carried packets.
ranks=$1
shift
sent() { cat "/sys/class/infiniband/rxe$1/ports/1/hw_counters/sent_pkts"; }
launch() {
    node=$1 endpoint=$2
    shift 2
    ./epoxide launch --nnodes 2 --node-rank "$node" --rdzv-endpoint "$endpoint" --nproc-per-node "$ranks" --no-prefix -- \
        ./epoxide "$@"
}
if [ "$EPOXIDE_VMS" != 1 ]; then
    launch "$EPOXIDE_VM" "$MASTER_ADDR:$MASTER_PORT" "$@"
    exit
fi
EPOXIDE_RDMA_DEVICE=rxe1 launch 1 127.0.0.1:29500 "$@" &
EPOXIDE_RDMA_DEVICE=rxe0 launch 0 127.0.0.1:29500 "$@"
first=$?
wait $!
second=$?
echo "packets sent: rxe0 $(sent 0), rxe1 $(sent 1)"
[ $first = 0 ] && [ $second = 0 ] && [ "$(sent 0)" -ge 100 ] && [ "$(sent 1)" -ge 100 ]
