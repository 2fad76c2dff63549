#!/bin/sh
# In a VM: puts of 1 MiB beside perftest's writes of 1 MiB over the same wire, in turns; the best of each counts, since whatever else
# the machine does only slows them down. Puts must reach 0.9 of perftest; a machine that is busy gets more rounds.
set -u
puts=150
perftest=0
ours=0
better() { awk -v a="$1" -v b="$2" 'BEGIN { print (a > b ? a : b) }'; }
for round in 1 2 3 4 5 6; do
    # GID 1 is the IPv4 address; perftest would take GID 0.
    ib_write_bw -d rxe0 -x 1 -s 1048576 -n $puts >/tmp/server 2>&1 &
    sleep 0.5
    rate=$(timeout 60 ib_write_bw -d rxe1 -x 1 -s 1048576 -n $puts 192.168.77.1 | awk '$1 == 1048576 { print $4 }')
    wait
    [ -n "$rate" ] || { cat /tmp/server; echo "ib_write_bw gave no figure"; exit 1; }
    perftest=$(better "$perftest" "$rate")
    out=$(./rdma_probe bandwidth --puts $puts) || { echo "$out"; exit 1; }
    mine=$(echo "$out" | awk '$1 == "bandwidth" { print $2 }')
    ours=$(better "$ours" "$mine")
    echo "round $round: ib_write_bw $rate MB/s, puts with counters $mine MB/s"
    if [ $round -ge 3 ] && awk -v a="$ours" -v b="$perftest" 'BEGIN { exit !(a >= 0.9 * b) }'; then break; fi
done
awk -v a="$ours" -v b="$perftest" 'BEGIN {
    printf "best: ib_write_bw %.1f MB/s, puts with counters %.1f MB/s: %.3f of it (at least 0.9)\n", b, a, a / b
    exit !(a >= 0.9 * b)
}'
