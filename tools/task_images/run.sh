#!/usr/bin/env bash
#
# Mount a SIF file without Apptainer, and start a jail on it. Its file system is read-only; what is written goes to a layer
# in memory that ends with the jail. The image is not trusted: it is mounted without any rights on this machine.
#
# Usage: as_nobody.sh WORK IMAGE INPUTS run.sh mount_image.sh -- bash WORK/2 WORK OFFSET SIZE JAIL...
#
#   INPUTS   a directory for the jail
#   OFFSET   where in the file its squashfs begins, in bytes
#   SIZE     of the writable layer, in the notation of tmpfs (4g)
#   JAIL     a command (recipes/confinement/jails.py) that shows WORK/mounts/root, and INPUTS as WORK/1

set -euo pipefail
shopt -s inherit_errexit

main() {
  local work=$1 offset=$2 size=$3 place
  shift 3
  place="${work}/mounts"
  mkdir -p -- "${place}"
  mount -t tmpfs -o "size=${size}" tmpfs "${place}"
  mkdir -- "${place}/"{image,upper,work,root}
  # shellcheck source=recipes/environments/swe/containers/mount_image.sh
  source "${work}/3"
  mount_image "${work}/0" "${offset}" "${place}/image"
  mount -t overlay -o "userxattr,lowerdir=${place}/image,upperdir=${place}/upper,workdir=${place}/work" overlay \
    "${place}/root"
  "$@"
}

# The mounts need a user namespace in which the caller is root.
if [[ $1 == --mounted ]]; then
  shift
  main "$@"
else
  exec unshare --user --map-root-user --mount -- bash "${BASH_SOURCE[0]}" --mounted "$@"
fi
