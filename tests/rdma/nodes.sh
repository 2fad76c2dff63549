#!/bin/sh
# In a VM: `epoxide` ARGUMENTS.. on two nodes of RANKS ranks: nodes.sh RANKS ARGUMENTS.. One of two VMs is one node; a VM alone is
# both, each with a device of its own, and both devices must have carried packets; with CARDS=2 each node's ranks have both devices, in
# opposite orders since a device reaches only the other one, and there must have been connections of each rank on each device.
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
first=rxe0 second=rxe1
if [ "${CARDS:-1}" = 2 ]; then
    first=rxe0,rxe1 second=rxe1,rxe0
    while sleep 0.2; do rdma resource show qp; done >/tmp/connections 2>&1 &
    watching=$!
fi
EPOXIDE_RDMA_DEVICE=$second launch 1 127.0.0.1:29500 "$@" &
other=$!
EPOXIDE_RDMA_DEVICE=$first launch 0 127.0.0.1:29500 "$@"
first=$?
wait $other
second=$?
echo "packets sent: rxe0 $(sent 0), rxe1 $(sent 1)"
if [ "${CARDS:-1}" = 2 ]; then
    kill $watching
    # Device and process of every connection.
    used=$(awk '/type RC state RTS/ { for (i = 1; i < NF; i++) if ($i == "pid") print $2, $(i + 1) }' /tmp/connections | sort -u | wc -l)
    echo "devices of ranks: $used, of $((2 * 2 * ranks))"
    [ "$used" = $((2 * 2 * ranks)) ] || exit 1
fi
[ $first = 0 ] && [ $second = 0 ] && [ "$(sent 0)" -ge 100 ] && [ "$(sent 1)" -ge 100 ]
