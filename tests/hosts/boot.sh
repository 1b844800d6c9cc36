#!/bin/bash
# The first process of one host: gives it a name, its own files and an address, then becomes its sshd.
#
#   boot.sh NAME ADDRESS STATE SSHD_CONFIG [MOUNT TARGET]...
#
# STATE has etc/ (files that replace those of /etc) and home/ (root's). Each MOUNT is bound over TARGET.
set -euo pipefail
name=$1 address=$2 state=$3 sshd_config=$4
shift 4

hostname "$name"
while [ $# -gt 0 ]; do
    mkdir -p "$2"
    mount --bind "$1" "$2"
    shift 2
done
# What two machines never share: process ids and sockets in /run, shared memory.
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd /run/home
mount -t tmpfs tmpfs /dev/shm
mount -t sysfs sysfs /sys # with this host's network devices
mount --bind "$state/home" /run/home
for file in "$state"/etc/*; do
    mount --bind "$file" "/etc/${file##*/}"
done

# The other end of the cable is put in from outside.
until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
ip link set lo up
ip address add "$address/24" dev eth0
ip link set eth0 up
cd /
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    /usr/sbin/sshd -D -e -f "$sshd_config"
