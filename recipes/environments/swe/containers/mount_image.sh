# shellcheck shell=bash
#
# Mount the squashfs in a SIF file; a script reads this file in a mount namespace, in which it is root.

readonly MOUNT_STEPS=200 # of 0.05 s

# mount_image FILE OFFSET PLACE: by a program of its own, without the kernel's driver: a damaged one cannot harm the
# kernel. It ends with the script, and the script ends where the file cannot be mounted.
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
