#!/bin/sh
# In a VM: runs a program, and takes the cable of VM 0 out for two seconds: outage.sh AFTER_SECONDS PROGRAM ARGUMENTS.. Fails where
# the program ends before the cable is out.
after=$1
shift
"$@" &
program=$!
if [ "$EPOXIDE_VM" = 0 ]; then
    sleep "$after"
    kill -0 $program || { echo "the program has ended before the cable is out"; exit 1; }
    wire down; echo "the cable is out"
    sleep 2
    wire up; echo "the cable is in again"
fi
wait $program
