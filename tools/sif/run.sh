#!/usr/bin/env bash
#
# Run a command in a SIF file without Apptainer: its file system read-only, over it a writable layer in memory that
# ends with the command. To be started in a mount namespace of its own (unshare --mount), so that the mounts end too.
#
# Usage: unshare --mount run.sh IMAGE OFFSET WORK INPUTS NETWORK SIZE COMMAND...
#
#   OFFSET   where in the file its squashfs begins
#   WORK     an empty directory to mount in
#   INPUTS   a directory that the command sees read-only as /inputs
#   NETWORK  yes or no
#   SIZE     of the writable layer, as tmpfs takes it (4g)

set -euo pipefail
shopt -s inherit_errexit

readonly IMAGE=$1 OFFSET=$2 WORK=$3 INPUTS=$4 NETWORK=$5 SIZE=$6
shift 6

mount --make-rprivate /
mount -t tmpfs -o "size=${SIZE}" tmpfs "${WORK}"
mkdir -- "${WORK}/"{image,upper,work,root}
server=''
if ! mount -t squashfs -o "loop,ro,offset=${OFFSET}" -- "${IMAGE}" "${WORK}/image" 2>/dev/null; then
  # Its server outlives the namespace, so it is ended here.
  squashfuse -f -o "offset=${OFFSET}" "${IMAGE}" "${WORK}/image" &
  server=$!
  trap 'kill -- "${server}" 2>/dev/null || true' EXIT
  for _ in {1..100}; do
    mountpoint --quiet -- "${WORK}/image" && break
    sleep 0.05
  done
  mountpoint --quiet -- "${WORK}/image"
fi
mount -t overlay -o "lowerdir=${WORK}/image,upperdir=${WORK}/upper,workdir=${WORK}/work" overlay "${WORK}/root"

sandbox=(bwrap --bind "${WORK}/root" / --proc /proc --dev /dev --ro-bind "${INPUTS}" /inputs)
sandbox+=(--unshare-all --die-with-parent --new-session --chdir / --setenv HOME /root)
[[ ${NETWORK} == yes ]] && sandbox+=(--share-net)
# shellcheck disable=SC2016 # the shell of the image expands it
readonly ENTER='for file in /.singularity.d/env/*.sh; do [ -f "$file" ] && . "$file"; done; exec "$@"'
env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "${sandbox[@]}" /bin/sh -c "${ENTER}" sh "$@"
