#!/bin/sh
# In a VM: runs a program over wires that lose and reorder packets: lossy.sh 'NETEM SETTINGS' PROGRAM ARGUMENTS..
settings=$1
shift
# The two ends know each other's addresses beforehand. A card asks for one a few times and gives up when
# all of that is lost; the loss is for the puts.
ip neigh replace 192.168.77.2 lladdr "$(cat /sys/class/net/wire1/address)" dev wire0 nud permanent || exit 1
ip neigh replace 192.168.77.1 lladdr "$(cat /sys/class/net/wire0/address)" dev wire1 nud permanent || exit 1
for wire in /sys/class/net/wire*; do
    # Unquoted: netem's settings are several words.
    tc qdisc add dev "${wire##*/}" root netem $settings || exit 1
done
"$@"
code=$?
tc -s qdisc show | awk '/Sent .* pkt/ && $7 != "0," && /dropped/ { sub(",", "", $7); print "packets sent: " $4 ", lost: " $7 }'
exit $code
