#!/bin/sh
# In a VM: runs a program over wires that lose and reorder packets: lossy.sh 'NETEM SETTINGS' PROGRAM ARGUMENTS..
settings=$1
shift
for wire in /sys/class/net/wire*; do
    # Unquoted: netem's settings are several words.
    tc qdisc add dev "${wire##*/}" root netem $settings || exit 1
done
"$@"
code=$?
tc -s qdisc show | awk '/Sent .* pkt/ && $7 != "0," && /dropped/ { sub(",", "", $7); print "packets sent: " $4 ", lost: " $7 }'
exit $code
