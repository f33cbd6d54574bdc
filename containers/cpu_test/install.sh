#!/usr/bin/env bash
#
# Install the programs that the tests start and the packages of the CPU lock. Runs while the image is built.

set -euo pipefail
shopt -s inherit_errexit

main() {
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends ca-certificates curl gcc git make \
    python3.11 python3.11-dev python3.11-venv
  tools/dev/test_tools.sh
  rm -rf /var/lib/apt/lists/*
  # A failed build leaves no container in which the log could be read.
  VENV=/opt/venv tools/dev/setup.sh || {
    cat /opt/venv/setup.log >&2
    exit 1
  }
  git config --system safe.directory /opt/recipe # a mounted checkout belongs to another user
}

main "$@"
