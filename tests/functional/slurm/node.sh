#!/usr/bin/env bash
#
# One node of a throw-away Slurm cluster: slurmd in namespaces of its own.
#
# Usage: node.sh start DIR NAME ADDRESS [SHARED...]   in the cluster's namespaces: make the node
#        node.sh init DIR NAME ADDRESS [SHARED...]    as the node's PID 1
#
# The node has its own host name, address, /tmp, /run and /dev/shm; of /tmp it shares the SHARED directories.

set -euo pipefail
shopt -s inherit_errexit

start() {
  local dir=$1 name=$2 pid='' tries
  local home="${dir}/nodes/${name}"
  mkdir -p "${home}/spool"
  rm -f -- "${home}/connected"
  setsid unshare --pid --net --mount --uts --ipc --fork --kill-child=KILL --mount-proc --propagation private \
    "${BASH_SOURCE[0]}" init "$@" </dev/null >>"${dir}/log/${name}.log" 2>&1 &
  local unshared=$!
  for ((tries = 0; tries < 500; tries++)); do
    pid=$(pgrep -P "${unshared}" || true)
    if [[ -n ${pid} && $(readlink "/proc/${pid}/ns/net") != "$(readlink /proc/self/ns/net)" ]]; then break; fi
    sleep 0.01
  done
  printf '%s\n' "${pid}" >"${home}/pid"
  ip link delete "to-${name}" 2>/dev/null || true # of the node's earlier life
  ip link add "to-${name}" type veth peer name eth0 netns "${pid}"
  ip link set "to-${name}" master br0 up
  touch "${home}/connected"
}

init() {
  local dir=$1 name=$2 address=$3 shared
  local -a octets=()
  shift 3
  local home="${dir}/nodes/${name}"
  hostname "${name}"
  until [[ -e ${home}/connected ]]; do sleep 0.01; done
  ip link set lo up
  # As in its earlier life: other nodes remember the address of its card for a minute.
  read -r -a octets <<<"${address//./ }"
  ip link set eth0 address "$(printf '02:00:%02x:%02x:%02x:%02x' "${octets[@]}")"
  ip addr add "${address}/24" dev eth0
  ip link set eth0 up
  mount -t tmpfs -o size=2g tmpfs /dev/shm
  mount -t tmpfs -o mode=755 tmpfs /run
  # Bind what is shared below the new /tmp before that covers the old one.
  mkdir -p "${home}/tmp"
  mount -t tmpfs -o mode=1777 tmpfs "${home}/tmp"
  for shared in "${dir}" "$@"; do
    [[ ${shared} == /tmp/* ]] || continue
    mkdir -p "${home}${shared}"
    mount --rbind "${shared}" "${home}${shared}"
  done
  mount --move "${home}/tmp" /tmp
  export SLURM_CONF="${dir}/etc/slurm.conf"
  cd / # tasks return to the directory that slurmd started in
  slurmd -N "${name}" -D &
  # The node stays up without its slurmd; bash reaps the orphans while it waits.
  while true; do
    sleep 3600 &
    wait "$!"
  done
}

case $1 in
  start | init) "$@" ;;
  *) exit 2 ;;
esac
