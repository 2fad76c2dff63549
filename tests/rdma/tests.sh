#!/bin/sh
# In a VM: runs the tests of a list, one after the other: tests.sh LIST. A line of the list is NAME SECONDS COMMAND.., where the
# command is shell. Each test finds the network and the RDMA devices made anew, and no process of the test before. Several VMs run the
# same list and begin each test together. The exit code is 1 where a test failed.
list=$1
failed=0
# The processes of a test are those that run in this folder.
kill_processes() {
    for process in /proc/[0-9]*; do
        pid=${process##*/}
        if [ "$pid" != 1 ] && [ "$pid" != $$ ] && [ "$(readlink "$process/cwd")" = "$PWD" ]; then kill -9 "$pid" 2>/dev/null; fi
    done
}
# Waits until all VMs are here. VM 0 has a port for each of the others.
meet() {
    [ "$EPOXIDE_VMS" != 1 ] || return 0
    if [ "$EPOXIDE_VM" = 0 ]; then
        other=1
        while [ $other -lt "$EPOXIDE_VMS" ]; do
            timeout 400 nc -l -p $((7000 + other)) </dev/null >/dev/null || return
            other=$((other + 1))
        done
    else
        tries=0
        until nc -w 2 192.168.77.1 $((7000 + EPOXIDE_VM)) </dev/null >/dev/null 2>&1; do
            [ $tries -lt 2000 ] || return
            tries=$((tries + 1))
            sleep 0.2
        done
    fi
}
first=1
while read -r name seconds command; do
    if [ $first = 0 ]; then network || exit; fi
    first=0
    meet || { echo "the other VMs do not reach the test $name"; exit 1; }
    echo; echo "--- $name"
    # In seconds and hundredths since the boot.
    start=$(cut -d ' ' -f 1 /proc/uptime)
    timeout -s KILL "$seconds" sh -c "$command" </dev/null
    code=$?
    kill_processes
    took=$(echo "$(cut -d ' ' -f 1 /proc/uptime) - $start" | bc)
    if [ $code = 0 ]; then
        echo "--- $name: passed, $took s"
    else
        echo "--- $name: FAILED with exit code $code, $took s"
        echo "-- last words of the kernel:"; dmesg | tail -n 8
        failed=1
    fi
done <"$list"
exit $failed
