#!/usr/bin/env bash
#
# Install the programs of the sandbox and the packages that code in it may import. Runs while the image is built.

set -euo pipefail
shopt -s inherit_errexit

readonly -a TOOLS=(bash bubblewrap ca-certificates python3 util-linux)

main() {
  # The build argument lists further packages, as PACKAGES='python3-numpy python3-sympy'.
  local -a packages=()
  read -r -a packages <<<"${PACKAGES:-}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "${TOOLS[@]}" "${packages[@]}"
  rm -rf /var/lib/apt/lists/*
}

main "$@"
