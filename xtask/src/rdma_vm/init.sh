#!/bin/sh
# /init of the Soft-RoCE test VM. Kernel command line: rdma.vm=I rdma.vms=N rdma.devices=D rdma.timeout=S.
# Makes devices rxe0.. over network interfaces wire0.., runs /test/run, prints its exit code and powers off.
export PATH=/usr/bin:/bin HOME=/root
/bin/busybox --install -s /bin 2>/dev/null    # /bin/sh is dash: busybox's own would run its ip and tc, which lack netem
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm; mount -t devpts devpts /dev/pts; mount -t tmpfs shm /dev/shm; mount -t tmpfs tmp /tmp
argument() { sed -n "s/.*\brdma\.$1=\([^ ]*\).*/\1/p" /proc/cmdline; }
vm=$(argument vm) vms=$(argument vms) devices=$(argument devices)
finish() { sync; echo; echo "RDMA-VM-EXIT $1"; sleep 0.1; poweroff -f; }
# Outlives nobody: the machine that started this one may be gone.
(sleep "$(argument timeout)"; poweroff -f) >/dev/null 2>&1 &
ulimit -l unlimited; ulimit -c 0; ulimit -n 65536
for module in /lib/modules/*.ko; do
  case $module in *-dummy.ko) options=numdummies=0;; *) options=;; esac
  insmod "$module" $options || { echo "insmod $module failed"; finish vm; }
done
ip link set lo up; hostname "vm$vm"; echo "127.0.0.1 localhost vm$vm" > /etc/hosts
export EPOXIDE_VM="$vm" EPOXIDE_VMS="$vms" VM_DEVICES="$devices"
# `network`: makes the interfaces and the RDMA devices, or makes them anew, with nothing left of what a test has set.
cat > /usr/bin/network <<'END'
#!/bin/sh
for device in /sys/class/infiniband/rxe*; do [ ! -e "$device" ] || rdma link delete "${device##*/}" || exit; done
if [ "$VM_DEVICES" = 2 ]; then
  # Two ends of one wire in one machine. Without these rules its kernel would take the short way, through lo, where no rxe is.
  [ ! -e /sys/class/net/wire0 ] || ip link delete wire0
  ip link add wire0 type veth peer name wire1
  for i in all wire0 wire1; do
    echo 1 > /proc/sys/net/ipv4/conf/$i/accept_local
    echo 0 > /proc/sys/net/ipv4/conf/$i/rp_filter
    echo 1 > /proc/sys/net/ipv4/conf/$i/arp_ignore
  done
  for i in 0 1; do ip link set wire$i mtu 9000 up; ip addr add 192.168.77.$((i + 1))/32 dev wire$i; done
  ip route add 192.168.77.2 dev wire0 src 192.168.77.1 table 101
  ip route add 192.168.77.1 dev wire1 src 192.168.77.2 table 101
  if [ ! -e /run/rules ]; then
    ip rule add pref 10 iif lo to 192.168.77.0/24 from 192.168.77.0/24 lookup 101
    ip rule add pref 20 lookup local; ip rule del pref 0 lookup local
    : > /run/rules
  fi
else
  if [ -e /sys/class/net/wire0 ]; then
    tc qdisc del dev wire0 clsact 2>/dev/null; tc qdisc del dev wire0 root 2>/dev/null
    ip link set wire0 down; ip addr flush dev wire0
  elif [ "$EPOXIDE_VMS" = 1 ]; then ip link add wire0 type dummy
  else ip link set "$(ls /sys/class/net | grep -v lo)" name wire0
  fi
  ip link set wire0 mtu 9000 up; ip addr add 192.168.77.$((EPOXIDE_VM + 1))/24 dev wire0
  # The way out, by which a program finds the address that others reach it by.
  [ "$EPOXIDE_VMS" = 1 ] || ip route add default dev wire0
fi
i=0; while [ $i -lt "$VM_DEVICES" ]; do rdma link add rxe$i type rxe netdev wire$i || exit; i=$((i + 1)); done
END
# `wire down|up`: the cable out and in. Not by the interface's state: with that down there is no route, and rxe gives up at once.
cat > /usr/bin/wire <<'END'
#!/bin/sh
[ "$1" = down ] || exec tc qdisc del dev wire0 clsact
tc qdisc add dev wire0 clsact &&
  for way in ingress egress; do tc filter add dev wire0 $way matchall action trap || exit; done    # trap: lost, and nobody told
END
chmod 755 /usr/bin/wire /usr/bin/network
network || finish vm
[ -e /dev/infiniband/uverbs0 ] || { echo "no /dev/infiniband/uverbs0"; finish vm; }
[ "$vms" = 1 ] || export RANK="$vm" WORLD_SIZE="$vms" LOCAL_RANK=0 MASTER_ADDR=192.168.77.1 MASTER_PORT=29500
cd /test; ./run; code=$?
[ $code = 0 ] || { echo "-- last words of the kernel:"; dmesg | tail -n 8; }
finish $code
