#!/bin/sh
# machine_init.sh ROOT HOSTNAME BIND…: the inside of a Machine (machine.py). In namespaces of its own it makes a root directory whose changes
# are lost with it, and becomes systemd there. ROOT: an empty directory. BIND: OUTSIDE:INSIDE, a directory that is the same there.
set -eu
root=$1
name=$2
shift 2
mount --make-rprivate /
mount -t tmpfs -o mode=755 holdfast-machine "$root"
mkdir "$root/upper" "$root/work" "$root/root"
mount -t overlay -o "lowerdir=/,upperdir=$root/upper,workdir=$root/work" holdfast-machine "$root/root"
root=$root/root

mount -t proc proc "$root/proc"
# The kernel's own settings are those of the machine outside: systemd, which would set some, may not.
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/sys/fs/cgroup"
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
  mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
else
  mkdir "$root/sys/fs/cgroup/systemd" "$root/sys/fs/cgroup/devices"
  mount -t cgroup -o none,name=systemd cgroup "$root/sys/fs/cgroup/systemd"
  mount -t cgroup -o devices cgroup "$root/sys/fs/cgroup/devices"
fi
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for device in null:3 zero:5 full:7 random:8 urandom:9; do
  mknod -m 666 "$root/dev/${device%:*}" c 1 "${device#*:}"
done
# Of its own: systemd empties it, which takes seconds of each machine where this one's holds much.
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mkdir -p "$root/run/lock"
for bind; do
  mkdir -p "$root${bind#*:}"
  mount --bind "${bind%%:*}" "$root${bind#*:}"
done

# No units of this machine's, and of systemd's own no more than a unit that is installed needs to start.
mount -t tmpfs -o mode=755 tmpfs "$root/etc/systemd/system"
for target in sysinit basic machine; do
  printf '[Unit]\nDescription=%s\nDefaultDependencies=no\n' "$target" >"$root/etc/systemd/system/$target.target"
done
# Nor an index of all manual pages, which would take two seconds of each installation.
rm -f "$root/var/lib/man-db/auto-update"
echo "$name" >"$root/etc/hostname"
printf '127.0.0.1 localhost\n10.99.0.1 %s\n' "$name" >"$root/etc/hosts"
hostname "$name"
ip link set lo up
# An address of its own: the resolver finds none for a host that has but a loopback.
ip link add eth0 type veth peer name switch0
ip address add 10.99.0.1/24 dev eth0
ip link set eth0 up
ip link set switch0 up
cd "$root"
mkdir -p mnt/outside
pivot_root . mnt/outside
umount -l /mnt/outside
rmdir /mnt/outside
mount --make-rshared /
export container=holdfast-test
exec /lib/systemd/systemd --system --unit=machine.target --log-target=console --log-level=info --show-status=no
