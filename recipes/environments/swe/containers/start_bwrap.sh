#!/usr/bin/env bash
#
# Start a container in the namespaces of keep_image.sh: the image below a writable layer in memory that ends with it.
#
# Usage: start_bwrap.sh WORK DISK_MIB FILES SHELLS FILTER WORDS...
#
#   WORK     as in keep_image.sh
#   FILES    how many files its writable layer may hold
#   SHELLS   the directory that it sees read-only as /.shells
#   FILTER   the descriptor of a filter of system calls
#   WORDS    for bash, its first process

set -euo pipefail
shopt -s inherit_errexit

work=$1 disk_mib=$2 files=$3 shells=$4 filter=$5
shift 5
layer="${work}/layer"
mount -t tmpfs -o "size=${disk_mib}m,nr_inodes=${files},mode=755" tmpfs "${layer}"
mkdir -- "${layer}/"{upper,work,root}
mkdir --mode=1777 -- "${layer}/shm"
mount -t overlay -o "userxattr,lowerdir=${work}/image,upperdir=${layer}/upper,workdir=${layer}/work" overlay \
  "${layer}/root"

words=(--unshare-all --unshare-user --as-pid-1 --cap-drop ALL --die-with-parent --new-session --seccomp "${filter}")
words+=(--hostname task --bind "${layer}/root" / --proc /proc --dev /dev --bind "${layer}/shm" /dev/shm)
words+=(--ro-bind "${shells}" /.shells --remount-ro /dev --chdir /)
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 TERM=dumb \
  bwrap "${words[@]}" -- /bin/bash --noprofile --norc -c "$@"
