#!/usr/bin/env bash
#
# Hold an image in a mount namespace that containers are started in, until standard input ends.
#
# Usage: as_nobody.sh WORK IMAGE keep_image.sh start_container.sh mount_image.sh -- bash WORK/1 WORK OFFSET
#
#   OFFSET   where in the file IMAGE its squashfs begins, in bytes; "directory" when IMAGE is a root file system
#
# The image's files are then at WORK/image, and WORK/layer is an empty directory.

set -euo pipefail
shopt -s inherit_errexit

main() {
  local work=$1 offset=$2
  mkdir -- "${work}/layer"
  if [[ ${offset} == directory ]]; then
    ln -s 0 "${work}/image"
  else
    mkdir -- "${work}/image"
    # shellcheck source=recipes/environments/swe/containers/mount_image.sh
    source "${work}/3"
    mount_image "${work}/0" "${offset}" "${work}/image"
  fi
  printf 'ready\n'
  read -r || true
}

# The mounts need a user namespace in which the caller is root.
if [[ $1 == --mounted ]]; then
  shift
  main "$@"
else
  exec unshare --user --map-root-user --mount -- bash "${BASH_SOURCE[0]}" --mounted "$@"
fi
