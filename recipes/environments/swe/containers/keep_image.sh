#!/usr/bin/env bash
#
# Hold an image in a mount namespace that containers are started in, until standard input ends.
#
# Usage: as_nobody.sh WORK IMAGE keep_image.sh start_container.sh -- bash WORK/1 WORK OFFSET
#
#   OFFSET   where in the file IMAGE its squashfs begins, in bytes; "directory" when IMAGE is a root file system
#
# The image's files are then at WORK/image, and WORK/layer is an empty directory.

set -euo pipefail
shopt -s inherit_errexit

readonly MOUNT_STEPS=200 # of 0.05 s

main() {
  local work=$1 offset=$2
  mkdir -- "${work}/layer"
  if [[ ${offset} == directory ]]; then
    ln -s 0 "${work}/image"
  else
    mkdir -- "${work}/image"
    mount_image "${work}/0" "${offset}" "${work}/image"
  fi
  printf 'ready\n'
  read -r || true
}

# Mount a squashfs by a program of its own, without the kernel's driver: a damaged one cannot harm the kernel.
mount_image() {
  local step
  setpriv --pdeathsig KILL squashfuse -f -o "offset=$2" "$1" "$3" </dev/null >/dev/null &
  server=$!
  trap 'kill -- "${server}" 2>/dev/null && wait -- "${server}" || true' EXIT # it outlives the namespace
  for ((step = 0; step < MOUNT_STEPS; step++)); do
    if mountpoint --quiet -- "$3"; then return; fi
    kill -0 "${server}" 2>/dev/null || break
    sleep 0.05
  done
  printf 'the image cannot be mounted: is it readable to everybody, and /dev/fuse there?\n' >&2
  exit 1
}

# The mounts need a user namespace in which the caller is root.
if [[ $1 == --mounted ]]; then
  shift
  main "$@"
else
  exec unshare --user --map-root-user --mount -- bash "${BASH_SOURCE[0]}" --mounted "$@"
fi
