#!/usr/bin/env bash
#
# Start a container in the namespaces of keep_image.sh: the image below a writable layer in memory that ends with it.
#
# Usage: start_container.sh PROGRAM WORK DISK_MIB FILES SHELLS FILTER WORDS...
#
#   PROGRAM  bwrap, or podman; podman needs namespaces of users and of processes that are this container's alone
#   WORK     as in keep_image.sh
#   FILES    how many files its writable layer may hold
#   SHELLS   the directory that it sees read-only as /.shells
#   FILTER   a filter of system calls: the descriptor of a program for bwrap, a file of JSON for podman
#   WORDS    for bash, its first process

set -euo pipefail
shopt -s inherit_errexit

readonly IN_CONTAINER=(PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
  TERM=dumb)
readonly BASH_WORDS=(/bin/bash --noprofile --norc -c)

program=$1 work=$2 disk_mib=$3 files=$4 shells=$5 filter=$6
shift 6
layer="${work}/layer"
mount -t tmpfs -o "size=${disk_mib}m,nr_inodes=${files},mode=755" tmpfs "${layer}"
mkdir -- "${layer}/"{upper,work,root}
mkdir --mode=1777 -- "${layer}/shm"
mount -t overlay -o "userxattr,lowerdir=${work}/image,upperdir=${layer}/upper,workdir=${layer}/work" overlay \
  "${layer}/root"

if [[ ${program} == bwrap ]]; then
  words=(--unshare-all --unshare-user --as-pid-1 --cap-drop ALL --die-with-parent --new-session --seccomp "${filter}")
  words+=(--hostname task --bind "${layer}/root" / --proc /proc --dev /dev --bind "${layer}/shm" /dev/shm)
  words+=(--ro-bind "${shells}" /.shells --remount-ro /dev --chdir /)
  exec env -i "${IN_CONTAINER[@]}" bwrap "${words[@]}" -- "${BASH_WORDS[@]}" "$@"
fi

# What podman notes of its containers lies in memory, too, and ends with this one: it knows of no other. It is root here
# already, so it makes no user namespace of its own.
mount -t tmpfs -o size=16m,mode=755 tmpfs /run
mount -t tmpfs -o size=16m,mode=1777 tmpfs /dev/shm
mkdir -- /run/{home,store,state,user}
own=(PATH="${PATH}" HOME=/run/home XDG_RUNTIME_DIR=/run/user CONTAINERS_CONF=/dev/null)
own+=(CONTAINERS_STORAGE_CONF=/run/storage.conf _CONTAINERS_USERNS_CONFIGURED=done)
printf '[storage]\ndriver="vfs"\ngraphroot="/run/store"\nrunroot="/run/state"\n' >/run/storage.conf
words=(--root /run/store --runroot /run/state --tmpdir /run/state --storage-driver vfs --events-backend none)
words+=(--cgroup-manager cgroupfs --runtime runc --log-level error run --rm --interactive --quiet --log-driver none)
words+=(--network none --hostname task --no-hosts --cap-drop all --security-opt no-new-privileges)
words+=(--security-opt "seccomp=${filter}" --security-opt mask=/sys/fs/cgroup --cgroups no-conmon --pids-limit -1 --http-proxy=false --workdir /)
words+=(--mount "type=bind,source=${shells},destination=/.shells,readonly")
words+=(--mount "type=bind,source=${layer}/shm,destination=/dev/shm")
for variable in "${IN_CONTAINER[@]}"; do words+=(--env "${variable}"); done
exec env -i "${own[@]}" podman "${words[@]}" --rootfs "${layer}/root" "${BASH_WORDS[@]}" "$@"
