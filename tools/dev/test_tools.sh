#!/usr/bin/env bash
#
# Install the system programs that the functional tests start; those already installed are left alone.
#
# Usage: tools/dev/test_tools.sh
#
# Installing needs root on Debian or Ubuntu; otherwise it prints what to install and ends with status 2.

set -euo pipefail
shopt -s inherit_errexit

# program=package
readonly TOOLS=(
  flock=util-linux ip=iproute2 pgrep=procps
  # Another user of the machine: it cannot read the Python of root.
  /usr/bin/python3=python3
  # The throw-away Slurm cluster, with accounting.
  munged=munge slurmctld=slurm-wlm slurmdbd=slurmdbd mariadbd=mariadb-server
  # Containers and sandboxes.
  bwrap=bubblewrap podman=podman buildah=buildah runc=runc mksquashfs=squashfs-tools
  debootstrap=debootstrap
  # SIF images: a registry on loopback, and the conversion that needs no Apptainer.
  docker-registry=docker-registry skopeo=skopeo umoci=umoci siftool=siftool squashfuse=squashfuse
)

missing() {
  local tool
  for tool in "${TOOLS[@]}"; do
    command -v "${tool%%=*}" >/dev/null || printf '%s\n' "${tool#*=}"
  done
  # The busybox of a minimal system may lack most of its commands.
  busybox --list >/dev/null 2>&1 || printf 'busybox-static\n'
}

main() {
  local -a packages=()
  local PATH="${PATH}:/usr/sbin:/sbin"
  mapfile -t packages < <(missing)
  wait "$!"
  ((${#packages[@]})) || return 0
  if ! command -v apt-get >/dev/null || ((EUID != 0)); then
    printf 'test_tools.sh: the functional tests need the Debian packages %s (names may differ here): %s\n' \
      "${packages[*]}" "install them, or run this once as root on Debian or Ubuntu" >&2
    exit 2
  fi
  printf 'test_tools.sh: installing %s\n' "${packages[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "${packages[@]}" >/dev/null
}

main "$@"
