#!/usr/bin/env bash
#
# Start a container in the namespaces of keep_image.sh: the image below a writable layer in memory that ends with it.
#
# Usage: start_container.sh PROGRAM WORK DISK_MIB FILES COMMAND...
#
#   PROGRAM  bwrap, or podman; podman needs namespaces of users and of processes that are this container's alone
#   WORK     as in keep_image.sh
#   FILES    how many files its writable layer may hold
#   COMMAND  starts the container on WORK/layer/root, with WORK/layer/shm as its /dev/shm; podman finds directories of its
#            own below /run

set -euo pipefail
shopt -s inherit_errexit

program=$1 work=$2 disk_mib=$3 files=$4
shift 4
layer="${work}/layer"
mount -t tmpfs -o "size=${disk_mib}m,nr_inodes=${files},mode=755" tmpfs "${layer}"
mkdir -- "${layer}/"{upper,work,root}
mkdir --mode=1777 -- "${layer}/shm"
mount -t overlay -o "userxattr,lowerdir=${work}/image,upperdir=${layer}/upper,workdir=${layer}/work" overlay \
  "${layer}/root"
if [[ ${program} == podman ]]; then
  mount -t tmpfs -o size=16m,mode=755 tmpfs /run
  mount -t tmpfs -o size=16m,mode=1777 tmpfs /dev/shm
  mkdir -- /run/{home,store,state,user}
  printf '[storage]\ndriver="vfs"\ngraphroot="/run/store"\nrunroot="/run/state"\n' >/run/storage.conf
fi
exec "$@"
