#!/usr/bin/env bash
#
# Run a command in a SIF file without Apptainer. Its file system is read-only; what the command writes goes to a layer in
# memory that ends with it. The image is not trusted: it is mounted and run without any rights on this machine.
#
# Usage: as_nobody.sh WORK IMAGE INPUTS run.sh mount_image.sh -- bash WORK/2 WORK OFFSET NETWORK SIZE COMMAND...
#
#   INPUTS   a directory that the command sees read-only as /inputs
#   OFFSET   where in the file its squashfs begins, in bytes
#   NETWORK  yes or no
#   SIZE     of the writable layer, in the notation of tmpfs (4g)

set -euo pipefail
shopt -s inherit_errexit

readonly MAX_PROCESSES=4096 # of one command; a fork bomb ends there

main() {
  local work=$1 offset=$2 network=$3 size=$4 place
  shift 4
  place="${work}/mounts"
  mkdir -p -- "${place}"
  mount -t tmpfs -o "size=${size}" tmpfs "${place}"
  mkdir -- "${place}/"{image,upper,work,root}
  # shellcheck source=recipes/environments/swe/containers/mount_image.sh
  source "${work}/3"
  mount_image "${work}/0" "${offset}" "${place}/image"
  mount -t overlay -o "userxattr,lowerdir=${place}/image,upperdir=${place}/upper,workdir=${place}/work" overlay \
    "${place}/root"

  local -a sandbox=(bwrap --unshare-all --unshare-user --cap-drop ALL --die-with-parent --new-session)
  sandbox+=(--bind "${place}/root" / --proc /proc --dev /dev --ro-bind "${work}/1" /inputs)
  sandbox+=(--chdir / --setenv HOME /root)
  [[ ${network} != yes ]] || sandbox+=(--share-net)
  # shellcheck disable=SC2016 # the shell of the image expands it
  local enter='for file in /.singularity.d/env/*.sh; do [ -f "$file" ] && . "$file"; done; exec "$@"'
  env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    prlimit --core=0 --nproc="${MAX_PROCESSES}" -- "${sandbox[@]}" /bin/sh -c "${enter}" sh "$@"
}

# The mounts need a user namespace in which the caller is root.
if [[ $1 == --mounted ]]; then
  shift
  main "$@"
else
  exec unshare --user --map-root-user --mount -- bash "${BASH_SOURCE[0]}" --mounted "$@"
fi
