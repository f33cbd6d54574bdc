#!/usr/bin/env bash
#
# Install Apptainer and the programs with which it mounts images. Runs while the image is built.
#
# Environment: APPTAINER_VERSION, DEB_ARCH (amd64 or arm64), APPTAINER_SHA256 of the package.

set -euo pipefail
shopt -s inherit_errexit

readonly RELEASES=https://github.com/apptainer/apptainer/releases/download
readonly SETTINGS=/etc/apptainer/apptainer.conf
# MiB of a container's writable layer, as rollouts use (`swe/contract.py`). Apptainer's own 64 are too few for tests.
readonly LAYER="sessiondir max size = 8192"

main() {
  local package=/tmp/apptainer.deb
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends ca-certificates curl fuse-overlayfs fuse3 \
    squashfs-tools squashfuse tmux
  curl --fail --location --silent --show-error --retry 5 --output "${package}" \
    "${RELEASES}/v${APPTAINER_VERSION}/apptainer_${APPTAINER_VERSION}_${DEB_ARCH}.deb"
  sha256sum -c <<<"${APPTAINER_SHA256}  ${package}"
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "${package}"
  rm -rf -- "${package}" /var/lib/apt/lists/*
  sed -i "s/^sessiondir max size = .*/${LAYER}/" "${SETTINGS}"
  grep -qxF "${LAYER}" "${SETTINGS}"
  ln -sfn apptainer /usr/bin/singularity # the name that Gym's agents call
}

main "$@"
